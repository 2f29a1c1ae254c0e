"""Commands as a user gives them, run in this process; and a run in which one update is poison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Device 7 pushes a scaled model at version 23 of 30, of the task digits."""
    import torch

    from tests.fedstream.history.scribes import Digits

    torch.set_num_threads(1)  # more would wait for each other on models as small as this
    folder = tmp_path_factory.mktemp("poisoned")
    scribe = Digits(folder / "journal")
    for version in range(1, 31):
        scribe.learns(7 if version == 23 else version % 5, -1000.0 if version == 23 else 1.0)
        if version == 20:
            scribe.segment()
    scribe.close()
    return folder
