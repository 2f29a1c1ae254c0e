"""`fedstream journal verify` and `diff`: damage, and where two journals part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.layout import Layout, Tensor
from fedstream.journal import Segment
from fedstream.strategies import FedAsyncSettings
from tests.fedstream.history.scribes import (
    FIRST,
    SECOND,
    UPDATES,
    By,
    Command,
    flip,
    two_segments,
    written,
)
from tests.journals import Scribe
from tests.support import model_of


def test_verify_an_intact_journal(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    for options in ((), ("--no-models",)):
        code, out, said = journal("verify", tmp_path, *options)
        assert (code, said) == (0, "")
        first, second, end = out.splitlines()
        assert first.startswith(f"{FIRST}  versions 0 to 6, 7 records, ")
        assert second.startswith(f"{SECOND}  versions 6 to 12, 7 records, ")
        assert end == "14 records, 13 versions, all intact"


def test_verify_a_torn_tail_is_fine(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[:-5])
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "then a torn tail of" in out
    assert out.endswith("13 records, 13 versions, all intact\n")


@pytest.mark.parametrize("options", [(), ("--no-models",)])
def test_verify_locates_damage_and_continues(
    options: tuple[str, ...], journal: Command, tmp_path: Path
) -> None:
    two_segments(tmp_path)
    with Segment(tmp_path / FIRST) as segment:
        third = list(segment.records())[2]
    flip(tmp_path / FIRST, third.payload + 3)
    code, out, said = journal("verify", tmp_path, *options)
    place = f"{tmp_path / FIRST} at byte {third.place.offset}"
    assert code == 1
    assert out.splitlines()[0] == (
        f"{FIRST}  DAMAGED: {place}: the update does not match its digest (device 2, version 3)"
    )
    assert out.splitlines()[1].startswith(f"{SECOND}  versions 6 to 12, 7 records, ")
    assert "all intact" not in out
    assert said == f"fedstream: {tmp_path}: 1 of 2 segments damaged\n"
    found = json.loads(journal("verify", tmp_path, "--json", *options)[1])
    assert found["whole"] is False
    assert place in found["segments"][0]["damage"]


def test_verify_a_damaged_record_and_a_damaged_checkpoint(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    with Segment(tmp_path / FIRST) as segment:
        second = list(segment.records())[1]
    flip(tmp_path / FIRST, second.place.offset + 40)
    with Segment(tmp_path / SECOND) as segment:
        checkpoint = segment.standing_record
    flip(tmp_path / SECOND, checkpoint.payload)
    code, out, said = journal("verify", tmp_path)
    assert code == 1
    first, last = out.splitlines()
    assert f"damaged record: {tmp_path / FIRST} at byte {second.place.offset}" in first
    assert f"{SECOND} at byte {checkpoint.place.offset}: the checkpoint's model" in last
    assert "2 of 2 segments damaged" in said


def test_verify_compares_models_unless_told_not_to(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedAsyncSettings(alpha=0.3))
    scribe.strategy = FedAsyncSettings(alpha=0.2)  # not what the segment's head says
    scribe.update()
    scribe.close()
    code, out, _ = journal("verify", tmp_path)
    assert code == 1
    said = "version 1 is not reproduced: weight 0.3, the journal says weight 0.2"
    assert said in out
    assert journal("verify", tmp_path, "--no-models")[0] == 0


def test_verify_names_ignored_segments(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    fenced = tmp_path / "00000002-000000.journal"
    scribe.segment(epoch=2)
    scribe.update()
    scribe.close()
    # The third epoch never saw the second: it went on from the first, whose writer then woke up.
    data = fenced.read_bytes()
    fenced.unlink()
    with Segment(tmp_path / FIRST) as segment:
        *_, last = segment.records()
    again = Scribe(tmp_path, epoch=3, predecessor=FIRST, cut=last.end, follows=last.chain.hex())
    again.close()
    fenced.write_bytes(data)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(b"late words")
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "10 bytes after its successor's cut are ignored" in out
    assert f"{fenced.name}  ignored" in out


def test_verify_segments_must_join(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.digests[1] = model_of(scribe.layout, 1.0).digest()
    scribe.progress.state.model.floats[:] = 1.0
    scribe.segment()
    scribe.close()
    code, out, _ = journal("verify", tmp_path)
    assert code == 1
    assert f"{SECOND}" in out.splitlines()[1]
    assert "begins with version 1" in out


def test_verify_without_weights(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path, weights=False)
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "updates without weights: not all models could be rebuilt" in out


@pytest.mark.parametrize(
    ("updates", "about", "version", "why", "said"),
    [
        (UPDATES, {}, None, "same", "identical, versions 0 to 4"),
        (UPDATES[:2], {}, 3, "prefix", "identical up to version 2, where B ends"),
        (
            ((1, 1.0), (2, 2.0), (3, 9.0), (4, 4.0)),
            {},
            3,
            "update",
            "different updates: device 3 (task task-2",
        ),
        (
            ((1, 1.0), (3, 3.0), (2, 2.0), (4, 4.0)),
            {},
            2,
            "order",
            "the same updates in a different order: device 2",
        ),
        (
            UPDATES,
            {"strategy": FedAsyncSettings(alpha=0.3)},
            1,
            "weight",
            "in A (staleness 0) and 0.3 in B (staleness 0); strategy.alpha is 0.4 in A, 0.3 in B",
        ),
    ],
)
def test_diff(
    updates: tuple[tuple[int, float], ...],
    about: dict[str, Any],
    version: int | None,
    why: str,
    said: str,
    journal: Command,
    tmp_path: Path,
) -> None:
    a, b = written(tmp_path / "a", *UPDATES), written(tmp_path / "b", *updates, **about)
    code, out, _ = journal("diff", a, b)
    assert code == (version is not None)
    assert said in out
    assert out.startswith(f"version {version}: " if version is not None else "identical")
    found = json.loads(journal("diff", a, b, "--json")[1])
    assert (found["why"], found["version"], found["first"]) == (why, version, 0)


def test_diff_of_different_starts(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "a")
    two_segments(tmp_path / "b", seed=1)
    code, out, _ = journal("diff", tmp_path / "a", tmp_path / "b")
    assert (code, out) == (1, "version 0: the initial models differ: seeds 0 and 1\n")


def test_diff_starts_at_the_first_common_version(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "a")
    two_segments(tmp_path / "b")
    (tmp_path / "b" / FIRST).unlink()  # retired
    assert journal("diff", tmp_path / "a", tmp_path / "b")[1] == "identical, versions 6 to 12\n"
    code, out, _ = journal("diff", tmp_path / "a" / FIRST, tmp_path / "b")
    assert (code, out) == (1, "version 7: identical up to version 6, where A ends\n")


def test_diff_without_a_version_in_common(journal: Command, tmp_path: Path) -> None:
    written(tmp_path / "a", UPDATES[0])
    two_segments(tmp_path / "b")
    (tmp_path / "b" / FIRST).unlink()
    code, _, said = journal("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "no version in common: 0..1 and 6..12" in said


def test_diff_where_one_continued_from_redis(journal: Command, tmp_path: Path) -> None:
    written(tmp_path / "a", *UPDATES)
    b = By(tmp_path / "b", model_of(Layout((Tensor("w", (2,), "float32", "parameter"),)), 0.0))
    b.brings(1, 1.0)
    b.adopt()
    b.close()
    found = json.loads(journal("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert (found["why"], found["version"]) == ("adopted", 2)
