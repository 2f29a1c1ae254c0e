"""A sweep's search space: keys with values or ranges, as a grid or drawn at random. Pure."""

from __future__ import annotations

import itertools
import math
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fedstream.core.errors import ConfigError

SweptKeys: TypeAlias = dict[str, object]
"""Configuration keys, and the values that a sweep gives them."""

_RANGE = re.compile(r"(?P<low>[^,\[\]]+?)\.\.(?P<high>[^,\[\]:]+)(?P<log>:log)?")
_HOW = (
    "expected KEY=A,B,C, KEY=[A, B, C] or, with --random, KEY=LOW..HIGH or KEY=LOW..HIGH:log, as "
    "in --over solver.lr=0.01,0.1"
)


@dataclass(frozen=True, slots=True)
class Values:
    """A key with a list of values."""

    key: str
    values: tuple[object, ...]

    def draw(self, rng: random.Random) -> object:
        """Draw one of the values uniformly."""
        return rng.choice(self.values)


@dataclass(frozen=True, slots=True)
class Range:
    """A key with a range of numbers from ``low`` to ``high``, both included."""

    key: str
    low: float
    high: float
    log: bool = False
    """draw uniformly in the logarithm"""

    def draw(self, rng: random.Random) -> float:
        """Draw a number from the range; an integer if both ends are integers."""
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return rng.randint(self.low, self.high)
        if not self.log:
            return rng.uniform(self.low, self.high)
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        drawn = min(max(drawn, self.low), self.high)
        return round(drawn) if isinstance(self.low, int) and isinstance(self.high, int) else drawn


Axis: TypeAlias = Values | Range


def axis(text: str) -> Axis:
    """Parse ``KEY=A,B,C``, ``KEY=[A, B]``, ``KEY=LOW..HIGH`` or ``KEY=LOW..HIGH:log``.

    Values are TOML, or else strings. Raises ConfigError.
    """
    key, equals, given = (part.strip() for part in text.partition("="))
    if not key or not equals or not given:
        raise ConfigError(f"--over {text}: {_HOW}")
    if found := _RANGE.fullmatch(given):
        return _range(key, text, found)
    if given.startswith("["):
        values = _value(given)
        if not isinstance(values, list):
            raise ConfigError(f"--over {text}: not a TOML array; {_HOW}")
    else:
        values = [_value(part.strip()) for part in given.split(",")]
    if not values or "" in values:
        raise ConfigError(f"--over {text}: a value is missing; {_HOW}")
    if any(value in values[:n] for n, value in enumerate(values)):
        raise ConfigError(f"--over {text}: the same value twice")
    return Values(key, tuple(values))


def _range(key: str, text: str, found: re.Match[str]) -> Range:
    low, high = _number(found["low"].strip(), text), _number(found["high"].strip(), text)
    if not low < high:
        raise ConfigError(f"--over {text}: {low} is not below {high}")
    if found["log"] and low <= 0:
        raise ConfigError(f"--over {text}: a logarithmic range must begin above 0")
    return Range(key, low, high, log=bool(found["log"]))


def _number(end: str, text: str) -> float:
    """Parse an end of a range; an integer stays an integer."""
    number = _value(end)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"--over {text}: {end!r} is not a number; {_HOW}")
    if not math.isfinite(number):
        raise ConfigError(f"--over {text}: {end} is not finite")
    return number


def _value(text: str) -> object:
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def axes(texts: Sequence[str]) -> list[Axis]:
    """Parse a sweep's axes. Raises ConfigError; also if there is none, or a key comes twice."""
    if not texts:
        raise ConfigError(f"name what to vary with --over: {_HOW}")
    found = [axis(text) for text in texts]
    for n, one in enumerate(found):
        if any(one.key == other.key for other in found[:n]):
            raise ConfigError(f"--over {one.key} is given twice: list all its values in one")
    return found


def grid(found: Sequence[Axis]) -> Iterator[SweptKeys]:
    """Every combination of values, the last axis fastest. Raises ConfigError for a range."""
    for one in found:
        if isinstance(one, Range):
            raise ConfigError(
                f"--over {one.key}={one.low}..{one.high}: a grid needs values, as in "
                f"{one.key}={one.low},{one.high}; a range needs --random N"
            )
    lists = [one.values for one in found if isinstance(one, Values)]
    for values in itertools.product(*lists):
        yield dict(zip((one.key for one in found), values, strict=True))


def drawn(found: Sequence[Axis], number: int, seed: int) -> Iterator[SweptKeys]:
    """``number`` random combinations; the n-th depends only on (seed, n)."""
    for n in range(number):
        rng = random.Random(f"{seed}:{n}")
        yield {one.key: one.draw(rng) for one in found}
