"""What the updater does about what it finds in Redis: a table, without Redis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedstream.core.records import Head, Quarantines, Run
from fedstream.updater.reconcile import Action, Confirm, Finish, Publish, Refuse, Remake, action
from fedstream.updater.state import Change, RunState
from tests.updater.states import applied, refused, run_of, state_of

OVER = run_of(state="finished", why="target", finished=9.0)
STATE = state_of(5)
FINISHED = STATE.ended(OVER)
EXTENDED = STATE.ended(run_of(versions=200))


def head_of(version: int = 5, digest: str = "", **ends: int) -> Head:
    """What Redis says of its newest version."""
    digest = digest or f"digest {version}"
    return Head(version, digest, f"{version}.1.x", 2.5, 1, journalled=ends)


@dataclass(frozen=True)
class Case:
    """What is in Redis and in the journal, and what is to be done."""

    name: str
    expected: Action
    head: Head | None = field(default_factory=head_of)
    run: Run | None = field(default_factory=run_of)
    state: RunState = STATE
    told: dict[str, int] = field(default_factory=dict)
    told_quarantines: int = 0
    pending: tuple[Change, ...] = ()


CASES = (
    Case("agree", Confirm(head_of())),
    Case("no-run", Publish("no run"), head=None, run=None),
    Case("no-head", Publish("no run"), head=None),
    Case("older-version", Publish("version 4"), head=head_of(4)),
    Case("newer-version", Remake(head_of(7)), head=head_of(7)),
    Case(
        "another-lineage",
        Refuse("a run of a different lineage"),
        run=run_of(lineage="theirs"),
    ),
    Case(
        "another-lineage-counts-before-its-version",
        Refuse("a run of a different lineage"),
        run=run_of(lineage="theirs"),
        head=head_of(4),
    ),
    Case(
        "another-digest", Refuse("a different version 5 from the journal"), head=head_of(5, "other")
    ),
    # Ends that made no version: only their number shows that Redis fell back.
    Case(
        "forgotten-ends",
        Publish("2 of 3 ends"),
        head=head_of(applied=2),
        told={"applied": 2, "refused": 1, "refused:digest": 1},
    ),
    Case(
        "all-ends",
        Confirm(head_of(applied=2, refused=1)),
        head=head_of(applied=2, refused=1),
        told={"applied": 2, "refused": 1},
    ),
    Case(
        "forgotten-quarantine",
        Publish("1 of 2 changes of quarantines"),
        head=replace(head_of(), quarantines=Quarantines(1)),
        told_quarantines=2,
    ),
    # What is pending was not told yet, so Redis need not have its ends.
    Case("pending-ends", Confirm(head_of()), pending=(refused("a", 5),)),
    # Somebody ends the run.
    Case("ended", Finish(OVER), run=OVER),
    Case("ended-and-known", Confirm(head_of()), run=OVER, state=FINISHED),
    Case("ended-with-a-pending-change", Finish(OVER), run=OVER, pending=(refused("a", 5),)),
    Case("ended-while-the-journal-lost-its-end", Finish(OVER), run=OVER, head=head_of(7)),
    Case("ended-but-fallen-back", Publish("version 4"), run=OVER, head=head_of(4)),
    Case("end-forgotten", Publish("a run that is not finished"), state=FINISHED),
    Case("end-pending", Confirm(head_of()), state=FINISHED, pending=(refused("a", 5),)),
    # The run is to have more versions than Redis knows of.
    Case("extended", Publish("a run of 100 versions", lost=False), state=EXTENDED),
    Case(
        "extended-after-its-end",
        Publish("a run of 100 versions", lost=False),
        run=OVER,
        state=EXTENDED,
    ),
    Case("extended-and-behind", Publish("version 4"), run=OVER, head=head_of(4), state=EXTENDED),
    Case(
        "extended-while-the-journal-lost-its-end",
        Remake(head_of(7)),
        run=OVER,
        head=head_of(7),
        state=EXTENDED,
    ),
    Case(
        "extended-and-another-digest",
        Refuse("a different version 5 from the journal"),
        run=OVER,
        head=head_of(5, "other"),
        state=EXTENDED,
    ),
    # Our newest version was published again and the reply lost, with older ones pending.
    Case(
        "before-its-turn",
        Publish("version 5, which is not due yet"),
        pending=(applied("a", 4), applied("b", 5)),
    ),
    Case("in-turn", Confirm(head_of()), pending=(applied("b", 5),)),
    Case("pending-and-behind", Publish("version 3"), head=head_of(3), pending=(applied("b", 5),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_action(case: Case) -> None:
    found: dict[str, Any] = {
        "told": case.told,
        "told_quarantines": case.told_quarantines,
        "pending": case.pending,
    }
    assert action(case.state, case.run, case.head, **found) == case.expected


def test_finish_is_requested_only_once() -> None:
    """The loop compares again after it, so another Finish would be lost."""
    todo = action(STATE, OVER, head_of(), told={})
    assert isinstance(todo, Finish)
    assert action(STATE.ended(todo.run), OVER, head_of(), told={}) == Confirm(head_of())


def test_earlier_comparisons_do_not_change_the_action() -> None:
    compared = replace(STATE, compared=7, ahead=head_of(6))
    assert action(compared, run_of(), head_of(6), told={}) == Remake(head_of(6))
    assert action(compared, run_of(), head_of(5), told={}) == Confirm(head_of(5))
