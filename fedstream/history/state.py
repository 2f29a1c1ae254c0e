"""The state of a run, as its folder tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedstream.history import summary
from fedstream.history.occupied import is_occupied
from fedstream.settings import run_toml
from fedstream.settings.recording import CONFIG, SUMMARY


def stands(path: Path, finished: Callable[[], str | None]) -> tuple[str, str]:
    """The state of a run's folder or journal, and why it is that.

    ``finished``: tells why its journal says that the run is over, None if it does not; it is only
    asked if the folder doesn't say.
    """
    config, numbers = path / CONFIG, path / SUMMARY
    if path.is_dir() and is_occupied(path):
        return "running", ""
    if config.is_file() and run_toml.is_left_behind(config):
        return "interrupted", "killed"
    if numbers.exists():
        told = summary.from_file(numbers)
        return told["state"], told["why"] or ""
    if (why := finished()) is not None:
        return "finished", why
    return ("interrupted", "killed") if config.is_file() else ("unfinished", "")
