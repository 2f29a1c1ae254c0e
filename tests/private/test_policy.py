"""The policy: one text, one digest, one owner; and a roster in which a device stands once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from fedstream.core.errors import ConfigError
from fedstream.private.policy import KeyRoster, PrivacyPolicy, read_signed, signed
from tests.private.enrolled import DEVICES, OWNER, ROSTER, key_of, policy_of


def test_a_signed_policy_is_read_back_with_its_digest() -> None:
    policy = policy_of()
    read = read_signed(signed(policy, OWNER), OWNER.public_key(), "policy.json")
    assert read == policy
    assert read.digest == policy.digest


def test_every_key_decides_the_digest() -> None:
    table = json.loads(policy_of().text)
    other = {str: "ab" * 32, int: 7, float: 0.5, list: [2]}
    digests = {policy_of().digest}
    for key, value in table.items():
        if key in ("kind", "kem", "word_bits"):
            continue
        digests.add(
            policy_of(**{key: tuple(v) if isinstance(v := other[type(value)], list) else v}).digest
        )
    digests.add(policy_of(kem="mlkem768-x25519").digest)
    digests.add(policy_of(word_bits=24, scale_bits=8).digest)
    assert len(digests) == len(table)  # `kind` has one value; the policy itself is one more


def test_a_changed_or_foreign_policy_is_refused() -> None:
    data = signed(policy_of(), OWNER)
    for wrong, owner in [
        (data.replace(b'"sigma":1.0', b'"sigma":0.0'), OWNER),
        (data.partition(b"\n")[0], OWNER),
        (data, key_of(5)),
    ]:
        with pytest.raises(ConfigError, match=r"policy\.json: the policy is not signed by"):
            read_signed(wrong, owner.public_key(), "policy.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "at: not JSON"),
        (b"[]", "at: expected a JSON object"),
        (b"{}", "policy.roster"),
        (policy_of().text.replace(b'"sigma"', b'"sigmas"'), "policy.sigmas"),
        (policy_of().text + b" ", "at: the policy is not in its canonical form"),
        (policy_of().text.replace(b":1.0,", b":1.00,"), "at: the policy is not in its canonical"),
        (policy_of().text.replace(b'"min_batch":3', b'"min_batch":1'), "policy.min_batch"),
    ],
)
def test_other_texts_are_refused_by_place(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PrivacyPolicy.parsed(text, "at")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_batch": 2}, "max_batch must be at least min_batch"),
        ({"scale_bits": 40}, "lower scale_bits"),
        ({"scale_bits": 28, "sigma": 0.0}, "may not fit 32 bits"),
    ],
)
def test_what_cannot_be_opened_exactly_is_no_policy(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        policy_of(**changes)


@pytest.mark.parametrize("word_bits", [16, 24, 32])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 4.0])
def test_the_finest_scale_is_valid_and_the_next_one_is_not(word_bits: Any, sigma: float) -> None:
    keys = {"word_bits": word_bits, "sigma": sigma, "weights": (3, 1), "parameters": 61_706}
    bits = policy_of(**keys).scale_bits
    policy_of(**keys, scale_bits=bits)
    with pytest.raises(ValidationError):
        policy_of(**keys, scale_bits=bits + 1)


def test_noise_and_range_are_for_the_largest_weight() -> None:
    """A device at weight 15 changes a sum by 15 S', and a whole batch may have that weight."""
    flat, heavy = policy_of(scale_bits=4), policy_of(scale_bits=4, weights=(15, 1))
    assert heavy.noise_sigma == 15 * flat.noise_sigma == 15 * heavy.norm_bound * heavy.sigma
    finest = policy_of(weights=(15, 1), sigma=0.0)
    assert 1 << 30 <= finest.max_batch * 15 * finest.norm_bound * 2 < 1 << 32
    assert heavy.allowance == flat.allowance * 225


def test_sums_that_fit_no_word_are_refused() -> None:
    with pytest.raises(ValidationError, match="may not fit 16 bits"):
        policy_of(parameters=10**9, max_batch=10_000, sigma=0.0, word_bits=16)
    with pytest.raises(ValidationError, match="clip"):
        policy_of(clip=-1.0)


def test_a_roster_has_one_text() -> None:
    assert KeyRoster.parsed(ROSTER.text, "roster.txt") == ROSTER
    assert len(ROSTER.text.splitlines()) == len(DEVICES)


def test_a_roster_with_a_device_or_key_twice_is_refused_by_line() -> None:
    first, second, *_ = ROSTER.text.splitlines(keepends=True)
    for text, says in [
        (first + first, "roster.txt, line 2: device 0 is not in the order"),
        (second + first, "roster.txt, line 2: device 0 is not in the order"),
        (first + b"1" + first[1:], "roster.txt, line 2: device 1 has the key of device 0"),
        (b"0 abc\n", "roster.txt, line 1: expected a device's number"),
        (b"00" + first[1:], "roster.txt, line 1: expected a device's number"),
        (b"-1" + first[1:], "roster.txt, line 1: expected a device's number"),
        (first.upper(), "roster.txt, line 1: expected .* in lower case"),
        (first + second.rstrip(), "roster.txt: end each line"),
        (first.replace(b"\n", b"\r\n"), "roster.txt: end each line"),
    ]:
        with pytest.raises(ConfigError, match=says):
            KeyRoster.parsed(text, "roster.txt")
