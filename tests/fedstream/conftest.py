"""Commands as a user gives them, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedstream.cli import app as cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fedstream` with these arguments: exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run
