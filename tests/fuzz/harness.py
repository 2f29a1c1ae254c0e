"""Runs inputs against a target and tells what none of them may do: crash, hang, or eat memory."""

from __future__ import annotations

import hashlib
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fedstream.core.errors import FedstreamError
from tests.fuzz.mutation import mutated_bytes, mutated_value, packed

LIMIT_S = 10.0  # for one input, on a loaded machine
MEMORY = 1 << 30  # bytes of address space more than at the start


class Hang(BaseException):
    """One input took longer than :data:`LIMIT_S`. No Exception: nobody may catch it on the way."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes. ``read`` raises FedstreamError for what it refuses.

    ``values`` are valid inputs, plain maps and lists; ``encode`` turns one, or what became of it,
    into bytes. ``texts`` are valid inputs that are only changed as bytes.
    """

    name: str
    read: Callable[[bytes], object]
    values: Sequence[Any] = ()
    encode: Callable[[Any], bytes] = packed
    texts: Sequence[bytes] = ()

    def valid(self) -> list[bytes]:
        """The inputs that all others are made from."""
        return [*(self.encode(value) for value in self.values), *self.texts]

    def inputs(self, n: int, seed: int) -> Iterator[bytes]:
        """``n`` inputs: nearly all of them changed, the same for the same seed."""
        rng, valid = Random(f"{self.name} {seed}"), self.valid()
        yield from valid[:n]
        for _ in range(n - len(valid)):
            data = self._changed(rng) if self.values and rng.random() < 0.8 else None
            yield mutated_bytes(rng.choice(valid), rng) if data is None else data

    def _changed(self, rng: Random) -> bytes | None:
        """A valid value changed and encoded; None if the format has no form for what it became."""
        try:
            return self.encode(mutated_value(rng.choice(self.values), rng))
        except (OverflowError, TypeError, ValueError, RecursionError):
            return None


@dataclass
class Found:
    """What the inputs of one target came to."""

    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashed: dict[str, bytes] = field(default_factory=dict)  # where and what -> first input
    crashes: int = 0
    hangs: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    grown: int = 0  # bytes of resident memory, at the peak

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not self.crashed


def attempt(target: Target, data: bytes) -> str:
    """One input: 'accepted' or 'refused'. Raises whatever else it came to."""
    try:
        with _at_most(LIMIT_S):
            target.read(data)
    except FedstreamError as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} without a word") from error
        return "refused"
    return "accepted"


def fuzz(target: Target, n: int, seed: int) -> Found:
    """``n`` inputs. Memory is limited for the rest of this process: give it one of its own."""
    found, began = Found(target.name), time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in target.inputs(n, seed):
        found.inputs += 1
        at = time.perf_counter()
        try:
            outcome = attempt(target, data)
        except (Exception, Hang) as error:
            found.hangs += isinstance(error, Hang)
            found.crashes += 1
            found.crashed.setdefault(_where(error), data)
        else:
            found.accepted += outcome == "accepted"
            found.refused += outcome == "refused"
        found.slowest_s = max(found.slowest_s, time.perf_counter() - at)
    found.seconds = time.perf_counter() - began
    found.grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    return found


def limit_memory() -> None:
    """A larger allocation fails from here on, and is counted as a crash."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def kept(found: Found, folder: Path) -> list[Path]:
    """The inputs that went wrong, as files named by their digests."""
    folder = folder / found.target
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for data in found.crashed.values():
        path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
        path.write_bytes(data)
        paths.append(path)
    return paths


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _where(error: BaseException) -> str:
    """The error's type and the innermost line of ours that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f for f in frames if "/site-packages/" not in f.filename and "/tests/" not in f.filename
    ]
    last = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"
