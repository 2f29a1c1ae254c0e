"""How many connections there may be, in all and from one address."""

from __future__ import annotations

from fedstream.runtime.crowd import Crowd


def test_places_are_few_and_become_free_again() -> None:
    crowd = Crowd(2)
    assert [crowd.enter(who, "192.0.2.1") for who in ("a", "b", "c")] == [None, None, "busy"]
    crowd.leave("c")  # was never inside
    assert len(crowd) == 2
    crowd.leave("a")
    crowd.leave("a")
    assert crowd.enter("c", "192.0.2.1") is None
    assert len(crowd) == 2


def test_one_address_takes_no_more_than_its_share() -> None:
    crowd = Crowd(10, of_address=2)
    assert crowd.enter("a", "2001:db8::1") is None
    assert crowd.enter("b", "2001:db8::2") is None
    assert crowd.enter("c", "2001:db8::3") == "address"  # the same network
    assert crowd.enter("d", "2001:db8:1::1") is None
    crowd.leave("a")
    assert crowd.enter("c", "2001:db8::3") is None
    assert len(crowd) == 3
