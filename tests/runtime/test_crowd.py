"""How many connections there may be, in all and from one address."""

from __future__ import annotations

from fedstream.runtime.limits import ConnectionLimit


def test_places_are_few_and_become_free_again() -> None:
    connection_limit = ConnectionLimit(2)
    assert [connection_limit.enter(who, "192.0.2.1", 0.0) for who in ("a", "b", "c")] == [
        None,
        None,
        "busy",
    ]
    connection_limit.leave("c")  # was never inside
    assert len(connection_limit) == 2
    connection_limit.leave("a")
    connection_limit.leave("a")
    assert connection_limit.enter("c", "192.0.2.1", 0.0) is None
    assert len(connection_limit) == 2


def test_one_address_takes_no_more_than_its_share() -> None:
    connection_limit = ConnectionLimit(10, of_address=2)
    assert connection_limit.enter("a", "2001:db8::1", 0.0) is None
    assert connection_limit.enter("b", "2001:db8::2", 0.0) is None
    assert connection_limit.enter("c", "2001:db8::3", 0.0) == "address"  # the same network
    assert connection_limit.enter("d", "2001:db8:1::1", 0.0) is None
    connection_limit.leave("a")
    assert connection_limit.enter("c", "2001:db8::3", 0.0) is None
    assert len(connection_limit) == 3


def test_new_ones_from_an_address_come_no_faster_than_they_may() -> None:
    """But all of its devices at once, as after a cut."""
    connection_limit = ConnectionLimit(100, of_address=4, arrivals=2.0)
    for turn in range(2):
        found = [connection_limit.enter((turn, n), "192.0.2.1", 10.0) for n in range(4)]
        for n in range(4):
            connection_limit.leave((turn, n))
        assert found == [None if turn == 0 else "arrivals"] * 4
    assert connection_limit.enter("other", "192.0.2.2", 10.0) is None
    assert len(connection_limit) == 1
    found = [connection_limit.enter(n, "192.0.2.1", 11.0) for n in range(4)]
    assert found == [None, None, "arrivals", "arrivals"]
