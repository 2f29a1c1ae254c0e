"""Messages that are read at once say what they say one by one."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from fedstream.core.messages import decode
from fedstream.journal import EntryRecord, JournalDamaged, Taken, entries, opened
from fedstream.journal.record_batches import Alike, alike
from fedstream.journal.records import KINDS
from tests.fedstream.history.scribes import FIRST, flip, two_segments
from tests.journals import GOLDEN, Scribe


def messages_in(folder: Path) -> list[bytes]:
    with opened(folder) as chain:
        batches = (batch for segment in chain for batch in segment.messages(None))
        return [message for batch in batches for message in batch.messages]


def value(entry: EntryRecord, path: Sequence[str | int]) -> Any:
    found: Any = entry
    for key in path:
        found = getattr(found, str(key)) if hasattr(found, str(key)) else found[key]
    return found


def check(messages: Sequence[bytes]) -> list[Alike]:
    """Every message is in one group, and every number of it is its own."""
    groups = list(alike(messages))
    places = np.sort(np.concatenate([group.places for group in groups]))
    assert places.tolist() == list(range(len(messages)))
    for group in groups:
        for number, place in enumerate(group.places.tolist()):
            entry = decode(messages[place], *KINDS)
            assert isinstance(entry, EntryRecord)
            assert type(entry) is type(group.sample)
            assert (entry.digest is None) == (group.sample.digest is None)
            for path, values in group.numbers.items():
                if path != ("v",):
                    assert values[number] == value(entry, path), path
            if isinstance(entry, Taken) and isinstance(group.sample, Taken):
                same = ("outcome", "reason", "finished")
                assert all(getattr(entry, one) == getattr(group.sample, one) for one in same)
    return groups


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_every_kind_of_record(tmp_path: Path, name: str) -> None:
    for packed in (GOLDEN / name).glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    with opened(tmp_path) as chain:
        segment = chain[-1]
        found = list(segment.messages(None))
        records = [record for record, _ in entries(segment, None)]
    offsets = [at for batch in found for at in batch.offsets]
    assert offsets == [record.place.offset for record in records]
    assert [batch.end for batch in found[-1:]] == [record.end for record in records[-1:]]
    check(messages_in(tmp_path) * 40)  # so that shapes are worth it


def test_numbers_that_grow_and_texts_that_differ(tmp_path: Path) -> None:
    """More digits take more bytes, so there are several shapes."""
    scribe = Scribe(tmp_path)
    for n in range(300):
        scribe.update(n * 7 % 200, trainer=f"trainer-{n % 12}", seconds=n / 7)
        if n % 50 == 49:
            scribe.refuse(reason="too stale" if n % 100 else "not finite")
    scribe.close()
    groups = check(messages_in(tmp_path))
    assert 3 < len([group for group in groups if len(group.places) > 1]) < 60


@pytest.mark.parametrize("bad", [{"weight": -1.0}, {"weight": math.inf}, {"time": 1e15}])
def test_one_number_out_of_bounds_is_found(tmp_path: Path, bad: dict[str, float]) -> None:
    scribe = Scribe(tmp_path)
    for _ in range(100):
        scribe.update()
    scribe.close()
    messages = messages_in(tmp_path)
    fields = msgpack.unpackb(messages[50])
    packed = msgpack.packb(fields | bad)
    assert isinstance(packed, bytes)
    with pytest.raises(JournalDamaged, match=next(iter(bad))):
        list(alike([*messages[:50], packed, *messages[51:]]))


def test_what_is_not_known_of_one_is_not_taken_for_another(tmp_path: Path) -> None:
    """A loss that is not a number does not hide a weight that cannot be."""
    scribe = Scribe(tmp_path)
    for n in range(100):
        scribe.update(loss=math.nan if n % 3 else 0.1 * n)
    scribe.close()
    messages = messages_in(tmp_path)
    losses = np.full(100, -1.0)
    for group in alike(messages):
        if ("upload", "loss") in group.numbers:
            losses[group.places] = group.numbers["upload", "loss"]
        else:
            losses[group.places] = value(group.sample, ("upload", "loss"))
    np.testing.assert_allclose(losses, [math.nan if n % 3 else 0.1 * n for n in range(100)])


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", b"\x81\xa1v", b"\x92\x01\x02", msgpack.packb({1: 2}), b"\xa5ab"]
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(JournalDamaged):
        list(alike([message] * 100))


def test_a_record_that_is_not_whole_ends_it(tmp_path: Path) -> None:
    two_segments(tmp_path)
    with opened(tmp_path) as chain:
        offsets = [at for batch in chain[0].messages(None) for at in batch.offsets]
        assert len(offsets) == 7
    flip(tmp_path / FIRST, offsets[3] + 200)
    with opened(tmp_path) as chain, pytest.raises(JournalDamaged, match=f"at byte {offsets[3]}"):
        list(chain[0].messages(None))
