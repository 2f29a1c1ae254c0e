"""Why tasks end, as it is counted: by a closed set of reasons.

Each reason stays in a run's counts for ever, and is a label of a metric. What came off the wire in
place of one of these is told as it was said, in the event of the task's end, and counted with
others of its kind.
"""

from __future__ import annotations

import builtins

from fedstream.broker import errors

ROUND_OVER = "round over"

_RAISED = "raised "
_ERRORS = frozenset(
    one.__name__
    for space in (builtins, errors)
    for one in vars(space).values()
    if isinstance(one, type) and issubclass(one, Exception)
) | {"OutOfMemoryError", "AcceleratorError", "LinAlgError"}  # torch's
_GIVEN_UP = frozenset({"dropped out", "deadline passed", ROUND_OVER})
_DEAD = frozenset({"crashed its trainers", "crashed its coordinators"})


def of_giving_up(said: str) -> str:
    """Why a device gave its task up, by what its trainer said."""
    if said in _GIVEN_UP:
        return said
    if not said.startswith(_RAISED):
        return "another reason"
    return said if said.removeprefix(_RAISED) in _ERRORS else f"{_RAISED}another error"


def of_death(said: str) -> str:
    """Why an entry was moved to ``dead``; where not after some tries, it could not be read."""
    return said if said in _DEAD else "unreadable"
