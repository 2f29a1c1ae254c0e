"""What a snapshot says of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.live_page import LivePageLedger
from fedstream.broker.streams import Entry
from fedstream.core.messages import OUTCOMES, Contribution, Event, GiveUp, Version
from fedstream.history.live.collector import Collector
from fedstream.history.live.panels import event_line
from fedstream.history.live.recent import Recent, Ring
from fedstream.history.live.snapshot import GAUGED
from fedstream.settings.config import Settings
from tests.broker.guarded import KEYS, guarded, needs_7
from tests.support import EveryRole, Hand


def collector(client: Client, keys: Keys) -> Collector:
    return Collector(LivePageLedger(client, keys, "page"), Settings())


async def test_every_phase_of_a_task(client: Client, hand: Hand) -> None:
    """Until a coordinator hands it out, until it is taken, trained, answered, and admitted."""
    looking = collector(client, hand.keys)
    await hand.create()
    await hand.announce("t")
    await hand.request()

    async def phase() -> str:
        (found,) = [name for name, n in (await looking.look()).phases.items() if n]
        return found

    assert await phase() == "triggered"
    await hand.dispatch()
    assert await phase() == "waiting"
    ((entry, task),) = await hand.take()
    assert await phase() == "training"
    upload = await hand.trained(task)
    await client.call("XACK", hand.keys.tasks, "trainers", entry.id)
    await client.call("XDEL", hand.keys.tasks, entry.id)
    assert await phase() == "uploading"
    await hand.admit(upload)
    snapshot = await looking.look()
    assert snapshot.phases["queue"] == 1
    await hand.commit(1, upload)
    snapshot = await looking.look()
    assert not any(snapshot.phases.values())
    assert snapshot.tally.outcomes["applied"] == 1
    await hand.ledger.purge()


async def test_outcomes_with_what_their_version_says_of_them(client: Client, hand: Hand) -> None:
    looking = collector(client, hand.keys)
    await hand.create()
    assert (await looking.look()).ended.size == 0
    upload = await hand.admitted()
    await hand.commit(1, upload)
    (trigger,) = await hand.open()
    await hand.admit(
        GiveUp(
            task=trigger.task, attempt="1", device=trigger.device, trainer="t", reason="dropped out"
        )
    )
    await hand.ledger.tell(
        Event(
            what="evaluation", service="evaluator", time=2.0, version=1, metrics={"accuracy": 0.5}
        )
    )
    snapshot = await looking.look()
    used, dropped = snapshot.ended
    assert OUTCOMES[used["outcome"]] == "applied"
    assert used["device"] == upload.device
    assert OUTCOMES[dropped["outcome"]] == "given_up"
    assert snapshot.reasons[dropped["reason"]] == "dropped out"
    assert np.isnan(dropped["loss"])
    assert [(one.version, one.metrics) for one in snapshot.measured] == [(1, {"accuracy": 0.5})]
    told = [event.outcome or event.what for event in snapshot.told]
    assert told == ["applied", "given_up", "evaluation"]
    assert (await looking.look()).told == snapshot.told


async def test_suspects_are_counted_by_device(client: Client, hand: Hand) -> None:
    looking = collector(client, hand.keys)
    await hand.create()
    for device in (3, 4, 3):
        await hand.ledger.tell(
            Event(what="suspect", service="updater", time=2.0, device=device, version=1)
        )
    snapshot = await looking.look()
    assert snapshot.suspects == {3: 2, 4: 1}
    assert event_line(snapshot.told[-1])[1:] == ("suspect", "updater · device 3 · version 1")


async def test_foreign_events_and_register_entries_do_no_harm(client: Client, hand: Hand) -> None:
    looking = collector(client, hand.keys)
    await hand.create()
    await hand.announce("t")
    await client.call("HSET", hand.keys.trainers, "t", "junk")
    await client.call("XADD", hand.keys.events, "*", "m", "junk")
    await client.call("XADD", hand.keys.events, "*", "other", "field")
    snapshot = await looking.look()
    assert [(one.name, one.owns) for one in snapshot.workers] == [("t", 0)]
    assert [event.what for event in snapshot.told] == ["trainer"]


async def test_rates_over_what_was_seen(client: Client, hand: Hand) -> None:
    looking = collector(client, hand.keys)
    await hand.create()
    assert (await looking.look()).rate("version") is None
    await hand.commit(1, await hand.admitted())
    seen = await looking.look()
    rate = seen.rate("version")
    assert rate is not None
    assert seen.rate("decided") == rate > 0


def test_ring_keeps_the_newest_in_order() -> None:
    ring = Ring(GAUGED, 3)
    numbers = [ring.add((float(n), n, *[0] * 11)) for n in range(20)]
    assert numbers == list(range(20))
    ring.set(18, "memory", 5)
    ring.set(2, "memory", 5)  # long gone
    assert ring.newest()[["open", "memory"]].tolist() == [(17, 0), (18, 5), (19, 0)]


@needs_7
@pytest.mark.process
async def test_coordinators_own_rights_suffice(tmp_path: Path) -> None:
    with guarded(tmp_path) as there:
        async with there.client("admin") as admin:
            hand = Hand(admin, KEYS, EveryRole(admin, KEYS, "test"))
            await hand.create()
            await hand.announce("t")
            await hand.open(2)
            await hand.take()
            await hand.admitted()
            async with there.client("coordinator") as client:
                looking = collector(client, KEYS)
                snapshot = await looking.look()
                assert sum(snapshot.phases.values()) == 3
                await hand.commit(1)
                await looking.look()
            assert await admin.call("ACL", "LOG") == []


def test_numbers_and_times_that_nobody_can_mean() -> None:
    """A device says how many samples it has: a message may hold larger numbers than a column."""
    recent, huge = Recent(), 1 << 63
    used = Contribution(
        task="a", device=huge, tau=0, staleness=0, weight=1.0, samples=huge, steps=huge
    )
    version = Version(
        version=huge, time=float("nan"), epoch=1, digest="d", blob="b", size=1, updates=(used,)
    )
    recent.publish([Entry("1-0", version.encode())])
    for n, (task, time) in enumerate([("a", 1e300), ("b", float("-inf"))]):
        event = Event(
            what="outcome",
            service="updater",
            time=time,
            task=task,
            device=huge,
            version=huge,
            staleness=huge,
            outcome="applied",
        )
        recent.tell([Entry(f"{2 + n}-0", event.encode())])
        assert 0 <= recent.told[-1].time <= 253_402_300_799
    most = np.iinfo(np.int64).max
    for name in ("device", "version", "staleness"):
        assert recent.ended.newest()[name].tolist() == [most, most]
    assert recent.made.newest()[["version", "time"]].tolist() == [(most, 0.0)]


def test_devices_and_evaluator_measure_the_same_version() -> None:
    """In any order; the feed says how many devices did."""
    recent = Recent()
    told = [("devices_evaluated", {"devices_loss": 0.5}), ("evaluation", {"loss": 0.25})]
    for n, (what, metrics) in enumerate(told):
        event = Event(
            what=what, service="s", time=1.0, version=7, metrics=metrics, text="2 of 3 devices"
        )
        recent.tell([Entry(f"{n}-0", event.encode())])
    assert recent.measured[7].metrics == {"devices_loss": 0.5, "loss": 0.25}
    assert [event_line(one)[2] for one in recent.told] == [
        "version 7: 2 of 3 devices, devices_loss 0.5000",
        "version 7: loss 0.2500",
    ]
