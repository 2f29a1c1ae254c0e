"""What every command of `fedstream journal` says of a journal that it can't read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, initial
from tests.fedstream.history.scribes import (
    FIRST,
    SECOND,
    Command,
    contents,
    flip,
    two_segments,
)


def commands(tmp_path: Path, journal: Path) -> list[tuple[object, ...]]:
    return [
        ("show", journal),
        ("verify", journal),
        ("diff", journal, journal),
        ("stats", journal),
        ("export", journal, "--out", tmp_path / "x.safetensors"),
        ("bisect", journal, "--below", 0.5, "--task", "digits"),
    ]


def foreign(folder: Path) -> None:
    (folder / SECOND).write_text("something else")


def newer(folder: Path) -> None:
    flip(folder / SECOND, 9)  # format 258


def older(folder: Path) -> None:
    with (folder / SECOND).open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(4, "little"))


def missing(folder: Path) -> None:
    flip(folder / FIRST, 9)  # it is not even looked at
    (folder / FIRST).rename(folder / "00000000-000000.journal")


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (foreign, "is not a journal segment"),
        (newer, "format 258, but this release reads format 2: use the release that wrote it"),
        (older, "format 1, but this release reads format 2: use 0.1.0 to read it"),
        (missing, f"{FIRST}: is missing"),
        (emptied, "no journal there"),
    ],
)
def test_bad_input_is_a_one_line_error_and_changes_nothing(
    spoil: Callable[[Path], None], said: str, journal: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    two_segments(folder)
    spoil(folder)
    before = contents(tmp_path)
    for command in commands(tmp_path, folder):
        code, out, words = journal(*command)
        assert (code, out) == (1, ""), command
        assert said in words
        assert words.startswith("fedstream: ")
        assert words.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("show", "--version", "20"), 1, "version 20 does not exist yet: the newest is 12"),
        (("show", "--version", "3"), 1, "version 3 is no longer kept: the oldest is 6"),
        (("show", "--version", "x..3"), 2, "--version x..3: expected a version"),
        (
            ("show", "--outcome", "lost"),
            2,
            "--outcome lost: must be one of applied, buffered, refused, given_up",
        ),
        (("stats", "--sort", "norm"), 2, "--sort norm: must be one of device, applied"),
        (("export", "--out", "x", "--version", "3"), 1, "is no longer kept: the oldest is 6"),
        (("export", "--out", "x", "--version", "20"), 1, "version 20 is not in the journal"),
        (("export", "--out", "x"), 1, "the nearest checkpoint is version 6"),
        (("bisect", "--below", "0.5"), 1, "recorded without their weights"),
    ],
)
def test_missing_versions_and_files_are_reported(
    command: tuple[str, ...],
    code: int,
    said: str,
    journal: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "journal"
    two_segments(
        folder, weights=False, layout=initial(load_task("digits", TaskSettings()), 0).layout
    )
    (folder / FIRST).unlink()  # retired
    before = contents(tmp_path)
    name, *options = command
    found, _, words = journal(name, folder, *options)
    assert found == code
    assert said in words
    assert words.startswith("fedstream: ")
    assert words.count("\n") == 1
    assert contents(tmp_path) == before
