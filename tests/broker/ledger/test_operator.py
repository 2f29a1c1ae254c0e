"""An operator deletes a run, or puts devices into quarantine."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.messages import QUARANTINED, SetQuarantine
from fedstream.core.records import NO_QUARANTINES, Commit, PrivacyLoss, Quarantines
from tests.support import Hand, askable


async def test_purging_deletes_this_run_and_no_other(client: Client, hand: Hand) -> None:
    await hand.create()
    await hand.admitted()
    other = Keys(hand.keys.name + "-other")
    await client.call("SET", other.run, "x")
    assert await hand.ledger.purge() >= 10
    assert await client.call("KEYS", hand.keys.prefix + "*") == []
    assert await client.call("GET", other.run) == b"x"
    assert await hand.ledger.purge() == 0
    await client.call("DEL", other.run)


@pytest.mark.parametrize(
    ("state", "wanted", "verdict"),
    [
        ({}, SetQuarantine(devices=(9,)), ("queued", None)),
        ({}, SetQuarantine(devices=(3, 10)), ("unknown", "10")),
        ({"state": "finished"}, SetQuarantine(devices=(3,)), ("finished", "")),
        (None, SetQuarantine(devices=(3,)), ("none", "")),
    ],
)
async def test_only_a_running_runs_own_devices_go_into_quarantine(
    hand: Hand, state: dict[str, str] | None, wanted: SetQuarantine, verdict: tuple[str, str]
) -> None:
    if state is not None:
        await hand.create(**state)
    what, detail = await hand.ledger.set_quarantine(wanted)
    queued = [(id_, one) for id_, one in await hand.queue() if isinstance(one, SetQuarantine)]
    assert (what, verdict[1] if queued else detail) == verdict
    assert queued == ([(detail, wanted)] if what == "queued" else [])


async def test_number_of_devices_in_quarantine_is_limited(hand: Hand) -> None:
    """Releasing some is always possible."""
    await hand.create(devices=2000)
    await quarantined(hand, NO_QUARANTINES.quarantined(range(2, QUARANTINED), "why", 1.5, 0))
    for wanted, verdict in (
        (SetQuarantine(devices=(0, 1)), "queued"),
        (SetQuarantine(devices=(0, 1, 1999)), "full"),
        (SetQuarantine(devices=(0, 1, 1999), release=True), "queued"),
    ):
        assert (await hand.ledger.set_quarantine(wanted))[0] == verdict


async def test_quarantined_devices_are_neither_asked_nor_heard(hand: Hand) -> None:
    await hand.create()
    await quarantined(hand, NO_QUARANTINES.quarantined([3, 5], "poison", 1.5, 0))
    view = await hand.ledger.look()
    assert askable(view) == (0, 1, 2, 4, 6, 7, 8, 9)
    assert await hand.take_up(hand.trigger(origin="ann", device=3)) == ["quarantined"]
    assert await hand.take_up(hand.trigger(origin="ann", device=4)) == ["sent"]
    view = await hand.ledger.look()
    assert view.reasons("stray") == {"trigger for a quarantined device": 1}
    assert [trigger.device for trigger in view.open] == [4]


async def test_device_without_privacy_budget_is_neither_asked_nor_heard(hand: Hand) -> None:
    """Whichever bits of the published ones are its, and those of its neighbours are not."""
    await hand.create(devices=40)
    spent = PrivacyLoss(
        opened=4, dropped=1, epsilon=3.5, delta=1e-5, spent=frozenset({3, 7, 8, 31})
    )
    await hand.ledger.commit(hand.updater.token, Commit(held=(), mean_staleness=0.0, privacy=spent))
    view = await hand.ledger.look()
    assert view.head.privacy == spent
    for device in (2, 3, 4, 7, 8, 9, 30, 31, 32):
        [verdict] = await hand.take_up(hand.trigger(origin="ann", device=device))
        assert verdict == ("spent" if device in spent.spent else "sent")
        assert view.head.bars(device) == (device in spent.spent)
    view = await hand.ledger.look()
    assert view.reasons("stray") == {"trigger for a device without privacy budget": 4}


@pytest.mark.parametrize("policy", ["", "{}"])
async def test_device_in_a_private_batch_is_busy(hand: Hand, policy: str) -> None:
    """A batch takes one update of each; a plain buffer takes several."""
    await hand.create(policy=policy, devices=40)
    await hand.ledger.commit(hand.updater.token, Commit(held=(1, 23), mean_staleness=0.0))
    found = [
        await hand.take_up(hand.trigger(origin="ann", device=device)) for device in (1, 2, 3, 23)
    ]
    busy = ["busy"] if policy else ["sent"]
    assert found == [busy, ["sent"], ["sent"], busy]


async def test_late_commit_brings_no_quarantine_back(hand: Hand) -> None:
    await hand.create()
    first = NO_QUARANTINES.quarantined([3], "poison", 1.5, 0)
    await quarantined(hand, first)
    await quarantined(hand, first.released([3]))
    await quarantined(hand, first)
    head = await hand.ledger.head()
    assert head is not None
    assert head.quarantines == first.released([3])


async def test_commit_notices_that_redis_forgot_a_quarantine(hand: Hand) -> None:
    await hand.create()
    commit = Commit(held=(), mean_staleness=0.0, quarantines_before=1)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "behind:0"
    await quarantined(hand, NO_QUARANTINES.quarantined([3], "poison", 1.5, 0))
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"


async def quarantined(hand: Hand, quarantines: Quarantines) -> None:
    """The updater has taken these."""
    commit = Commit(held=(), mean_staleness=0.0, quarantines=quarantines)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
