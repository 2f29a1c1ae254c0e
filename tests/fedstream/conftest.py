"""Commands as a user gives them, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from fedstream.cli import app as cli
from fedstream.cli import looking, services, training

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fedstream` with these arguments: exit code, stdout and stderr."""
    for module in (looking, services, training):
        monkeypatch.setattr(module, "leave", sys.exit)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run
