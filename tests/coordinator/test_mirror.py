"""What the scheduler makes of the log of changes is what a look at everything says.

A random walk over everything that services do to the ledger, in which Redis also falls back to an
older state, is emptied, loses a register, and is changed by a release that doesn't know the log.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.coordinator.mirror import Mirror
from fedstream.core.messages import POOL, GiveUp
from fedstream.core.records import NO_QUARANTINES, Commit, Failing, PrivacyLoss
from fedstream.runtime.task_settings import FixedSteps, Participation, ParticipationGroup
from tests.broker.test_invariant import Walk
from tests.support import Hand, askable

STEPS = 300
DEVICES = 150
OPENED = count()


class Follower(Walk):
    """A walk with a scheduler that follows it."""

    def __init__(self, hand: Hand, seed: int) -> None:
        super().__init__(hand, seed)
        self.parts = Participation(FixedSteps(), [ParticipationGroup(devices=(1, 4), rate=2.5)])
        self.mirror = Mirror(self.parts)
        self.kept: list[tuple[bytes, int, bytes]] = []  # an older state of Redis
        self.updater = (0, [*self.held])  # and the updater as it was then
        self.whole = self.partial = self.noticed = 0
        self.rested = 0  # devices, at all looks together
        self.untold = False  # whether something changed since the last look that no log tells
        self.quarantines = NO_QUARANTINES

    def steps(self) -> list[Callable[[], Awaitable[object]]]:
        return [
            *super().steps(),
            self.own,
            self.own,
            self.own,
            self.away,
            self.pool,
            self.bar,
            self.spend,
            self.look,
            self.look,
            self.look,
            self.look,
            self.keep,
            self.fall_back,
            self.empty,
            self.cut,
            self.lose_owners,
            self.earlier_release,
            self.fail,
            self.fail,
        ]

    async def own(self) -> None:
        """A trainer claims other devices than before: a few, or many."""
        most = self.rng.choice((3, 5, DEVICES + 5))
        owns = sorted(self.rng.sample(range(DEVICES + 10), self.rng.randint(1, most)))
        await self.hand.announce(self.rng.choice(("a", "b")), *owns, site="north")

    async def away(self) -> None:
        if self.rng.random() < 0.5:
            await self.hand.ledger.leave(self.rng.choice((b"north/a", b"north/b", b"pooled")))

    async def pool(self) -> None:
        if self.rng.random() < 0.5:
            await self.hand.outbox.announce("pooled")

    async def bar(self) -> None:
        """The updater takes an operator's entry."""
        device = self.rng.randrange(10)
        if device in self.quarantines.by_device:
            self.quarantines = self.quarantines.released([device])
        else:
            self.quarantines = self.quarantines.quarantined([device], "", 1.5, 0)
        await self.hand.ledger.commit(
            self.hand.updater.token,
            Commit(held=(), mean_staleness=0.0, quarantines=self.quarantines),
        )

    async def spend(self) -> None:
        """Sums of a private run are opened."""
        spent = frozenset(self.rng.sample(range(DEVICES), self.rng.choice((0, 1, 5))))
        loss = PrivacyLoss(opened=1, dropped=0, epsilon=1.0, delta=1e-5, spent=spent)
        await self.hand.ledger.commit(
            self.hand.updater.token, Commit(held=(), mean_staleness=0.0, privacy=loss)
        )

    async def fail(self) -> None:
        """A device gives up a task, and another."""
        device, view = self.rng.randrange(3), await self.hand.ledger.look()
        both = [self.hand.trigger(device=device) for _ in range(2)]
        await self.hand.ledger.trigger(self.hand.scheduler.token, 99, view.issued, both)
        for task in both:
            said = GiveUp(task=task.task, attempt="a", device=device, trainer="t", reason="tired")
            await self.hand.client.call("XADD", self.hand.keys.inbox(POOL), "*", "m", said.encode())

    async def look(self) -> None:
        """The scheduler looks, and then knows what a look at everything tells."""
        tally, changes = await self.hand.ledger.changes(self.mirror.place)
        self.whole += changes.all_tasks
        self.partial += not changes.all_tasks
        if not self.mirror.follow(tally, changes, tally.now):
            assert self.untold
            self.noticed += 1
            tally, changes = await self.hand.ledger.changes()
            assert self.mirror.follow(tally, changes, tally.now)
        self.untold = False
        view = await self.hand.ledger.look()
        opened = {trigger.task: trigger for trigger in view.open}
        assert {trigger.task: trigger for trigger in self.mirror.tasks} == opened
        failing = await self.hand.ledger.failing()
        assert self.mirror.failing == failing
        resting = {device for device, one in failing.items() if one.until > tally.now}
        self.rested += len(resting)
        served = [device for device in askable(view) if device not in resting]
        assert list(self.mirror.devices) == served
        at_work = {trigger.device for trigger in view.open}
        idle = [device for device in served if device not in at_work]
        assert list(self.mirror.idle) == idle
        if idle:
            draws = (random.Random(7), random.Random(7))
            assert self.parts.pick(draws[0], self.mirror.idle) == self.parts.pick(draws[1], idle)
        assert (view.tasks, view.issued) == (len(view.open), tally.issued)

    async def keep(self) -> None:
        """Redis writes its state down."""
        if not self.kept or self.rng.random() < 0.3:
            self.updater = (self.version, [*self.held])
            call, prefix = self.hand.client.call, self.hand.keys.prefix
            names = await call("KEYS", prefix + "*")
            self.kept = [
                (name, max(await call("PTTL", name), 0), await call("DUMP", name)) for name in names
            ]

    async def fall_back(self) -> None:
        """It begins again with that state."""
        if self.kept and self.rng.random() < 0.3:
            await self._forget_all()
            for name, left_ms, data in self.kept:
                await self.hand.client.call("RESTORE", name, left_ms, data)
            self.version, held = self.updater
            self.held, self.commits = [*held], []

    async def empty(self) -> None:
        """It begins with nothing, and the updater publishes again."""
        if self.rng.random() < 0.1:
            await self._forget_all()
            self.hand.scheduler.number = 0  # it takes the lease anew
            await begun(self.hand)
            self.version, self.quarantines = 0, NO_QUARANTINES
            for some in (self.kept, self.held, self.commits, self.leased, self.delivered):
                some.clear()

    async def _forget_all(self) -> None:
        names = await self.hand.client.call("KEYS", self.hand.keys.prefix + "*")
        await self.hand.client.call("DEL", *names)

    async def cut(self) -> None:
        """Others' changes displace the oldest ones in the log."""
        await self.hand.client.call("XTRIM", self.hand.keys.changes, "MAXLEN", 1)

    async def lose_owners(self) -> None:
        """A foreign value took their place, and was moved aside."""
        if not self.untold and self.rng.random() < 0.3:
            self.untold = True
            await self.hand.client.call("DEL", self.hand.keys.owners)

    async def earlier_release(self) -> None:
        """Scripts of one that has no log end a task, open one, or let a device go.

        Once between two looks: if as many are opened as end, only a look at all of them shows it.
        """
        if self.untold:
            return
        self.untold = True
        call, keys = self.hand.client.call, self.hand.keys
        match self.rng.choice(("end", "open", "owner", "foreign")):
            case "end":
                for task in (await call("HKEYS", keys.open))[:1]:
                    await call("HDEL", keys.open, task)
                    await call("HINCRBY", keys.counts, "given_up", 1)
            case "open":
                trigger = self.hand.trigger()
                await call("HSET", keys.open, trigger.task, trigger.encode())
                await call("HINCRBY", keys.counts, "issued", 1)
            case "owner":
                for device in (await call("HKEYS", keys.owners))[:1]:
                    await call("HDEL", keys.owners, device)
            case "foreign":
                await call("HSET", keys.owners, f"junk{next(OPENED)}", "x")


async def begun(hand: Hand) -> None:
    await hand.create(versions=10**6, devices=DEVICES)
    await hand.triggers.ensure()
    await hand.inbox.ensure()


@pytest.mark.parametrize("seed", range(3))
async def test_following_changes_is_as_good_as_looking_at_everything(hand: Hand, seed: int) -> None:
    await begun(hand)
    walk = Follower(hand, seed)
    for _ in range(STEPS):
        await walk.rng.choice(walk.steps())()
    await walk.look()
    assert walk.partial > walk.whole > 0
    assert walk.noticed > 0
    assert walk.rested > 0


@pytest.mark.parametrize("is_new", [True, False])
async def test_no_device_rests_for_longer_because_the_clock_of_redis_went_back(
    hand: Hand, is_new: bool
) -> None:
    """Whether the scheduler begins to lead then, or knew the device before."""
    await hand.create()
    tally, changes = await hand.ledger.changes()
    before = tally.now
    changes = replace(changes, failing={3: Failing(9, before + 200, "raised OSError")})
    mirror, now = Mirror(Participation(FixedSteps())), before - 10_000
    if not is_new:
        mirror.follow(tally, changes, before)
        changes = replace(changes, failing={}, all_tasks=False, tasks={}, all_devices=False)
    mirror.follow(tally, changes, now)
    assert 3 not in mirror.devices
    nothing = replace(changes, failing={}, all_tasks=False, tasks={}, all_devices=False)
    mirror.follow(tally, nothing, now + 299)
    assert 3 not in mirror.devices
    mirror.follow(tally, nothing, now + 300)
    assert 3 in mirror.devices


async def test_device_of_a_recent_sum_is_not_asked(hand: Hand) -> None:
    """While the noise of later sums takes back that of its own."""
    await hand.create()
    tally, changes = await hand.ledger.changes()
    loss = PrivacyLoss(1, 0, 1.0, 1e-5, spent=frozenset({9}), recent=frozenset({3}))
    assert PrivacyLoss.parsed(loss.packed()) == loss
    mirror = Mirror(Participation(FixedSteps()))
    mirror.follow(replace(tally, head=replace(tally.head, privacy=loss)), changes, tally.now)
    assert 3 in mirror.devices
    assert 3 not in mirror.idle
    nothing = replace(changes, all_tasks=False, tasks={}, all_devices=False)
    mirror.follow(tally, nothing, tally.now)
    assert 3 in mirror.idle


@pytest.mark.parametrize("policy", ["", "a policy"])
async def test_device_in_a_private_batch_is_not_asked(hand: Hand, policy: str) -> None:
    """But it counts among the devices of a round; after the batch it is asked again."""
    await hand.create(policy=policy)
    mirror = Mirror(Participation(FixedSteps()))
    for held in ((1, 2), (2, 5), ()):
        await hand.ledger.commit(hand.updater.token, Commit(held=held, mean_staleness=0.0))
        tally, changes = await hand.ledger.changes(mirror.place)
        mirror.follow(tally, changes, tally.now)
        assert list(mirror.devices) == list(range(10))
        barred = held if policy else ()
        assert list(mirror.idle) == [device for device in range(10) if device not in barred]


async def test_no_more_is_read_than_what_changed(hand: Hand, client: Client, keys: Keys) -> None:
    """And ending a task or taking over a device is a change, of which the log tells."""
    await hand.create(devices=DEVICES)
    await hand.announce("own", *range(40))
    first, *_ = await hand.open(5)
    _, before = await hand.ledger.changes()
    assert (before.all_tasks, before.all_devices) == (True, True)
    tally, none = await hand.ledger.changes(before.place)
    assert (none.tasks, none.devices, none.all_tasks, none.all_devices) == ({}, {}, False, False)
    assert (tally.tasks, tally.owners, none.place) == (5, 40, before.place)

    [another] = await hand.open(limit=9)
    await hand.announce("own", *range(1, 42))
    _, some = await hand.ledger.changes(before.place)
    assert some.tasks == {another.task: another}
    assert some.devices == {0: False, 40: True, 41: True}
    await hand.announce("own", *range(1, 149))
    _, many = await hand.ledger.changes(some.place)
    assert (many.all_tasks, many.tasks, many.all_devices) == (False, {}, True)
    assert set(many.devices) == set(range(1, 149))

    await client.call("XTRIM", keys.changes, "MAXLEN", 1)
    _, cut = await hand.ledger.changes(some.place)
    assert first.task in cut.tasks
    assert (cut.all_tasks, cut.all_devices) == (True, True)


async def test_place_with_another_content_is_not_known(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Redis fell back, and a clock that lags behind gave the same id to another change."""
    await hand.create()
    await hand.open(2)
    _, before = await hand.ledger.changes()
    assert before.place is not None
    await client.call("DEL", keys.changes)
    _, emptied = await hand.ledger.changes(before.place)
    assert (emptied.all_tasks, emptied.place) == (True, None)
    for entry in (("d", before.place.value), ("t", "another")):
        await client.call("DEL", keys.changes)
        await client.call("XADD", keys.changes, before.place.id, *entry)
        assert (await hand.ledger.changes(before.place))[1].all_tasks
    await client.call("DEL", keys.changes)
    await client.call("XADD", keys.changes, before.place.id, "t", before.place.value)
    assert not (await hand.ledger.changes(before.place))[1].all_tasks


async def test_many_changes_are_not_told_one_by_one(hand: Hand) -> None:
    await hand.create()
    await hand.open()
    _, before = await hand.ledger.changes()
    await hand.open(1000)
    tally, some = await hand.ledger.changes(before.place)
    assert (len(some.tasks), some.all_tasks) == (1000, False)
    await hand.open()
    _, every = await hand.ledger.changes(before.place)
    assert (len(every.tasks), every.all_tasks, tally.tasks) == (1002, True, 1001)
