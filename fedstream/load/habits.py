"""How devices behave: given as shares, drawn for each device and each of its tasks. Pure.

What is drawn depends on nothing but the seed, the device's number and how many tasks it had, so the
same command behaves in the same way however fast the gateway is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from fedstream.broker.errors import ConfigError

_SKEW_S = (90.0, 86_400.0)  # of a wrong clock: more than the minute that a gateway accepts
_SHARES = ("drop_outs", "vanishes", "cuts", "slow", "skewed")


@dataclass(frozen=True)
class Habits:
    """How often devices do what. Shares are from 0 to 1."""

    think_s: tuple[float, float] = (0.0, 0.0)  # from an offer to the upload, between these
    drop_outs: float = 0.0  # of tasks: given up, with the reason "dropped out"
    vanishes: float = 0.0  # of tasks: the device leaves without a word
    away_s: tuple[float, float] = (5.0, 30.0)  # then it comes back after so long
    cuts: float = 0.0  # of uploads, and of check-ins: the connection is cut once in the middle
    slow: float = 0.0  # of devices: they have a slow link
    slow_rate: float = 50_000.0  # its bytes per second, either way
    skewed: float = 0.0  # of devices: their clock is wrong until they are told so

    def __post_init__(self) -> None:
        """Raise ConfigError for what can't be drawn."""
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_option(name)} {getattr(self, name):g}: must be from 0 to 1")
        if self.drop_outs + self.vanishes > 1:
            raise ConfigError(
                f"--drop-outs {self.drop_outs:g} and --vanishes {self.vanishes:g} are shares of "
                "the same tasks: together at most 1"
            )
        for name in ("think_s", "away_s"):
            least, most = getattr(self, name)
            if not 0 <= least <= most:
                raise ConfigError(
                    f"{_option(name.removesuffix('_s'))} {least:g} {most:g}: must be two numbers "
                    "of seconds, the shorter first"
                )
        if not self.slow_rate > 0:
            raise ConfigError(f"--slow-rate {self.slow_rate:g}: must be above 0")

    def device(self, seed: int, number: int) -> Traits:
        """What a device is like."""
        rng = random.Random(f"{seed}.{number}")
        is_slow, is_skewed = rng.random() < self.slow, rng.random() < self.skewed
        skew_s = rng.uniform(*_SKEW_S) * rng.choice((-1, 1))
        return Traits(self.slow_rate if is_slow else None, skew_s if is_skewed else 0.0)

    def task(self, seed: int, number: int, tasks: int) -> Conduct:
        """What a device does with a task, after so many others."""
        rng = random.Random(f"{seed}.{number}.task.{tasks}")
        fate, cut, where = rng.random(), rng.random(), rng.random()
        return Conduct(
            think_s=rng.uniform(*self.think_s),
            drops_out=fate < self.drop_outs,
            away_s=(
                rng.uniform(*self.away_s)
                if self.drop_outs <= fate < self.drop_outs + self.vanishes
                else None
            ),
            cut_at=where if cut < self.cuts else None,
        )

    def check_in(self, seed: int, number: int, times: int) -> float | None:
        """After which part of its wait a device hangs up on a check-in; None: it doesn't."""
        if not self.cuts:
            return None
        rng = random.Random(f"{seed}.{number}.check-in.{times}")
        return rng.random() if rng.random() < self.cuts else None


@dataclass(frozen=True, slots=True)
class Traits:
    """What one device is like."""

    bytes_per_s: float | None  # None: its link is as fast as the machine
    skew_s: float  # by which its clock is ahead at first


@dataclass(frozen=True, slots=True)
class Conduct:
    """What a device does with one task."""

    think_s: float
    drops_out: bool
    away_s: float | None  # leaves without a word, for so long; None: it stays
    cut_at: float | None  # the part of the update after which the connection is cut; None: it isn't


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
