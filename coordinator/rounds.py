"""Rounds: how many devices one asks, when it is over, and what becomes of one with too few answers.

Pure functions, by which the scheduler and the simulation go alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedstream.runtime.config import Section


class Rounds(Section):
    """Rounds of k devices, all of which train from one version.

    A round is over when as many have answered as the strategy takes for a version; at the time-out,
    if at least ``min_answers`` have; or when all have that there are. Only its own answers count:
    what comes later is too stale. At a time-out with fewer answers the round goes on for as long
    again: those that have not answered are given up, others are asked, and the answers stay.

    No device answers twice in a round: where k is more than the devices there are, or than memory
    has room for, a round is of so many.
    """

    kind: Literal["rounds"] = "rounds"
    k: Annotated[int, Field(ge=1)] | None = None
    """None: as many as the strategy takes for a version; more: the slowest are not waited for"""
    min_answers: Annotated[int, Field(ge=1)] = 1
    """without which no version is made"""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @property
    def size(self) -> int:
        """k. The configuration fills it in where it is not given (``Settings.policy``)."""
        if self.k is None:
            raise RuntimeError("rounds without a size: the strategy's batch was not filled in")
        return self.k


@dataclass(frozen=True, slots=True)
class Round:
    """A round as it stands."""

    wanted: int
    """answers that it can have: k, or as many as there are devices or is room for"""
    answered: int
    """answers that were taken in"""
    at_work: int
    """tasks that may be answered yet"""
    since: float
    """when it was begun, or went on after a time-out"""
    coming: int = 0
    """answers that are not taken in yet"""


Verdict: TypeAlias = Literal["goes on", "over", "again"]


def verdict(policy: Rounds, it: Round, now: float) -> Verdict:
    """What becomes of a round now.

    'over': a version is made of what has arrived. 'again': its time is up with too few answers, and
    it goes on from here with other devices.
    """
    enough = it.answered >= policy.min_answers
    if now >= it.since + policy.timeout_s:
        if enough:
            return "over"
        return "goes on" if it.coming else "again"  # first those that are there are counted
    # Nobody is left to ask, and the strategy would wait for more.
    complete = it.answered >= it.wanted and not it.at_work
    return "over" if enough and complete and it.wanted < policy.size else "goes on"


def wanted(policy: Rounds, devices: int, room: int | None) -> tuple[int, str]:
    """(answers that a round can have, why they are fewer) with so many devices and updates' room.

    At least 1; ``min_answers`` where there are devices for them: they need not all be there at the
    same time. Queue and staleness can't hold a round back: the queue waits for its answers.
    """
    k = max(1, min(policy.size, devices))
    if room is None or room >= k:
        return k, ""
    return max(1, room, min(policy.min_answers, k)), "memory"
