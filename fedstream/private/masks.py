"""Masked updates: rounded to integers, hidden by a pseudorandom stream, and added without looking.

A device sends c = q + PRG(seed) mod 2**b, where q is its rounded update; b is the policy's
``word_bits``. With integer weights w, the server computes sum w c, the helper M = sum w PRG(seed) +
noise, and the difference sum w q + noise is exact as long as it fits b bits with its sign. All
arithmetic is modulo 2**32, and cut to b bits where words are packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedstream.core import words as core_words
from fedstream.core.errors import FedstreamError, SumOutOfRange
from fedstream.core.words import MaskWords
from fedstream.private.noise import keystream
from fedstream.private.policy import PrivacyPolicy

SEED_BYTES: Final = 32
_MOST_DRAWS = 64  # each succeeds with a probability of at least 1 - exp(-1/2)
_SLICE: Final = 1 << 14  # values masked at once: the arrays stay in the processor's cache


class BadWords(FedstreamError):
    """Packed words of another length than the policy's."""


def rounded(
    delta: NDArray[np.float32], policy: PrivacyPolicy, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Clip an update to the norm S and round it at random to integer units, unbiased.

    Rounding is repeated until the norm is within S' (Kairouz, Liu and Steinke 2021, algorithm 1),
    so S' bounds what one device adds to a sum, whatever ``rng`` draws. Raises FedstreamError if the
    update is not finite or not of the policy's length.
    """
    if delta.shape != (policy.parameters,):
        raise FedstreamError(
            f"an update of {delta.size} values, but the policy is for {policy.parameters}"
        )
    values = delta.astype(np.float64)
    norm = math.sqrt(np.square(values).sum())  # on one core: BLAS would wait for all others
    if not math.isfinite(norm):
        raise FedstreamError("the update has values that are not finite: it can't be clipped")
    values *= math.ldexp(min(1.0, policy.clip / norm) if norm else 1.0, policy.scale_bits)
    below = np.floor(values)
    values -= below
    lower, bound = below.astype(np.int64), policy.norm_bound
    for _ in range(_MOST_DRAWS):
        found = lower + (rng.random(values.size) < values)
        if square(found) <= bound * bound:
            return found
    raise FedstreamError("no rounding within the norm bound was drawn: the generator is broken")


def square(values: NDArray[np.int64]) -> int:
    """The exact square of the norm of integers below 2**32 in magnitude."""
    high, low = values >> 16, values & 0xFFFF
    parts = (int(np.dot(high, high)), int(np.dot(high, low)), int(np.dot(low, low)))
    return (parts[0] << 32) + (parts[1] << 17) + parts[2]


def masked(values: NDArray[np.int64], seed: bytes) -> MaskWords:
    """Hide integers behind the seed's stream. A seed must never be used twice."""
    total = values.astype(np.uint32)  # modulo 2**32
    add_mask(total, seed, 1)
    return total


def add_mask(total: MaskWords, seed: bytes, weight: int) -> None:
    """Add the seed's stream ``weight`` times, in place and modulo 2**32."""
    stream, factor = keystream(seed), np.uint32(weight)
    for start in range(0, total.size, _SLICE):
        part = total[start : start + _SLICE]
        mask = np.frombuffer(stream.update(bytes(4 * part.size)), "<u4")
        part += mask if weight == 1 else mask * factor


def add_masked(total: MaskWords, update: MaskWords, weight: int) -> None:
    """Add a masked update ``weight`` times, in place and modulo 2**32."""
    total += update if weight == 1 else update * np.uint32(weight)


def sum_of_masks(
    seeds: Iterable[tuple[bytes, int]], noise: NDArray[np.int64] | None, parameters: int
) -> MaskWords:
    """The helper's M: the seeds' streams by their weights, plus noise.

    The memory does not depend on the number of seeds.
    """
    total = np.zeros(parameters, np.uint32) if noise is None else noise.astype(np.uint32)
    for seed, weight in seeds:
        add_mask(total, seed, weight)
    return total


def unmasked(total: MaskWords, masks: MaskWords, policy: PrivacyPolicy) -> NDArray[np.int64]:
    """The sum of the updates in units, with its noise, from the masked sum and M."""
    unused = np.uint32(32 - policy.word_bits)
    signed = ((total - masks) << unused).view(np.int32)
    return (signed >> np.int32(unused)).astype(np.int64)


def check_range(opened: NDArray[np.int64], total_weight: int, policy: PrivacyPolicy) -> None:
    """Refuse a sum that honest devices can't have made. Raises SumOutOfRange.

    A malformed update makes a sum that is uniform over all words, and clipping does not bound
    masked values; this check finds both that and a random M.
    """
    bound = policy.sum_bound(total_weight)
    if square(opened) > bound * bound:
        raise SumOutOfRange(
            f"the opened sum has a norm of {square(opened) ** 0.5:.3g} units, at most {bound:.3g} "
            "are possible: an update or the helper's answer is malformed"
        )


def in_model_units(
    opened: NDArray[np.int64], divisor: float, policy: PrivacyPolicy
) -> NDArray[np.float32]:
    """The opened sum divided by a constant, such as K at flat weights; element by element."""
    return (opened * math.ldexp(1 / divisor, -policy.scale_bits)).astype(np.float32)


def packed(words: MaskWords, policy: PrivacyPolicy) -> bytes:
    """MaskWords on the wire: little-endian, the policy's ``word_bits`` each."""
    return core_words.packed(words, policy.word_bits).tobytes()


def unpacked(data: bytes, policy: PrivacyPolicy) -> MaskWords:
    """Read what :func:`packed` wrote. Raises BadWords."""
    size = policy.word_bits // 8 * policy.parameters
    if len(data) != size:
        raise BadWords(
            f"{len(data)} bytes, but {policy.parameters} words of {policy.word_bits} bits take "
            f"{size}"
        )
    found = np.empty(policy.parameters, np.uint32)
    core_words.unpack(np.frombuffer(data, np.uint8), policy.word_bits, found)
    return found
