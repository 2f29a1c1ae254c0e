"""What services say to each other survives the way, and what is no message says why."""

from __future__ import annotations

import uuid
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstream.core.errors import BadMessage
from fedstream.core.messages import (
    SCHEMA,
    Assignment,
    CloseRound,
    Dead,
    Event,
    GiveUp,
    Message,
    RoundEnd,
    Trigger,
    Upload,
    Version,
    Withdraw,
    decode,
    task_id,
)
from tests.broker.test_skew import GOLDEN

KINDS = (Trigger, CloseRound, Withdraw, Assignment, Upload, GiveUp, RoundEnd, Version, Event, Dead)

messages = st.sampled_from([message for message in GOLDEN.values() if type(message) in KINDS])


@given(st.binary(max_size=200))
def test_junk_is_a_bad_message(junk: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(BadMessage):
            kind.decode(junk)


# What msgpack can say, and nobody of ours does.
strange = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=5)),
    lambda one: (
        st.lists(one, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=3), one, max_size=3)
    ),
    max_leaves=6,
)


@given(messages, st.data())
@settings(max_examples=60)
def test_unusual_fields_are_rejected_or_round_trip(message: Message, data: st.DataObject) -> None:
    kind = type(message)
    names = st.sampled_from([*kind.model_fields, "of a later release"])
    changes = data.draw(st.dictionaries(names, strange, min_size=1, max_size=3))
    try:
        read = kind.decode(msgpack.packb(msgpack.unpackb(message.encode()) | changes))
    except BadMessage:
        return
    assert kind.decode(read.encode()).encode() == read.encode()


@given(messages, st.data())
def test_truncated_message_is_a_bad_message(message: Message, data: st.DataObject) -> None:
    whole = message.encode()
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadMessage):
        type(message).decode(whole[:end])


def packed(**fields: Any) -> bytes:
    data = msgpack.packb({"v": SCHEMA, "k": "round_end", "version": 3} | fields)
    assert isinstance(data, bytes)
    return data


def test_unknown_fields_are_ignored_and_missing_ones_default() -> None:
    assert RoundEnd.decode(packed(colour="red")) == RoundEnd(version=3, why="")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (msgpack.packb({"v": 1, "k": "round_end"}), "round_end: version: Field required"),
        (packed(v=2), "schema 2, but this release reads 1"),
        (packed(v="1"), "expected a map with the schema version 'v'"),
        (packed(v=None), "expected a map with the schema version 'v'"),
        (msgpack.packb([1, 2]), "expected a map with the schema version 'v'"),
        (packed(k="upload"), "a message of kind 'upload', expected round_end"),
        (packed(k=None), "a message of kind None, expected round_end"),
        (packed(k="x" * 10**6), r"a message of kind 'x{12}\.\.\.x{13}', expected round_end"),
        (b"\x82\xa1v\x01\xa1k" + b"\x91" * 900 + b"\x01", r"a message of kind \(+\.\.\."),
        (b"\x91" * 10**5 + b"\x01", "not msgpack: StackError"),
        (packed(version=-1), "round_end: version: Input should be greater than or equal to 0"),
        (packed(version="3"), "round_end: version: Input should be a valid integer"),
        (packed(version=3.0), "round_end: version: Input should be a valid integer"),
        (b"", "not msgpack"),
        (packed() + b"\x00", "not msgpack"),
    ],
)
def test_a_bad_message_says_what_is_wrong_with_it(data: bytes, says: str) -> None:
    with pytest.raises(BadMessage, match=says):
        RoundEnd.decode(data)


def test_decode_accepts_several_kinds_and_names_them_all_in_errors() -> None:
    assert decode(packed(), Upload, RoundEnd) == RoundEnd(version=3)
    with pytest.raises(BadMessage, match="expected upload or give_up"):
        decode(packed(), Upload, GiveUp)


@pytest.mark.parametrize(
    ("task", "attempt"),
    [("a|b", "1"), ("a.b", "1"), ("a", "1|applied"), ("a", ""), ("", "1"), ("a", "x" * 201)],
)
def test_task_and_attempt_cannot_name_another_blob_or_outcome(task: str, attempt: str) -> None:
    # 'a.b' with attempt 'c' and 'a' with attempt 'b.c' would share the blob 'a.b.c'; the ledger
    # remembers ended tasks as 'task|attempt|outcome'.
    good = GiveUp(task="a", attempt="1", device=0, trainer="t", reason="tired")
    fields = msgpack.unpackb(good.encode()) | {"task": task, "attempt": attempt}
    with pytest.raises(BadMessage):
        GiveUp.decode(msgpack.packb(fields))


def test_a_task_asks_for_what_its_trigger_asked_for() -> None:
    trigger = Trigger(task="a", device=1, seed=2, steps=3, version=4, deadline=5.0, why="round")
    task = Assignment.decode(trigger.assignment())
    shared = Assignment.model_fields.keys()
    assert task.model_dump() == {k: v for k, v in trigger.model_dump().items() if k in shared}


def test_task_ids_are_time_ordered_version_7_uuids() -> None:
    assert task_id(0x0123456789AB, b"\xff" * 10) == "01234567-89ab-7fff-bfff-ffffffffffff"
    assert task_id(0x0123456789AB, b"\x00" * 10) == "01234567-89ab-7000-8000-000000000000"
    made = [task_id(milliseconds) for milliseconds in (1, 2, 1 << 20, 1 << 47)]
    assert made == sorted(made)
    assert {(uuid.UUID(one).version, uuid.UUID(one).variant) for one in made} == {
        (7, uuid.RFC_4122)
    }


def test_task_ids_of_the_same_millisecond_differ() -> None:
    assert len({task_id(5) for _ in range(1000)}) == 1000
