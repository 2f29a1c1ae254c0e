"""Error feedback that is right, and each way in which it can be wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstream.core.formats import fed_back, format_of
from fedstream.core.layout import Model
from tests.chaos.arithmetic import Shape, Vector
from tests.chaos.effects import Answer, Life
from tests.chaos.pages import digest_of
from tests.chaos.unsent import disagreements
from tests.support import layout_of

COUNT = 300
SHAPE = Shape(COUNT, 0, 0)
LAYOUT = layout_of(COUNT)
NAMES = ("int4", "topk:0.1", "topk:0.01+zstd")


def made(number: int) -> Vector:
    """What a device trained for a task."""
    drawn = np.random.default_rng(number).standard_normal(COUNT)
    return drawn.astype(np.float32)


def answered(number: int, name: str, before: bytes | None, **changes: Any) -> Answer:
    """An answer to task ``number`` of device 4, as it should be."""
    model = Model(LAYOUT)
    model.floats[:] = made(number)
    memory = None if before is None else np.frombuffer(before, np.float32)
    sent, left, _ = fed_back(model, memory, format_of(name))
    upload = {
        "task": str(number),
        "attempt": "a",
        "device": 4,
        "tau": 0,
        "base": "b",
        "format": name,
        "digest": digest_of(sent.tobytes()),
    }
    unsent = left.tobytes()
    return replace(Answer(upload, sent.tobytes(), before, unsent, unsent), **changes)


def found(*answers: Answer, was_full: bool = False, fell_back: bool = False) -> list[str]:
    """What is wrong with these answers."""
    nothing = bytes(4 * COUNT)
    notes = {
        (str(number), 0, "b"): {"began": nothing, "ended": made(number).tobytes()}
        for number in range(5)
    }
    life = Life(fell_back, answers=[*answers])
    return list(disagreements([life], notes, SHAPE, was_full=was_full))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A format with error feedback."""
    return str(request.param)


def test_a_devices_updates_pass_on_what_they_leave(name: str) -> None:
    first = answered(0, name, None)
    second = answered(1, name, first.after)
    assert found(first, second, answered(2, name, second.after)) == []


def test_what_is_sent_twice_is_found(name: str) -> None:
    """The second update has in it what the first one sent already, and Redis forgot nothing."""
    before = answered(0, name, None).after
    first = answered(1, name, before)
    twice = replace(answered(2, name, before), before=first.after)
    assert "not what was trained and kept before" in "".join(found(first, twice))
    assert found(first, twice, fell_back=True) == []


def test_what_is_forgotten_is_found(name: str) -> None:
    first = answered(0, name, None)
    anew = replace(answered(1, name, None), before=first.after)
    assert "not what was trained and kept before" in "".join(found(first, anew))


def test_what_is_lost_is_found_unless_there_was_no_room(name: str) -> None:
    lost = answered(0, name, None, staged=None, after=None)
    assert found(lost) == ["task 0 of device 4: what it left unsent was lost"]
    assert found(lost, was_full=True) == []


def test_a_format_without_feedback_leaves_it_alone() -> None:
    plain = {"task": "0", "attempt": "a", "device": 4, "format": "int8"}
    assert found(Answer(plain, b"", b"kept", None, b"kept")) == []
    assert found(Answer(plain, b"", b"kept", None, None)) != []
