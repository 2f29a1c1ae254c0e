"""Comparing Redis with the journal: what has to be done so that they agree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedstream.broker.records import Head, Run, ended
from fedstream.updater.state import Change, RunState


@dataclass(frozen=True)
class Publish:
    """Publish the newest version, and the counts: Redis lacks them."""

    found: str  # in Redis


@dataclass(frozen=True)
class Refuse:
    """End: Redis holds something that this journal never made."""

    found: str  # in Redis


@dataclass(frozen=True)
class Finish:
    """Take over the end of the run, then compare again: someone else ended it."""

    run: Run


@dataclass(frozen=True)
class Remake:
    """Make the versions again that Redis has and the journal lost."""

    head: Head


@dataclass(frozen=True)
class Confirm:
    """Redis has the newest version: check that its model is there."""

    head: Head


Action = Publish | Refuse | Finish | Remake | Confirm


def action(
    state: RunState,
    run: Run | None,
    head: Head | None,
    *,
    told: Mapping[str, int],
    pending: Iterable[Change] = (),
) -> Action:
    """What to do about ``run`` and ``head``, which Redis has; None for both if it has no run.

    ``told``: counts of the ends that were committed. ``pending``: changes that are in the journal,
    and so in ``state``, but not committed yet.
    """
    if run is None or head is None:
        return Publish("no run")
    if run.lineage != state.run.lineage:
        return Refuse("a run of a different lineage")
    if head.version < state.version:
        return Publish(f"version {head.version}")
    there, committed = ended(head.journalled), ended(told)
    if there < committed:  # the ends that Redis forgot made no version
        return Publish(f"{there} of {committed} ends")
    pending = tuple(pending)
    if run.state == "finished" and not state.finished:
        return Finish(run)
    if run.state != "finished" and state.finished and not pending:
        return Publish("a run that is not finished")
    if head.version > state.version:
        return Remake(head)
    if head.digest != state.digest:
        return Refuse(f"a different version {head.version} from the journal")
    if any(one.version and one.version.version < head.version for one in pending):
        # It was republished and the reply lost: changes before it no longer fit the head.
        return Publish(f"version {head.version}, which is not due yet")
    return Confirm(head)
