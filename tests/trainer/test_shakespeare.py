"""Shakespeare's roles from small plays: who speaks, who is a device, what is trained and tested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.errors import DataError
from fedstream.trainer import texts as module
from fedstream.trainer.partitions import Iid
from fedstream.trainer.task import TaskSettings
from fedstream.trainer.texts import SYMBOLS, CharacterModel, Role, pick_roles, roles_in, shakespeare

if TYPE_CHECKING:
    from pathlib import Path

PLAY = """\
	THE PLAY


	DRAMATIS PERSONAE

DUKE	of Ephesus. (DUKE OF EPHESUS:)


SCENE	Ephesus.


	THE PLAY

ACT I


SCENE I	A hall in the DUKE's palace.


	[Enter DUKE, with
	Attendants]

DUKE	Proceed,  Solinus,
	to procure my fall

	[Sits]

	And by the doom of death [weeps] end woes.

ANTIPHOLUS
OF SYRACUSE	Plead no more.

	THE PLAY

ACT II


SCENE I	The same.

	[Thunder]

	Heard by nobody.

ANTIPHOLUS
OF EPHESUS	I am not | partial.

DUKE	No?

	EPILOGUE

	Spoken by nobody.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two plays of four long roles together, of 500, 1000, 1500 and 2000 characters."""
    folder = tmp_path / "shakespeare" / "plays"
    folder.mkdir(parents=True)
    long = [("ab" * 250, "cd" * 500), ("ef" * 750, "gh" * 1000)]
    for play, (first, second) in zip(("one", "two"), long, strict=True):
        lines = f"{play}\n\nACT I\n\nFIRST\t{first}\n\nSECOND\t{second}\n\nTHIRD\tBut short.\n"
        (folder / f"{play}.txt").write_text(lines)
    (folder / "poem.txt").write_text("SONNETS\n\nFROM fairest creatures\n")
    return tmp_path


def settings(root: Path, devices: int = 4, **more: object) -> TaskSettings:
    return TaskSettings.model_validate({"data_root": str(root), "devices": devices, **more})


def letters(numbers: torch.Tensor) -> str:
    return "".join(SYMBOLS[number] for number in numbers.flatten().tolist())


def test_role_contains_only_its_speakers_lines(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    assert roles_in(tmp_path) == [
        Role("play", "ANTIPHOLUS OF EPHESUS", "I am not | partial."),
        Role("play", "ANTIPHOLUS OF SYRACUSE", "Plead no more."),
        Role(
            "play",
            "DUKE",
            "Proceed, Solinus, to procure my fall And by the doom of death end woes. No?",
        ),
    ]


@pytest.mark.parametrize("heading", ["PROLOGUE", "INDUCTION"])
def test_play_may_start_before_its_first_act(tmp_path: Path, heading: str) -> None:
    play = f"PLAY\n\nCHORUS\tamong the persons\n\n\t{heading}\n\nCHORUS\tTwo households\n"
    (tmp_path / "play.txt").write_text(play)
    assert roles_in(tmp_path) == [Role("play", "CHORUS", "Two households")]


def test_training_windows_cover_four_fifths_and_the_rest_is_test_data(root: Path) -> None:
    task = shakespeare(settings(root))
    assert [len(task.device_data(i)) for i in range(4)] == [320, 720, 1120, 1520]
    x, y = task.device_data(1).tensors
    assert (x.shape, y.shape) == ((720, 80), (720,))
    assert x.dtype == y.dtype == torch.int64
    assert letters(x[0]) == "cd" * 40
    assert letters(x[1]) == "dc" * 40
    assert letters(y[:3]) == "cdc"
    x, y = task.test_data().tensors
    assert len(x) == 20 + 120 + 220 + 320
    assert letters(x[0]) + letters(y[0]) == "ab" * 40 + "a"
    assert letters(x[-1]) + letters(y[-1]) == "hg" * 40 + "h"


def test_no_window_spans_training_and_test_data(tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare" / "plays"
    folder.mkdir(parents=True)
    (folder / "play.txt").write_text(f"PLAY\nACT I\nSHE\t{'a' * 800}{'b' * 200}\n")
    task = shakespeare(settings(tmp_path, devices=1))
    a, b = SYMBOLS.index("a"), SYMBOLS.index("b")
    for data, only in ((task.device_data(0), a), (task.test_data(), b)):
        assert all(bool(tensor.eq(only).all()) for tensor in data.tensors)


def test_test_data_is_thinned_evenly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shakespeare(settings(root)).test_data().tensors
    monkeypatch.setattr(module, "_TESTED", 340)
    thin = shakespeare(settings(root)).test_data().tensors
    assert torch.equal(thin[0], whole[0][::2])
    assert torch.equal(thin[1], whole[1][::2])


def test_symbols_match_leaf_and_others_become_blanks() -> None:
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 80
    assert module._symbols(SYMBOLS).tolist() == list(range(80))
    assert letters(module._symbols("a|b$é\u4e00\U0001f600!")) == "a b    !"


lengths = st.lists(st.integers(0, 2000), max_size=60)


@given(lengths, st.integers(1, 60))
def test_devices_are_evenly_spaced_among_long_roles(sizes: list[int], devices: int) -> None:
    roles = [Role("play", str(number), "x" * size) for number, size in enumerate(sizes)]
    long = [size for size in sizes if size >= 405]
    if devices > len(long):
        with pytest.raises(DataError, match=rf"devices = {devices}, but {len(long)} of .* fewer"):
            pick_roles(roles, devices)
        return
    found = pick_roles(roles, devices)
    assert len({role.speaker for role in found}) == len(found) == devices
    assert found == [role for role in roles if role in found]  # in the order of the plays
    mine = sorted(len(role.text) for role in found)
    for number, size in enumerate(mine):  # each from its own stretch of the ranking
        low, high = number * len(long) // devices, -(-(number + 1) * len(long) // devices)
        assert size in sorted(long)[low:high]


def test_model_matches_afl(root: Path) -> None:
    count = 80 * 8 + 4 * 100 * (8 + 100 + 2) + 4 * 100 * (100 + 100 + 2) + 101 * 80
    assert sum(p.numel() for p in CharacterModel().parameters()) == count == 133_520
    task = shakespeare(settings(root))
    assert task.model()(task.test_data().tensors[0][:3]).shape == (3, 80)


@pytest.mark.parametrize("partition", [Iid()])
def test_partition_must_be_natural(root: Path, partition: Iid) -> None:
    with pytest.raises(
        DataError, match=f"'{partition.kind}'.*speaking role; leave out the partition"
    ):
        shakespeare(settings(root, partition=partition))


def test_missing_or_insufficient_data_is_reported(root: Path) -> None:
    with pytest.raises(DataError, match="devices = 143, but 4 of the plays' 6 roles have the 405"):
        shakespeare(TaskSettings(data_root=str(root)))
    (root / "shakespeare/plays/two.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"two.txt cannot be read as text"):
        shakespeare(settings(root))
    for file in (root / "shakespeare/plays").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"no plays \(.txt files\) in .* does not download"):
        shakespeare(settings(root))
