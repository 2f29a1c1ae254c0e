"""Encoded updates in a journal: kept as they were received, decoded when they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstream.core.formats import format_of, most_bytes
from fedstream.core.layout import Model, Payload
from fedstream.journal import JournalDamaged, JournalError, Segment, segments
from fedstream.journal.inspection import model_at, moves
from fedstream.journal.rebuild import recovered
from fedstream.journal.records import KNOWN, WIRE_FORMATS, Taken
from fedstream.journal.replay import Replayer
from fedstream.journal.updates import decoded, received, update_of
from fedstream.strategies import FedAsyncSettings, FedBuffSettings
from tests.journals import FORMATS, Scribe
from tests.support import layout_of

LAYOUT = layout_of(700, 2, 1)  # three blocks


def written(folder: Path, *formats: str, count: int = 6) -> Scribe:
    """Updates in these formats by turns."""
    scribe = Scribe(folder, FedBuffSettings(buffer_size=2), layout=LAYOUT)
    for n in range(count):
        scribe.update(format=formats[n % len(formats)])
    scribe.close()
    return scribe


@pytest.mark.parametrize("name", ["f32", *FORMATS, "f32+zstd", "int8+zstd"])
def test_recovery_and_replay_make_the_same_bits(folder: Path, name: str) -> None:
    scribe = written(folder, name, "f32")
    wanted = scribe.digests[3]
    assert recovered(segments(folder)[-1]).digest == wanted
    assert model_at(segments(folder), 3)[1] == wanted
    with Replayer(folder) as replayer:
        assert [one.identical for one in replayer if one.identical is not None] == [True] * 3
        assert replayer.newest == 3


def test_bytes_are_kept_as_they_were_received(folder: Path) -> None:
    written(folder, "int4", count=1)
    [segment] = segments(folder)[1:]
    [record] = segment.records()
    upload = record.entry.upload if isinstance(record.entry, Taken) else None
    assert upload is not None
    assert record.payload_bytes == upload.size == format_of("int4").sizes(LAYOUT)[0]
    model = Model(LAYOUT)
    sent = received(segment, record, model)
    assert (sent is model, sent.digest()) == (False, upload.digest)
    format_of("int4").decode(sent.buffer, model)
    assert update_of(segment, record, Model(LAYOUT)).digest() == model.digest()


def test_another_rule_gets_what_was_decoded(folder: Path) -> None:
    """Converted where it takes models; the same as from the decoded updates sent in float32."""
    written(folder, "int8")
    plain = Scribe(folder.parent / "plain", FedBuffSettings(buffer_size=2), layout=LAYOUT)
    chain = segments(folder)
    for segment in chain:
        for record in segment.records():
            model = update_of(segment, record, Model(LAYOUT))
            plain.drawn = lambda model=model: model  # type: ignore[method-assign, misc]
            plain.update()
    plain.close()
    for rule in (FedBuffSettings(buffer_size=3), FedAsyncSettings()):
        models = []
        for where in (folder, plain.folder):
            with Replayer(where, strategy=rule) as replayer:
                *_, last = replayer
                models.append(last.model.digest())
        assert models[0] == models[1]


# heads


def test_first_encoded_update_begins_a_segment_that_says_so(folder: Path) -> None:
    written(folder, "f32", "int8")
    heads = [segment.head for segment in segments(folder)]
    assert [WIRE_FORMATS in head.needs for head in heads] == [False, True]


def test_release_without_formats_refuses_the_segment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, "int8")
    monkeypatch.setattr("fedstream.journal.segment.KNOWN", KNOWN - {WIRE_FORMATS})
    with pytest.raises(JournalError, match=r"needs 'wire formats', which this release does not"):
        segments(folder)


# payloads that are not what their record says


def damaged(folder: Path, payload: Payload, name: str, **changes: object) -> Segment:
    """A segment whose only record has these bytes, as a writer gone wrong would write it."""
    scribe = Scribe(folder, layout=LAYOUT, needs=(WIRE_FORMATS,))
    about = {"format": name, "size": payload.buffer.nbytes, "digest": payload.digest()} | changes
    upload = scribe._upload(1, payload, 0, **about)
    scribe._taken(upload, payload, outcome="applied", weight=0.5, version=1, digest="d")
    scribe.close()
    return segments(folder)[-1]


def encoded(name: str) -> Payload:
    model = Model(LAYOUT)
    model.buffer[:] = 0
    model.floats[:] = np.linspace(-1, 1, LAYOUT.floats)
    return Payload(format_of(name).encoded(model))


@pytest.mark.parametrize("name", ["f32", *FORMATS, "int8+zstd"])
def test_payload_of_another_size_is_reported_with_its_place(folder: Path, name: str) -> None:
    data = encoded(name)
    segment = damaged(folder, Payload(data.buffer[:-1].copy()), name, size=data.buffer.nbytes)
    [record] = segment.records()
    with pytest.raises(JournalDamaged, match=r"\.journal.*(does not fit the layout|decoded)"):
        update_of(segment, record, Model(LAYOUT))
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match=r"\.journal"):
        list(replayer)


def test_format_of_a_later_release_is_named(folder: Path) -> None:
    segment = damaged(folder, encoded("int8"), "int2")
    [record] = segment.records()
    with pytest.raises(JournalError, match=r"int2 is none of ours.*read it with the release that"):
        update_of(segment, record, Model(LAYOUT))


def test_claimed_payload_takes_no_more_memory_than_any_format(folder: Path) -> None:
    """The frame is read before its checksum is known."""
    segment = damaged(folder, Payload.empty(most_bytes(LAYOUT) + 1), "f32")
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match="does not fit"):
        list(replayer)
    [record] = segment.records()
    with pytest.raises(JournalDamaged, match="does not fit"):
        decoded(record, Payload.empty(record.payload_bytes), Model(LAYOUT))


def test_payload_that_cannot_be_decoded_is_reported_with_its_place(folder: Path) -> None:
    data = encoded("int8")
    data.buffer[8 + 8 : 8 + 12] = np.array([np.nan], "<f4").view(np.uint8)  # the first scale
    segment = damaged(folder, data, "int8")
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match="wire scale"):
        list(replayer)
    with pytest.raises(JournalDamaged, match=r"cannot be decoded: wire scale: .* block 0 is nan"):
        list(moves(segment, None))
