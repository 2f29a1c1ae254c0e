"""Comparing Redis with the journal, and choosing the action that makes them agree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedstream.core.records import Head, Run, ended
from fedstream.updater.state import Change, RunState


@dataclass(frozen=True)
class Publish:
    """Publish the newest version, and the counts: Redis lacks them, or the run was extended."""

    found: str  # in Redis
    lost: bool = True  # Redis had more before


@dataclass(frozen=True)
class Refuse:
    """End the updater: Redis holds a run or a version that this journal never made."""

    found: str  # in Redis


@dataclass(frozen=True)
class Finish:
    """Record that the run was ended from outside, then compare again."""

    run: Run


@dataclass(frozen=True)
class Remake:
    """Remake the versions that Redis has and the journal lost."""

    head: Head


@dataclass(frozen=True)
class Confirm:
    """Check that the model of the newest version, which Redis has, is complete."""

    head: Head


Action = Publish | Refuse | Finish | Remake | Confirm


def action(
    state: RunState,
    run: Run | None,
    head: Head | None,
    *,
    told: Mapping[str, int],
    told_quarantines: int = 0,
    pending: Iterable[Change] = (),
) -> Action:
    """The action for Redis's ``run`` and ``head``; None for both if Redis has no run.

    ``told``: counts of committed ends. ``told_quarantines``: number of committed control entries
    about quarantines. ``pending``: journalled changes, and so part of ``state``, that are not
    committed yet.
    """
    if run is None or head is None:
        return Publish("no run")
    if run.lineage != state.run.lineage:
        return Refuse("a run of a different lineage")
    if head.version < state.version:
        return Publish(f"version {head.version}")
    there, committed = ended(head.journalled), ended(told)
    if there < committed:  # Redis forgot ends that made no version
        return Publish(f"{there} of {committed} ends")
    if head.quarantines.taken < told_quarantines:
        return Publish(f"{head.quarantines.taken} of {told_quarantines} changes of quarantines")
    pending = tuple(pending)
    extended = run.versions < state.run.versions  # and Redis doesn't have the new number yet
    if extended and (head.version, head.digest) == (state.version, state.digest):
        return Publish(f"a run of {run.versions} versions", lost=False)
    if run.state == "finished" and not state.finished and not extended:
        return Finish(run)
    if run.state != "finished" and state.finished and not pending:
        return Publish("a run that is not finished")
    if head.version > state.version:
        return Remake(head)
    if head.digest != state.digest:
        return Refuse(f"a different version {head.version} from the journal")
    if any(one.version and one.version.version < head.version for one in pending):
        # The version was republished with a lost reply, so earlier changes no longer fit the head.
        return Publish(f"version {head.version}, which is not due yet")
    return Confirm(head)
