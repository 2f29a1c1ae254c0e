"""The closed set of reasons by which ended tasks are counted.

Each reason stays in a run's counts for ever and is a metric label. Any other text from the wire
appears verbatim in the event of the task's end, but is counted under a catch-all reason.
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
    """The reason under which to count a task that a trainer gave up, from the trainer's text."""
    if said in _GIVEN_UP:
        return said
    if not said.startswith(_RAISED):
        return "another reason"
    return said if said.removeprefix(_RAISED) in _ERRORS else f"{_RAISED}another error"


def of_death(said: str) -> str:
    """The reason under which to count an entry moved to ``dead``.

    'unreadable', unless the entry was delivered too often.
    """
    return said if said in _DEAD else "unreadable"
