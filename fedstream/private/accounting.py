"""Differential privacy at the level of a device: what a policy's noise guarantees.

Adjacency is zero-out: a device's updates are replaced by zeros. One device changes a sum by at most
w S', and the noise of parameter sigma makes that (w S')**2 / (2 sigma**2)-zCDP (Canonne, Kamath and
Steinke 2020, theorem 14); batches compose by addition, also if they are chosen adaptively. The
limit on a device is a filter (Feldman and Zrnic 2021). No amplification by sampling is claimed.
Correlated noise (:mod:`fedstream.private.correlation`) is scaled so that all this holds as it is.
"""

from __future__ import annotations

import math

from fedstream.private.noise import DISTANCE
from fedstream.private.policy import PrivacyPolicy


def rho(policy: PrivacyPolicy, squares: int) -> float:
    """The zCDP parameter of a device whose weights' squares add up to ``squares``."""
    if not squares:
        return 0.0
    if not policy.sigma:
        return math.inf
    return squares / (2 * (policy.sigma * max(policy.weights)) ** 2)


def epsilon(policy: PrivacyPolicy, squares: int, batches: int, delta: float) -> float:
    """Epsilon at ``delta`` of a device in ``batches`` batches, its weights' squares ``squares``.

    Includes the distance of the drawn noise from the discrete Gaussian: (epsilon, delta) of the
    exact mechanism is (epsilon, delta + (1 + exp(epsilon)) t) at a total variation t. Infinite
    without noise, and where ``delta`` is too small for that distance.
    """
    spent = rho(policy, squares)
    if not 0 < spent < math.inf:
        return spent
    largest = epsilon_of_rho(spent, delta / 2)
    drawn = batches * policy.bands * policy.parameters  # values whose noise hides the device
    inexact = (1 + math.exp(min(largest, 700.0))) * drawn * DISTANCE
    if inexact > delta / 2:
        return math.inf
    return epsilon_of_rho(spent, delta - inexact)


def epsilon_of_rho(spent: float, delta: float) -> float:
    """The least epsilon at ``delta`` that the conversion of rho-zCDP gives.

    Canonne, Kamath and Steinke (2020), corollary 13: each order alpha gives a valid epsilon, so the
    search can't make the answer too small.
    """

    def at(log_order: float) -> float:
        above = math.exp(log_order)  # alpha - 1
        alpha = 1 + above
        return alpha * spent + math.log(above / alpha) - math.log(delta * alpha) / above

    best = min(range(-140, 240), key=lambda step: at(step / 10))
    return max(0.0, min(at((best + part / 100) / 10) for part in range(-100, 101)))


def gaussian_epsilon(spent: float, delta: float) -> float:
    """Epsilon at ``delta`` of Gaussian mechanisms that are together ``spent``-zCDP, exactly.

    Balle and Wang (2018), theorem 8, for continuous noise: what a numerical accountant would say. A
    figure to compare with; :func:`epsilon` is what is guaranteed.
    """
    mu = math.sqrt(2 * spent)

    def delta_at(eps: float) -> float:
        first = math.erfc((eps / mu - mu / 2) / math.sqrt(2)) / 2
        tail = math.erfc((eps / mu + mu / 2) / math.sqrt(2)) / 2
        # The product is below 1, but the exponential alone may be too large for a float.
        return first - (math.exp(eps + math.log(tail)) if tail else 0.0)

    low, high = 0.0, epsilon_of_rho(spent, delta)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high
