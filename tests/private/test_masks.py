"""Masked updates: their opened sum is the plaintext's, bit for bit, and alone they say nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from fedstream.core.errors import FedstreamError, SumOutOfRange
from fedstream.private.masks import (
    BadWords,
    add_masked,
    check_range,
    in_model_units,
    masked,
    packed,
    rounded,
    square,
    sum_of_masks,
    unmasked,
    unpacked,
)
from fedstream.private.noise import draw
from fedstream.private.policy import PrivacyPolicy
from tests.private.enrolled import policy_of


def seed_of(number: int) -> bytes:
    return number.to_bytes(32)


def opened(
    updates: list[NDArray[np.int64]], weights: list[int], policy: PrivacyPolicy
) -> NDArray[np.int64]:
    """The updates' sum, as a server gets it: it sees the packed words and M."""
    total = np.zeros(policy.parameters, np.uint32)
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        sent = packed(masked(update, seed_of(number)), policy)
        add_masked(total, unpacked(sent, policy), weight)
    seeds = ((seed_of(number), weight) for number, weight in enumerate(weights))
    masks = packed(sum_of_masks(seeds, None, policy.parameters), policy)
    return unmasked(total, unpacked(masks, policy), policy)


@given(
    some.integers(2, 1000),
    some.sampled_from([16, 24, 32]),
    some.integers(1, 15),
    some.integers(0, 2**32),
)
def test_the_opened_sum_is_the_plaintext_sum(
    k: int, word_bits: int, heaviest: int, seed: int
) -> None:
    """K from 2 to 1,000, also at the ends of the range, where words wrap around."""
    rng = np.random.default_rng(seed)
    policy = policy_of(
        parameters=5,
        word_bits=word_bits,
        max_batch=1000,
        weights=(1,),
        sigma=0.0,
        scale_bits=-2 if word_bits == 16 else 4,
    )
    weights = [int(one) for one in rng.integers(1, heaviest + 1, k)]
    most = (1 << (word_bits - 1)) // sum(weights)
    updates = [rng.integers(-most, most + 1, 5).clip(-most, most) for _ in range(k)]
    updates[0][:2] = most, -most
    plain = sum(w * q for w, q in zip(weights, updates, strict=True))
    edge = 1 << (word_bits - 1)
    expected = (plain + edge) % (2 * edge) - edge
    np.testing.assert_array_equal(opened(updates, weights, policy), expected)


def test_noise_is_in_the_opened_sum() -> None:
    policy = policy_of()
    noise = np.arange(-25, 25)
    update = np.arange(50)
    masks = sum_of_masks([(seed_of(1), 1)], noise, 50)
    found = unmasked(masked(update, seed_of(1)), masks, policy)
    np.testing.assert_array_equal(found, update - noise)


def test_a_mask_is_aes_ctr_of_the_seed() -> None:
    """NIST SP 800-38A, F.5.5 has another counter; this is AES-256 of blocks 0 and 1 (FIPS 197)."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    seed = bytes(range(32))
    blocks = bytes(16) + (1).to_bytes(16)
    stream = Cipher(AES256(seed), ECB()).encryptor().update(blocks)  # noqa: S305  (one block each)
    np.testing.assert_array_equal(masked(np.zeros(8, np.int64), seed), np.frombuffer(stream, "<u4"))


def test_a_masked_update_is_uniform() -> None:
    """The same update under two seeds has nothing in common, and every bit is set half the time."""
    update = np.full(100_000, 7)
    first, second = masked(update, seed_of(1)), masked(update, seed_of(2))
    share = np.unpackbits((first ^ second).view(np.uint8)).mean()
    assert share == pytest.approx(0.5, abs=0.002)
    bits = np.unpackbits(first.view(np.uint8).reshape(-1, 4), axis=1).mean(axis=0)
    np.testing.assert_allclose(bits, 0.5, atol=0.01)


def test_a_seed_used_twice_gives_the_difference_away() -> None:
    """Why each encryption draws a seed anew: a retry by the same seed is a two-time pad."""
    first, second = np.arange(50), np.arange(50)[::-1]
    found = masked(first, seed_of(1)) - masked(second, seed_of(1))
    np.testing.assert_array_equal(found.view(np.int32), first - second)


@given(some.integers(0, 2**32), some.floats(1e-3, 1e3))
def test_a_rounded_update_is_within_the_norm_bound(seed: int, size: float) -> None:
    policy, rng = policy_of(scale_bits=3, parameters=200), np.random.default_rng(seed)
    found = rounded((rng.standard_normal(200) * size).astype(np.float32), policy, rng)
    assert square(found) <= policy.norm_bound**2


def test_rounding_is_unbiased_deterministic_and_by_less_than_a_unit() -> None:
    policy = policy_of(scale_bits=4)
    delta = np.linspace(-0.1, 0.1, 50, dtype=np.float32)
    exact = delta.astype(np.float64) * 16
    found = np.array([rounded(delta, policy, np.random.default_rng(n)) for n in range(4000)])
    assert np.abs(found - exact).max() < 1
    np.testing.assert_allclose(found.mean(axis=0), exact, atol=0.04)
    again = rounded(delta, policy, np.random.default_rng(0))
    np.testing.assert_array_equal(again, found[0])


def test_a_rounding_that_leaves_the_bound_is_drawn_again() -> None:
    """At 4 units of norm in 10,000 values, rounding alone has a norm near the bound."""
    policy = policy_of(scale_bits=2, parameters=10_000, sigma=0.0)
    delta = np.full(10_000, 0.01, np.float32)

    class Unlucky(np.random.Generator):
        """Rounds everything up at first."""

        calls = 0

        def random(self, size: int) -> NDArray[np.float64]:  # type: ignore[override]
            self.calls += 1
            return np.zeros(size) if self.calls == 1 else super().random(size)

    rng = Unlucky(np.random.PCG64(0))
    found = rounded(delta, policy, rng)
    assert rng.calls > 1
    assert square(found) <= policy.norm_bound**2


def test_a_long_update_is_clipped_and_a_short_one_is_kept() -> None:
    policy = policy_of()
    for size, norm in [(100.0, 1.0), (0.01, 0.01)]:
        delta = np.zeros(50, np.float32)
        delta[3] = -size
        found = rounded(delta, policy, np.random.default_rng(0))
        assert in_model_units(found, 1, policy)[3] == pytest.approx(-norm, rel=1e-4)


def test_what_cannot_be_rounded_is_refused() -> None:
    policy, rng = policy_of(), np.random.default_rng(0)
    with pytest.raises(FedstreamError, match="50"):
        rounded(np.zeros(49, np.float32), policy, rng)
    for value in (np.nan, np.inf):
        with pytest.raises(FedstreamError, match="not finite"):
            rounded(np.full(50, value, np.float32), policy, rng)


@given(some.lists(some.integers(-(2**32) + 1, 2**32 - 1), min_size=1, max_size=20))
def test_the_square_is_exact(values: list[int]) -> None:
    assert square(np.array(values)) == sum(value**2 for value in values)


def test_one_malformed_update_is_found_in_the_sum() -> None:
    policy, rng = policy_of(parameters=1000), np.random.default_rng(1)
    updates = [rounded(rng.standard_normal(1000).astype(np.float32), policy, rng) for _ in range(5)]
    check_range(opened(updates, [1] * 5, policy), 5, policy)
    updates[2] = rng.integers(-(2**31), 2**31, 1000)
    with pytest.raises(SumOutOfRange, match="malformed"):
        check_range(opened(updates, [1] * 5, policy), 5, policy)


def test_noise_is_in_range() -> None:
    policy = policy_of(parameters=10_000)
    noise = draw(bytes(32), 10_000, policy.noise_sigma)
    check_range(noise, 3, policy)
    assert square(noise) > (3 * policy.norm_bound) ** 2
    with pytest.raises(SumOutOfRange):
        check_range(3 * noise, 3, policy)


def test_the_largest_honest_sum_is_in_range() -> None:
    policy = policy_of(sigma=0.0)
    most = np.zeros(50, np.int64)
    most[0] = 7 * policy.norm_bound
    check_range(most, 7, policy)
    most[0] += 1
    with pytest.raises(SumOutOfRange):
        check_range(most, 7, policy)


def test_words_of_another_length_are_refused() -> None:
    for bits in (16, 24, 32):
        policy = policy_of(word_bits=bits, max_batch=3)
        with pytest.raises(BadWords, match="bytes, but 50 words"):
            unpacked(bytes(50 * bits // 8 - 1), policy)
