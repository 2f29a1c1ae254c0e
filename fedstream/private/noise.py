"""Integer noise: the discrete Gaussian, drawn from a key; the same key gives the same noise.

The discrete Gaussian of parameter sigma has P(x) proportional to exp(-x**2 / (2 sigma**2)) on the
integers (Canonne, Kamath and Steinke, 2020). A large sigma is drawn as a convolution: y1 + k y2,
where y1 and y2 have parameter s = sigma / sqrt(1 + k**2) and come from a table.

How close it is to the exact distribution (proof in docs/privacy.md):

- The table's probabilities are integers over n 2**64, for n outcomes: a draw is within 2**-64 of
  the table's Gaussian in total variation, cut tails included.
- The convolution's probabilities are the discrete Gaussian's up to a factor of 1 +- 2**-70, because
  s / sqrt(1 + k**2) is at least SMOOTH.

So a value is within :data:`DISTANCE` of a discrete Gaussian in total variation, whose parameter is
sigma or larger by a factor of at most 1 + 2**-50: s is rounded up.
"""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

LARGEST_SIGMA: Final = 1 << 21
DISTANCE: Final = 2.0**-62  # of a value, in total variation
SMOOTH: Final = 1.6
_TAIL: Final = 13  # parameters s within the table: beyond, there are less than 2**-120
_FIXED: Final = 256  # bits behind the point while the table is computed
_SLICE: Final = 1 << 14  # values drawn at once: the arrays stay in the processor's cache


def keystream(key: bytes) -> CipherContext:
    """AES-256 in counter mode from zero; each key (32 bytes) must be used for one stream only."""
    return Cipher(AES256(key), CTR(bytes(16))).encryptor()


def noise_key(epoch: bytes, intent: str) -> bytes:
    """The key of an intent's noise: HMAC-SHA256 by the epoch's secret key."""
    return hmac.digest(epoch, b"fedstream noise 1\0" + intent.encode(), "sha256")


def draw(key: bytes, count: int, sigma: float) -> NDArray[np.int64]:
    """Draw ``count`` independent values of the discrete Gaussian, 0 < sigma <= LARGEST_SIGMA."""
    factor, s = convolution(sigma)
    table = _table(s)
    stream = keystream(key)
    found = np.empty(count, np.int64)
    for start in range(0, count, _SLICE):
        part = found[start : start + _SLICE]
        part[:] = table.draw(stream, part.size)
        if factor:
            part += factor * table.draw(stream, part.size)
    return found


def convolution(sigma: float) -> tuple[int, float]:
    """The largest k that is smooth enough, and s; k is 0 if sigma's own table is small."""
    k = math.isqrt(int(max(sigma / SMOOTH - 1, 0)))
    return k, sigma / math.hypot(1, k) * (1 + 2**-51) if k else sigma


@dataclass(frozen=True)
class _Table:
    """Walker's alias method over n = 2**b outcomes from ``-n/2`` on."""

    threshold: NDArray[np.uint64]  # below it the outcome itself, else its alias
    alias: NDArray[np.int64]

    def draw(self, stream: CipherContext, count: int) -> NDArray[np.int64]:
        drawn = stream.update(bytes(12 * count))
        column = np.frombuffer(drawn, "<u4", count, 8 * count) & np.uint32(self.alias.size - 1)
        own = np.frombuffer(drawn, "<u8", count) < self.threshold[column]
        found: NDArray[np.int64] = np.where(own, column, self.alias[column])
        found -= self.alias.size // 2
        return found


def probabilities(s: float) -> list[int]:
    """The table of parameter s: outcomes -n/2, ..., n/2 - 1 as integers that add up to n 2**64."""
    half = 1 << max(math.ceil(_TAIL * s), 1).bit_length()
    one = 1 << _FIXED
    # p(x + 1) / p(x) = exp(-(2x + 1) / (2 s^2)), which itself changes by the factor exp(-1 / s^2).
    ratio, change = _exp_of_minus(s, 2), _exp_of_minus(s, 1)
    upper, value = [one], one
    for _ in range(half):
        value = value * ratio >> _FIXED
        ratio = ratio * change >> _FIXED
        upper.append(value)
    mass = [*upper[:0:-1], *upper[:-1]]
    total, whole = sum(mass), 2 * half << 64
    shares = [one * whole // total for one in mass]
    shares[half] += whole - sum(shares)  # the outcome 0, the likeliest, gets the part that was cut
    return shares


def _exp_of_minus(s: float, parts: int) -> int:
    """exp(-1 / (parts s**2)) in fixed point, by its series."""
    over, under = s.as_integer_ratio()
    x = (under * under << _FIXED) // (parts * over * over)
    halvings = max(x.bit_length() - _FIXED, 0)  # so that the series converges: exp(-x) squared
    x >>= halvings
    term = total = 1 << _FIXED
    for n in range(1, 80):
        term = -(term * x >> _FIXED) // n
        total += term
    for _ in range(halvings):
        total = total * total >> _FIXED
    return total


@lru_cache(maxsize=4)
def _table(s: float) -> _Table:
    """Build the alias table exactly, in integers (Vose 1991)."""
    left = probabilities(s)
    size, whole = len(left), 1 << 64
    threshold, alias = [whole - 1] * size, list(range(size))
    small = [one for one in range(size) if left[one] < whole]
    large = [one for one in range(size) if left[one] >= whole]
    while small:
        short, long = small.pop(), large[-1]
        threshold[short], alias[short] = left[short], long
        left[long] -= whole - left[short]
        if left[long] < whole:
            small.append(large.pop())
    return _Table(np.array(threshold, np.uint64), np.array(alias, np.int64))
