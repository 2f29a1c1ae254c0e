"""Changes a valid input into one that is almost valid. Pure: the same generator, the same input."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from random import Random
from typing import Any, TypeAlias

import msgpack

Path: TypeAlias = tuple[Any, ...]


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Values that checks forget: signs, limits of widths, no numbers, the empty, the long, the deep.
_INTEGERS = (-1, 0, 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan)
_TEXTS = ("", "\0", "\x1b[2J\u202e[/]", "a" * 300, "9" * 5000, "../../etc", "a|b.c", "inf")
_WORDS = ("bfloat16", "object", "parameter", b"", b"\xff" * 40, None, True)
_CONTAINERS: tuple[Any, ...] = (
    [],
    {},
    _nested(100),
    [0] * 3000,
    {"v": 1, "k": "x"},
    {1: 2},
    [2**31] * 3,
    [-1],
)
HOSTILE: tuple[Any, ...] = (*_INTEGERS, *_FLOATS, *_TEXTS, *_WORDS, *_CONTAINERS)


def mutated_value(value: Any, rng: Random) -> Any:
    """A copy of ``value`` (maps, lists, scalars) with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    return value


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """``data`` with one to four stretches flipped, overwritten, deleted, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at : at + length] = rng.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                changed[at:at] = rng.choice((b"\xff", b"\0", b"\x91", b"[")) * rng.choice(
                    (1, 8, 900)
                )
            case _:
                del changed[at:]
    return bytes(changed)


def packed(value: Any) -> bytes:
    """``value`` as msgpack; what msgpack has no form for is written as text."""
    data = msgpack.packb(value, default=str, unicode_errors="replace")
    assert isinstance(data, bytes)
    return data


def _changed(value: Any, rng: Random) -> Any:
    *outer, last = rng.choice([*_places(value)]) or (None,)
    if last is None:
        return copy.deepcopy(rng.choice(HOSTILE))
    holder = value
    for key in outer:
        holder = holder[key]
    old = holder[last]
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            holder[last] = copy.deepcopy(rng.choice(HOSTILE))
        case 4 if isinstance(old, int | float) and not isinstance(old, bool):
            holder[last] = rng.choice((old + 1, old - 1, -old, old * 1000, float(old), old / 3))
        case 5 if isinstance(holder, dict):
            del holder[last]
        case 5:
            holder.pop(last)
        case 6 if isinstance(holder, list):
            holder.insert(last, copy.deepcopy(old))
        case 6 if isinstance(holder, dict):
            holder[rng.choice(("v", "k", "", "extra", 7))] = copy.deepcopy(old)
        case _:
            *_, other = rng.choice([*_places(value)]) or (None,)
            holder[last] = copy.deepcopy(old) if other is None else [copy.deepcopy(old)]
    return value


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if len(path) > 8:  # deep enough: what was nested by us
        return
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for number, one in enumerate(value[:50]):
            yield from _places(one, (*path, number))
