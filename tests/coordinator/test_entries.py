"""Messages of sites are bounded: events, triggers, announcements and claims."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedstream.broker.keys import Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.ledger.trainer import Outbox
from fedstream.coordinator.entries import LARGEST
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.coordinator.sites import served
from fedstream.core.errors import ConfigError
from fedstream.core.messages import (
    OWNED,
    Dead,
    Event,
    Presence,
    Trigger,
    Upload,
    time_of,
)
from fedstream.core.records import PrivacyLoss, Run
from fedstream.trainer.settings import TrainerSettings
from tests.support import Hand, context, running, wait_until

NORTH = "north"


@pytest.fixture
async def run(hand: Hand) -> Hand:
    """A run of ten devices, of which north owns one."""
    await hand.create()
    await hand.announce("edge", 3, site=NORTH)
    return hand


@pytest.fixture
def make(make: Any) -> Any:
    """A coordinator that also serves north, whose devices may trigger themselves."""
    return partial(make, sites=("pool", "north:3-4,7"), anarchic=True)


async def heard(run: Hand, n: int) -> None:
    """Waits until so many more entries of north's were dealt with."""
    outbox = Outbox(run.client, run.keys, NORTH)
    await outbox.announce("edge", (3,), answers=n)

    async def told() -> bool:
        return (await run.ledger.trainers()).get("north/edge", {}).get("answers") == n

    await wait_until(told)


async def strays(run: Hand) -> dict[str, int]:
    return (await run.ledger.look()).reasons("stray")


async def test_coordinator_sets_origin_and_task_of_a_sites_trigger(
    make: Any, run: Hand, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id's time is Redis's: of the ended tasks, those with the newest ids are remembered."""
    now = time.time()
    monkeypatch.setattr(time, "time_ns", lambda: int((now - 3600) * 1e9))
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    said = run.trigger(device=3, origin="scheduler", task="0", why="round", version=0, deadline=1.0)
    async with running(make(), context()):
        await Outbox(run.client, keys, NORTH).say(said)
        await heard(run, 1)
    [opened] = (await run.ledger.look()).open
    assert time_of(opened.task) == pytest.approx(now, abs=60)
    assert opened == said.model_copy(
        update={
            "task": opened.task,
            "origin": "north/scheduler",
            "why": "own initiative",
            "version": None,
            "deadline": None,
        }
    )


@pytest.mark.parametrize(
    "length",
    [
        {"steps": 1_000_001, "epochs": None},
        {"epochs": 1001},
        {"seconds": 1e9, "epochs": None},
        {"seconds": float("inf"), "epochs": None},
    ],
)
async def test_trigger_for_too_long_is_rejected(
    make: Any, run: Hand, keys: Keys, length: dict[str, Any]
) -> None:
    async with running(make(), context()):
        await Outbox(run.client, keys, NORTH).say(run.trigger(device=3, origin="edge", **length))
        await heard(run, 1)
    assert await strays(run) == {"trigger for too long": 1}
    assert (await run.ledger.look()).issued == 0


async def test_many_triggers_open_one_task_per_device(make: Any, run: Hand, keys: Keys) -> None:
    """From rotating names, for devices of anybody and of nobody."""
    data = [
        Trigger(task=str(n), device=n % 12, seed=0, steps=1, origin=f"t{n}").encode()
        for n in range(1000)
    ]
    await run.client.pipeline([("XADD", keys.inbox(NORTH), "*", "m", one) for one in data])
    async with running(make(trigger_rate=50), context()):
        await heard(run, 1)
    view = await run.ledger.look()
    assert (view.issued, [one.device for one in view.open]) == (1, [3])
    assert sum(view.reasons("stray").values()) == 999
    assert view.reasons("stray")["trigger over the limit"] > 300
    await run.balanced()


async def test_devices_cannot_trigger_under_a_scheduler_policy(
    make: Any, run: Hand, keys: Keys
) -> None:
    async with running(make(anarchic=False), context()):
        await Outbox(run.client, keys, NORTH).say(run.trigger(device=3, origin="edge"))
        await heard(run, 1)
    assert await strays(run) == {"trigger of its own": 1}


async def test_device_of_a_recent_private_sum_cannot_trigger(
    make: Any, run: Hand, keys: Keys
) -> None:
    loss = PrivacyLoss(1, 0, 1.0, 1e-5, recent=frozenset({3}))
    await run.client.call("HSET", keys.run, "policy", "{}")
    await run.client.call("HSET", keys.head, "privacy", loss.packed())
    async with running(make(), context()):
        await Outbox(run.client, keys, NORTH).say(run.trigger(device=3, origin="edge"))
        await heard(run, 1)
    assert await strays(run) == {"trigger for a busy device": 1}


async def test_only_a_sites_errors_are_relayed_and_rate_limited(
    make: Any, run: Hand, keys: Keys
) -> None:
    outbox = Outbox(run.client, keys, NORTH)
    forged = Event(what="evaluation", service="evaluator", time=1.0, metrics={"accuracy": 1.0})
    error = Event(
        what="error",
        service="edge",
        time=float("inf"),
        task="t",
        device=3,
        reason="r" * 999,
        text="x" * 20_000,
        metrics={"accuracy": 1.0},
        outcome="applied",
    )
    unmeasured = error.model_copy(update={"device": None})  # as the evaluator says it
    async with running(make(), context()):
        for foreign in (forged, unmeasured):
            await outbox.say(foreign)
        for _ in range(40):
            await outbox.say(error)
        await heard(run, 1)
    assert await run.events("evaluation") == []
    told = await run.events("error")
    assert 10 <= len(told) <= 20  # 10 a second, and another second may have begun
    said = {(one.service, one.site, one.metrics, one.outcome) for one in told}
    assert said == {("north/edge", "north", None, None)}
    assert all(0 < one.time < 1e11 and len(one.text or "") == 8000 for one in told)
    assert (await strays(run))["event over the limit"] == 40 - len(told)
    rows = await run.client.call("XRANGE", keys.dead, "-", "+")
    assert len(rows) == 2
    for _, fields in rows:
        assert "must not send event" in Dead.decode(fields[1]).reason


async def test_foreign_layouts_of_encoded_updates_do_not_read_the_run_each_time(
    make: Any, run: Hand, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only now and then, in case there is another run of this name."""
    read, reads = CoordinatorLedger.run, list[int]()

    async def reading(self: CoordinatorLedger) -> Run:
        reads.append(1)
        return await read(self)

    async def say(n: int, layout: str) -> None:
        for _ in range(n):
            task = run.trigger(device=3)
            said = await run.trained(task, write=False, layout=layout, format="bf16")
            await run.client.call("XADD", keys.inbox(NORTH), "*", "m", said.encode())

    monkeypatch.setattr(CoordinatorLedger, "run", reading)
    monkeypatch.setattr("fedstream.coordinator.entries._LAYOUT_S", 1e9)
    async with running(make(), context()):
        await heard(run, 1)
        before = len(reads)
        await say(20, run.layout.signature)
        await heard(run, 2)
        assert len(reads) == before + 1
        await say(20, "foreign")
        await heard(run, 3)
        assert len(reads) == before + 1
        monkeypatch.setattr("fedstream.coordinator.entries._LAYOUT_S", 0.0)
        await say(1, "other")
        await heard(run, 4)
        assert len(reads) == before + 2
    assert (await strays(run))["unknown task"] == 41


async def test_site_trainer_must_own_devices_of_its_site(make: Any, run: Hand, keys: Keys) -> None:
    outbox = Outbox(run.client, keys, NORTH)
    with capture_logs() as logs:
        async with running(make(), context()):
            for _ in range(3):
                await outbox.say(Presence(trainer="idle"))
            await outbox.say(Presence(trainer="greedy", owns=(4, 5)))
            await heard(run, 1)
    assert "north/idle" not in await run.ledger.trainers()
    assert [one["trainer"] for one in logs if "owns no device" in one["event"]] == ["north/idle"]
    assert await run.ledger.owners() == {3: "north/edge", 4: "north/greedy"}
    assert await strays(run) == {"trainer without devices": 3}


async def test_unserved_site_is_ignored(make: Any, run: Hand, keys: Keys) -> None:
    await Outbox(run.client, keys, "elsewhere").say(Presence(trainer="t", owns=(5,)))
    async with running(make(), context()):
        await heard(run, 1)
    assert list(await run.ledger.trainers()) == ["north/edge"]


async def test_untrusted_site_cannot_end_others_tasks_or_claim_freshness(
    make: Any, run: Hand, keys: Keys
) -> None:
    await run.announce("ann")  # else nobody serves the pool, and its tasks are given up
    own, others = await run.request(device=3), await run.request(device=5)
    assert await run.dispatch() == ["sent", "sent"]
    assert await run.commit(1) == "done"
    upload = await run.trained(own[0], site=NORTH)
    dead = Dead(stream="tasks", entry="1-1", reason="x", time=1.0, data=others[0].encode())
    async with running(make(), context()):
        for said in (upload, dead):
            await run.client.call("XADD", keys.inbox(NORTH), "*", "m", said.encode())
        await heard(run, 1)
    [(_, found)] = await run.queue()
    assert (upload.tau, getattr(found, "handed", None)) == (1, 0)
    assert others[0].task in {one.task for one in (await run.ledger.look()).open}


async def queued_claims(
    run: Hand, service: Coordinator, asked: dict[str, Any], **claims: Any
) -> Upload | None:
    """North's answer to such a task, with such claims, as the updater gets it; None if refused."""
    [task] = await run.request(device=3, **asked)
    assert await run.dispatch() == ["sent"]
    upload = await run.trained(task, site=NORTH, **claims)
    async with running(service, context()):
        await run.client.call("XADD", run.keys.inbox(NORTH), "*", "m", upload.encode())

        await heard(run, 1)
    queued = [message for _, message in await run.queue()]
    assert len(queued) <= 1
    found = queued[0] if queued else None
    assert found is None or isinstance(found, Upload)
    return found


@pytest.mark.parametrize(
    ("asked", "trusted", "claimed", "counted"),
    [
        ({"steps": 5}, False, 1, 5),
        ({"steps": 5}, False, 0, 0),  # where a rule divides by them, it is refused
        ({"steps": 5}, True, 1, 1),
        ({"epochs": 3}, False, 1, 3),
        ({"epochs": 3}, False, 70, 70),
        ({"seconds": 9.0}, False, 2**53, 1000),
    ],
)
async def test_untrusted_site_cannot_claim_other_steps_than_were_asked(
    make: Any, run: Hand, asked: dict[str, Any], trusted: bool, claimed: int, counted: int
) -> None:
    service = make(trusted_sites=("pool", NORTH) if trusted else ("pool",), most_steps=1000)
    found = await queued_claims(run, service, {"epochs": None, **asked}, steps=claimed)
    assert found is not None
    assert found.steps == counted


@pytest.mark.parametrize(
    ("claimed", "settings", "is_admitted"),
    [
        (0.01, {}, True),
        (0.0099, {}, False),
        (1.0, {}, True),
        (1.01, {}, False),
        (0.049, {"lr_factor": 2.0}, False),
        (1e-9, {"lr_factor": 0}, True),
        (1e-9, {"trusted_sites": ("pool", NORTH)}, True),
        (0.0, {}, True),  # refused by the updater, as an update without steps
    ],
)
async def test_rate_far_from_the_configured_one_is_refused_and_never_replaced(
    make: Any, run: Hand, claimed: float, settings: dict[str, Any], is_admitted: bool
) -> None:
    """Such as one that a task's own training chose."""
    service = make(lr_of=lambda device, _tau: device / 30, **settings)
    found = await queued_claims(run, service, {}, lr=claimed)
    assert (None if found is None else found.lr) == (claimed if is_admitted else None)
    refused = (await run.ledger.look()).reasons("refused")
    assert refused == ({} if is_admitted else {"learning rate": 1})


async def test_rate_is_refused_if_the_schedule_has_none_for_the_claimed_version(
    make: Any, run: Hand
) -> None:
    """A site names the version: no number may end the coordinator."""

    def raises(_device: int, tau: int) -> float:
        raise ZeroDivisionError(tau)

    assert await queued_claims(run, make(lr_of=raises), {}, lr=0.1) is None


@pytest.mark.parametrize("factor", [-1.0, 0.5])
def test_factor_of_rates_is_none_or_at_least_one(factor: float) -> None:
    with pytest.raises(ValueError, match=r"lr_factor\n.*0 \(no bound\) or at least 1"):
        CoordinatorSettings(lr_factor=factor)


@pytest.mark.parametrize(
    ("claimed", "counted"),
    [
        ((1e308, math.inf), (1e30, 500.0)),
        ((-math.inf, math.nan), (-1e30, 0.0)),
        ((math.nan, 1.5), (math.nan, 1.5)),  # an honest device's training may end so
        ((None, -1.0), (None, 0.0)),
    ],
)
async def test_losses_and_times_of_an_untrusted_site_can_be_added_up(
    make: Any, run: Hand, claimed: tuple[float | None, float], counted: tuple[float | None, float]
) -> None:
    service = make(most_seconds=500.0)
    found = await queued_claims(run, service, {}, loss=claimed[0], seconds=claimed[1])
    assert found is not None
    assert (found.loss, found.seconds) == pytest.approx(counted, nan_ok=True)


# which sites there are


def test_sites_may_list_the_devices_they_may_own() -> None:
    sites = served(("pool", "north", "south:0-2,9"), ("pool", "north"))
    assert [(one.name, one.trusted) for one in sites.values()] == [
        ("pool", True),
        ("north", True),
        ("south", False),
    ]
    assert sites["south"].denied(range(10)) == [3, 4, 5, 6, 7, 8]
    assert sites["north"].denied(range(10)) == []


@pytest.mark.parametrize(
    ("named", "trusted", "said"),
    [
        (("north",), (), "'pool' is missing"),
        (("pool", "no/rth"), (), "'no/rth' is not a valid name"),
        (("pool", "north*"), (), "is not a valid name"),
        (("pool", "north", "north:1"), (), "'north' is listed twice"),
        (("pool", "north:1-"), (), "expected 'name', or 'name:0-99,200'"),
        (("pool", "north:"), (), "expected 'name'"),
        (("pool",), ("south",), "trusted_sites: 'south' is not in coordinator.sites"),
    ],
)
def test_invalid_site_is_a_one_line_error(
    named: tuple[str, ...], trusted: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")) as raised:
        served(named, trusted)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="coordinator"):
        CoordinatorSettings(sites=named, trusted_sites=trusted)


def test_owned_devices_are_limited_to_what_fits_an_announcement() -> None:
    """What is too long to be taken in would leave it unheard for ever."""
    most = range(2**31 - OWNED, 2**31)  # whose numbers are the longest
    said = Presence(trainer="t" * 200, owns=tuple(most), host="h" * 255, pid=2**32, device=most[0])
    assert len(b"m" + said.encode()) <= LARGEST
    assert len(TrainerSettings(owns=tuple(most)).owns) == OWNED
    with pytest.raises(ValueError, match=r"(?s)owns.* at most 50000 items"):
        TrainerSettings(owns=tuple(range(OWNED + 1)))


def test_trainer_outside_the_pool_must_own_devices() -> None:
    assert TrainerSettings(site="north", owns=(1,)).site == "north"
    with pytest.raises(ValueError, match=r"trainer.site = 'north' needs trainer\.owns: only the"):
        TrainerSettings(site="north")
    with pytest.raises(ValueError, match=r"trainer\.site: 'a/b' is not a valid name"):
        TrainerSettings(site="a/b", owns=(1,))
