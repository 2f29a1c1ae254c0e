"""Error feedback: what was sent and what is kept is what was trained and what was kept before.

From Redis's own file: each answer of a trainer of the pool, what was kept for its device before it
and after. From the trainers' notes: what was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tests.chaos.account import Note, Notes
from tests.chaos.arithmetic import Shape, Vector
from tests.chaos.effects import Answer, Life
from tests.chaos.formats import decoded, feeds_back, fits
from tests.chaos.pages import digest_of


def disagreements(
    lives: Sequence[Life], notes: Notes, shape: Shape, *, was_full: bool
) -> Iterator[str]:
    """What does not agree with the notes, each answer once.

    ``shape``: the journal's. ``was_full``: Redis was, so that there was no room for what updates
    left unsent.
    """
    if not shape.parameters:
        return  # the journal is so damaged that it has none, which is a complaint of its own
    ever = defaultdict[int, set[bytes | None]](lambda: {None})
    told = set[tuple[str, str]]()
    for life in lives:
        for answer in life.answers:
            upload = answer.upload
            known, one = ever[upload["device"]], (upload["task"], upload["attempt"])
            if one not in told:
                told.add(one)
                # If Redis fell back, the update may have begun with what was kept before that.
                begins = known | {answer.before} if life.fell_back else {answer.before}
                for what in _wrong(answer, notes, begins, shape, was_full or life.fell_back):
                    yield f"task {upload['task']} of device {upload['device']}: {what}"
            known |= {answer.before, answer.after}


def _wrong(
    answer: Answer, notes: Notes, begins: set[bytes | None], shape: Shape, may_be_lost: bool
) -> Iterator[str]:
    upload, data = answer.upload, answer.data
    name = upload.get("format", "f32")
    if not feeds_back(name):
        if answer.after != answer.before:
            yield f"sent in {name}, it changed what is kept"
        return
    note = notes.get((upload["task"], upload["tau"], upload["base"]))
    if note is None or data is None or digest_of(data, upload["digest"]) != upload["digest"]:
        yield "no trainer made this update, or its bytes are not there"
        return
    sent = decoded(name, data, shape)[: shape.parameters]
    if not any(_agrees(answer, name, _wanted(note, one, shape), sent) for one in begins):
        yield "what is sent and kept is not what was trained and kept before"
    if answer.after != answer.staged:
        yield "what it left unsent was not kept with its answer"
    if answer.staged is None and not may_be_lost:
        yield "what it left unsent was lost"


def _wanted(note: Note, before: bytes | None, shape: Shape) -> Vector:
    """What a device has to send."""
    began, ended = (
        np.frombuffer(note[name], np.float32)[: shape.parameters] for name in ("began", "ended")
    )
    made: Vector = ended - began
    return made if before is None else made + np.frombuffer(before, np.float32)


def _agrees(answer: Answer, name: str, wanted: Vector, sent: Vector) -> bool:
    only = Shape(len(wanted), 0, 0)
    if not fits(name, sent, wanted, only, at_random=False):
        return False
    return answer.staged is None or answer.staged == (wanted - sent).tobytes()
