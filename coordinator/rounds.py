"""Rounds: their size, their end, and the handling of too few answers.

Pure functions, used by the scheduler and the simulation alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedstream.runtime.config import NamedSettings


class Rounds(NamedSettings):
    """Rounds of k devices that all train from the same version.

    A round ends when the strategy has enough answers for a version; at the time-out, if there are
    at least ``min_answers``; or when all available devices have answered. Later answers are too
    stale and don't count. At a time-out with fewer answers the round is extended by the same time:
    unanswered tasks are given up, other devices are asked, and the answers so far are kept. Or
    the round is dropped with its answers, as in FedAsync's description of synchronous training,
    and a new round begins from the same version.

    No device answers twice in a round, so a round has at most as many answers as there are devices.
    Memory may limit this number further.
    """

    kind: Literal["rounds"] = "rounds"
    k: Annotated[int, Field(ge=1)] | None = None
    """devices in a round; None: as many as the strategy needs for a version; with more, the
    slowest are not awaited"""
    min_answers: Annotated[int, Field(ge=1)] = 1
    """fewest answers for a version"""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    too_few: Literal["extend", "drop"] = "extend"
    """what to do with a round that timed out with fewer answers than ``min_answers``"""

    @property
    def size(self) -> int:
        """``k``, which the configuration fills in if missing (``Settings.policy``)."""
        if self.k is None:
            raise RuntimeError("Rounds.k is not set: take the policy from Settings.policy")
        return self.k


@dataclass(frozen=True, slots=True)
class Round:
    """The state of a round."""

    wanted: int
    """answers that the round can get: k, or fewer for lack of devices or memory"""
    answered: int
    """answers that the updater has buffered"""
    at_work: int
    """tasks that may still be answered"""
    since: float
    """beginning of the round, or of its extension after a time-out"""
    coming: int = 0
    """answers still in the queue"""


RoundVerdict: TypeAlias = Literal["goes on", "over", "again", "dropped"]


def verdict(policy: Rounds, it: Round, now: float) -> RoundVerdict:
    """Decide whether a round goes on: 'goes on', 'over', 'again' or 'dropped'.

    'over': a version is made of the answers so far. After a time-out with too few answers, 'again':
    the round continues from now with other devices; 'dropped': the answers are not used.
    """
    enough = it.answered >= policy.min_answers
    if now >= it.since + policy.timeout_s:
        if enough:
            return "over"
        if it.coming:
            return "goes on"  # the queued answers count first
        return "dropped" if policy.too_few == "drop" and it.answered else "again"
    # No device is left to ask, but the strategy would wait for more answers.
    complete = it.answered >= it.wanted and not it.at_work
    return "over" if enough and complete and it.wanted < policy.size else "goes on"


def wanted(policy: Rounds, devices: int, room: int | None) -> tuple[int, str]:
    """The number of answers that a round can get, and the limit that reduces it ('': none).

    ``room``: updates that memory has room for; None: no known limit. The number is at least 1, and
    at least ``min_answers`` if there are enough devices, as the updates need not all be in memory
    at once. Limits on queue and staleness don't apply: the queue waits for the round's answers.
    """
    k = max(1, min(policy.size, devices))
    if room is None or room >= k:
        return k, ""
    return max(1, room, min(policy.min_answers, k)), "memory"
