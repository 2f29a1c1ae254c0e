"""Whom requests are charged to."""

from __future__ import annotations

import pytest

from fedstream.coordinator.gateway.refusals import Quota, Refusal
from fedstream.runtime.limits import network_of


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("unknown", "_hidden", False),
    ],
)
def test_a_host_with_a_network_of_ipv6_is_one(one: str, other: str, *, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_new_addresses_of_one_network_are_no_way_around_the_quota() -> None:
    quota = Quota("address", 1.0)
    for n in range(2):
        quota.take(network_of(f"2001:db8::{n}"))
    with pytest.raises(Refusal, match="too many requests of this address"):
        quota.take(network_of("2001:db8::ffff"))
    quota.take(network_of("2001:db8:0:1::"))
