"""Which other replicas are there, by what was heard of them and when."""

from __future__ import annotations

from fedstream.coordinator.gateway.handover import GREET_S, OtherReplicas


def listening(others: OtherReplicas, since: float, until: float) -> bool:
    """Whether there is one after listening for so long without a break."""
    for second in range(int(since), int(until) + 1):
        others.listened(float(second))
    return bool(others)


def test_replica_that_is_heard_now_and_then_is_there() -> None:
    others = OtherReplicas()
    assert not listening(others, 0, 10)
    others.heard("gw-1", 10.0)
    assert listening(others, 10, 10 + 3 * GREET_S), "two signs of life may be late"
    others.heard("gw-1", 11 + 3 * GREET_S)
    assert listening(others, 11 + 3 * GREET_S, 60)


def test_replica_that_is_silent_is_gone() -> None:
    others = OtherReplicas()
    others.heard("gw-1", 0.0)
    others.heard("gw-2", 20.0)
    assert listening(others, 0, 40), "the second one is there"
    assert not listening(others, 41, 60)


def test_silence_counts_only_while_somebody_listens() -> None:
    others = OtherReplicas()
    others.heard("gw-1", 0.0)
    assert listening(others, 0, 10)
    assert listening(others, 1000, 1030), "Redis was away: it has not had the time to say so"
    assert not listening(others, 1031, 1040)
