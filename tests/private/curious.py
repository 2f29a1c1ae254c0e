"""A curious server: it keeps all that it sees of a run, and tries to recover single updates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstream.broker.client import Client
from fedstream.core.errors import BadMessage
from fedstream.core.messages import Upload
from fedstream.private.masks import SEED_BYTES
from fedstream.private.noise import keystream
from fedstream.private.sealing import Intent, SealedUpdate
from tests.updater.journalled import backed_up

Words = NDArray[np.uint32]
_DELTA = 1e-9  # probability that chance exceeds the bound


@dataclass
class Evidence:
    """A run's Redis, journal and traffic with the helper. Blobs are by their SHA-256."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, SealedUpdate] = field(default_factory=dict)
    opened: dict[str, tuple[Intent, bytes]] = field(default_factory=dict)  # by the intent
    seen: set[bytes] = field(default_factory=set)  # DUMPs
    journal: bytes = b""

    def forget(self, digest: str) -> None:
        """Leave a published model out: it is made of released sums, and tells what they tell."""
        self.blobs.pop(digest, None)

    async def look(self, client: Client) -> None:
        """Keep all that is in Redis now, and read it at leisure."""
        for name, (dump, _) in (await backed_up(client)).items():
            if dump is None or dump in self.seen:
                continue
            self.seen.add(dump)
            aside = name + b":aside"
            await client.call("RESTORE", aside, 60_000, dump, "REPLACE")
            kind = await client.call("TYPE", aside)
            if kind == b"hash":
                found = await client.call("HGETALL", aside)
                self._read_blob(dict(zip(found[::2], found[1::2], strict=True)))
            elif kind == b"stream":
                for _, fields in await client.call("XRANGE", aside, "-", "+"):
                    self._read_message(fields[1])
            await client.call("DEL", aside)

    def _read_blob(self, content: dict[bytes, bytes]) -> None:
        chunks = sorted(int(name) for name in content if name.isdigit())
        if b"size" in content and chunks:
            data = b"".join(content[b"%d" % number] for number in chunks)
            self.blobs[hashlib.sha256(data).hexdigest()] = data

    def _read_message(self, data: bytes) -> None:
        try:
            upload = Upload.decode(data)
        except BadMessage:
            return
        if upload.sealed is not None:
            sealed = SealedUpdate.decode(upload.sealed)
            self.sealed[sealed.masked] = sealed

    def read_journal(self, folder: Path) -> None:
        """Keep the journal; the blobs in it are those of Redis."""
        self.journal = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))

    def hear(self, intent: Intent, masks: bytes) -> None:
        """Keep a request to the helper with its answer."""
        self.opened[intent.digest] = (intent, masks)
        self.sealed |= {update.masked: update for update in intent.updates}


def candidates(evidence: Evidence) -> Iterator[tuple[str, NDArray[Any]]]:
    """What an update might be, and how it was made: int32 in the policy's units, or float32."""
    words = {name: _words(data) for name, data in evidence.blobs.items()}
    masks = {name: _words(data) for name, (_, data) in evidence.opened.items()}
    for data in evidence.blobs.values():
        yield "a blob of numbers", np.frombuffer(data, "<f4")
    for one in (*words.values(), *masks.values()):
        yield "a blob", one.view(np.int32)
    for name, one in words.items():
        for other, two in words.items():
            if name < other and one.size == two.size:
                yield "the difference of two blobs", (one - two).view(np.int32)
        for two in masks.values():
            if one.size == two.size:
                yield "a blob without the masks", (one - two).view(np.int32)
    batches = [[u.masked for u in intent.updates] for intent, _ in evidence.opened.values()]
    for batch in batches:
        for count in range(2, len(batch) + 1):
            for some in combinations(batch, count):
                total = _sum([words[name] for name in some])
                for two in masks.values():
                    yield f"the sum of {count} blobs without masks", (total - two).view(np.int32)
    sums = [
        _sum([words[name] for name in batch]) - two
        for batch, two in zip(batches, masks.values(), strict=True)
    ]
    for one, two in combinations(sums, 2):
        yield "the difference of two sums", (one - two).view(np.int32)
    for name, sealed in evidence.sealed.items():
        for key in _keys(sealed):
            mask = keystream(key).update(bytes(words[name].nbytes))
            yield (
                "a blob without a guessed key's stream",
                (words[name] - _words(mask)).view(np.int32),
            )


def _keys(sealed: SealedUpdate) -> Iterator[bytes]:
    """Everything of the size of a seed in a sealed update, and digests of its parts."""
    for part in (sealed.seed, sealed.signature, bytes.fromhex(sealed.masked + sealed.policy)):
        for at in range(len(part) - SEED_BYTES + 1):
            yield part[at : at + SEED_BYTES]
    for part in (sealed.seed, sealed.bound, sealed.signed, sealed.signature, sealed.task.encode()):
        yield hashlib.sha256(part).digest()


def _words(data: bytes) -> Words:
    return np.frombuffer(data[: len(data) // 4 * 4], "<u4")


def _sum(parts: Sequence[Words]) -> Words:
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


@dataclass(frozen=True)
class Found:
    """The best that an attacker has on one update."""

    how: str
    correlation: float  # with the part of the update that the released sums don't tell
    is_exact: bool  # a candidate is the update


@dataclass(frozen=True)
class Attack:
    """What a curious server found, by update, and what chance would give."""

    found: dict[str, Found]
    bound: float
    tries: int

    @property
    def recovered(self) -> set[str]:
        """The updates of which more was found than sums and chance tell."""
        return {name for name, one in self.found.items() if one.correlation > self.bound}

    @property
    def exact(self) -> set[str]:
        """The updates that were found to the last bit."""
        return {name for name, one in self.found.items() if one.is_exact}


def attack(
    evidence: Evidence, truth: dict[str, NDArray[Any]], sums: Sequence[NDArray[Any]]
) -> Attack:
    """Try all candidates on the true updates. ``sums``: what is meant to be released.

    An update correlates with the sum that it is in, by about 1 / sqrt(K). So correlations are with
    what is left of it after a projection on all released sums; it is no linear function of them.
    A candidate that is uniform over all words has a correlation above sqrt(2 ln(2 / p) / d) with a
    fixed direction with a probability of at most p (a uniform variable is sub-Gaussian with its
    variance), but for its own norm, which is within 2% of its mean.
    """
    names, d = list(truth), len(next(iter(truth.values())))
    told = np.linalg.qr(np.array([*sums], np.float64).T)[0] if len(sums) else np.zeros((d, 1))
    updates = np.array([truth[name] for name in names], np.float64)
    rest = updates - updates @ told @ told.T
    rest /= np.linalg.norm(rest, axis=1, keepdims=True)
    best = [Found("", 0.0, False)] * len(names)
    tries = 0
    for how, one in candidates(evidence):
        if one.size != d or not np.isfinite(one).all() or not one.any():
            continue
        tries += 1
        values = one.astype(np.float64)
        scores = np.abs(rest @ values) / np.linalg.norm(values)
        for at, name in enumerate(names):
            is_exact = scores[at] > 0.3 and np.array_equal(one, truth[name])
            if scores[at] > best[at].correlation or (is_exact and not best[at].is_exact):
                best[at] = Found(how, float(scores[at]), is_exact or best[at].is_exact)
    bound = 1.02 * math.sqrt(2 * math.log(2 * tries * len(names) / _DELTA) / d)
    return Attack(dict(zip(names, best, strict=True)), bound, tries)
