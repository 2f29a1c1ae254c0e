"""Whatever happens in whatever order, and however often it is repeated: every task has one end.

A random walk over everything that services do to the ledger. Messages are delivered twice, answers
are given twice, replies are lost (a step is simply made again), leaders change, memory runs out in
the middle. After every step the books balance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.streams import Entry, Group
from fedstream.core.errors import OutOfMemory
from fedstream.core.messages import (
    POOL,
    Assignment,
    CloseRound,
    Dead,
    GiveUp,
    Outcome,
    Presence,
    Trigger,
    Upload,
    Withdraw,
    decode,
)
from fedstream.core.records import Commit, End
from tests.support import SIZE_LIMIT, Hand, full

STEPS = 1000


class Walk:
    """Services that do their work, and then sometimes do it again."""

    def __init__(self, hand: Hand, seed: int) -> None:
        self.hand = hand
        self.rng = random.Random(seed)
        self.version = 0
        self.delivered: list[Entry] = []  # triggers and uploads, as the coordinator saw them
        self.leased: list[tuple[str, Entry, Assignment]] = []  # stream, entry, task
        self.said: list[Upload | GiveUp] = []
        self.held: list[tuple[str, Upload]] = []  # buffered: entry, upload
        self.commits: list[Commit] = []
        self.retried = 0

    def steps(self) -> list[Callable[[], Awaitable[object]]]:
        return [
            self.trigger,
            self.trigger,
            self.own_trigger,
            self.request,
            self.dispatch,
            self.dispatch,
            self.take,
            self.take,
            self.answer,
            self.answer,
            self.answer,
            self.admit,
            self.admit,
            self.admit,
            self.commit,
            self.commit,
            self.commit,
            self.close_round,
            self.bury,
            self.withdraw,
            self.join,
            self.leave,
            self.repeat_admit,
            self.repeat_commit,
            self.say_again,
            self.retry,
        ]

    async def trigger(self) -> None:
        view = await self.hand.ledger.look()
        triggers = [self.hand.trigger() for _ in range(self.rng.randint(1, 3))]
        draw = view.issued - self.rng.choice((0, 0, 0, 1))
        await self.hand.ledger.trigger(self.hand.scheduler.token, 8, draw, triggers)

    async def request(self) -> None:
        await self.hand.request()

    async def own_trigger(self) -> None:
        trigger = self.hand.trigger(origin="ann", device=self.hand.devices)
        for _ in range(self.rng.choice((1, 1, 2))):
            await self.hand.outbox.say(trigger)

    async def dispatch(self) -> None:
        for entry in await self.hand.triggers.read(count=2, block_ms=0):
            for _ in range(self.rng.choice((1, 1, 2))):
                message = decode(entry.data, Trigger, CloseRound, Withdraw)
                if isinstance(message, CloseRound):
                    await self.hand.ledger.close_round(entry, message)
                elif isinstance(message, Withdraw):
                    await self.hand.ledger.withdraw(entry, message)
                else:
                    await self.hand.ledger.dispatch(entry, message)

    async def take(self) -> None:
        for stream in (self.hand.keys.tasks, self.hand.keys.tasks_of("owner")):
            group = Group(self.hand.client, stream, TRAINERS, "t")
            await group.ensure()
            self.leased += [
                (stream, entry, Assignment.decode(entry.data))
                for entry in await group.read(count=2, block_ms=0)
            ]
        self.leased = self.leased[-6:]  # some of them answered before

    async def answer(self) -> None:
        if not self.leased:
            return
        stream, entry, task = self.rng.choice(self.leased)
        attempt = f"a{self.rng.randint(1, 3)}"
        said: Upload | GiveUp
        if self.rng.random() < 0.1:
            said = GiveUp(
                task=task.task, attempt=attempt, device=task.device, trainer="t", reason="tired"
            )
        else:
            wrong: dict[str, Any] = self.rng.choice(
                ({}, {}, {}, {}, {"layout": "x"}, {"base": "x"})
            )
            said = await self.hand.trained(task, attempt=attempt, **wrong)
        self.said.append(said)
        if self.rng.random() < 0.8:
            await self.hand.outbox.answer(stream, entry, said)
        else:
            await self.hand.client.call(
                "XADD", self.hand.keys.inbox("pool"), "*", "m", said.encode()
            )

    async def say_again(self) -> None:
        if self.said:
            said = self.rng.choice(self.said)
            await self.hand.client.call(
                "XADD", self.hand.keys.inbox("pool"), "*", "m", said.encode()
            )

    async def admit(self) -> None:
        for entry in await self.hand.inbox.read(count=2, block_ms=0):
            self.delivered.append(entry)
            await self._admit(entry)

    async def repeat_admit(self) -> None:
        if self.delivered:
            await self._admit(self.rng.choice(self.delivered))

    async def _admit(self, entry: Entry) -> None:
        """Whatever the pool said."""
        said = decode(entry.data, Upload, GiveUp, Trigger, Presence)
        ledger = self.hand.ledger
        match said:
            case Trigger():
                await ledger.take_up(POOL, entry, said, anarchic=True, rate=1000, limit=10)
            case Presence():
                await ledger.hear(POOL, entry, said, most=10, rate=1000)
            case Upload() | GiveUp():
                await ledger.admit(entry, said, size_limit=SIZE_LIMIT)

    async def commit(self) -> None:
        """The updater takes the next entry that it does not hold."""
        held = {entry for entry, _ in self.held}
        waiting = [(id_, m) for id_, m in await self.hand.queue() if id_ not in held]
        if not waiting:
            return
        entry, message = waiting[0]
        outcome: Outcome = self.rng.choice(
            ("applied", "applied", "buffered", "buffered", "refused")
        )
        uploads, entries, ends = [], [entry], []
        if isinstance(message, Upload):
            ends = [End(message.task, message.attempt, outcome, "bad" * (outcome == "refused"))]
            uploads = [message]
        makes_version = outcome == "applied"
        if makes_version:
            entries += [entry for entry, _ in self.held]
            uploads += [upload for _, upload in self.held]
        elif outcome == "buffered" and uploads:
            entries, uploads = [], []
        version = await self.hand.publish(self.version + 1) if makes_version else None
        commit = Commit(
            versions=[version] if version else [],
            mean_staleness=0.0,
            held=() if makes_version else [upload.device for _, upload in self.held],
            ends=ends,
            entries=entries,
            updates=[upload.blob for upload in uploads],
            retired=[f"{self.version}.{self.hand.updater.number}"] if makes_version else [],
        )
        done = await self.hand.ledger.commit(self.hand.updater.token, commit)
        assert done.what == "done"
        self.commits.append(commit)
        if makes_version:
            self.version += 1
            self.held = []
        elif outcome == "buffered" and isinstance(message, Upload):
            self.held.append((entry, message))

    async def repeat_commit(self) -> None:
        """Only the newest commit is ever repeated: its reply was lost."""
        if self.commits:
            reply = await self.hand.ledger.commit(self.hand.updater.token, self.commits[-1])
            assert reply.what == "done"

    async def close_round(self) -> None:
        view = await self.hand.ledger.look()
        opened = sorted(trigger.task for trigger in view.open)
        tasks = [task for task in opened if self.rng.random() < 0.05]
        closing = CloseRound(version=self.version, tasks=tuple(tasks), why="round over")
        await self.hand.ledger.ask(closing)

    async def withdraw(self) -> None:
        """Some were open for too long, also such as are leased or answered."""
        view = await self.hand.ledger.look()
        tasks = sorted(trigger.task for trigger in view.open if self.rng.random() < 0.05)
        await self.hand.ledger.ask(Withdraw(tasks=tuple(tasks), why="timed out"))

    async def bury(self) -> None:
        if self.leased and self.rng.random() < 0.6:
            stream, entry, task = self.rng.choice(self.leased)
            await self.hand.ledger.bury(stream, TRAINERS, entry, "poison", task=task)

    async def retry(self) -> None:
        """An operator has a dead letter's work done again; the reply may be lost."""
        rows = await self.hand.client.call("XRANGE", self.hand.keys.dead, "-", "+")
        if not rows:
            return
        id_, fields = self.rng.choice(rows)
        task = Assignment.decode(Dead.decode(fields[1]).data)
        again = self.hand.trigger(device=task.device)
        for _ in range(self.rng.choice((1, 1, 2))):
            verdict, _ = await self.hand.ledger.retry(id_.decode(), task.task, again)
            self.retried += verdict == "sent"

    async def join(self) -> None:
        await self.hand.outbox.announce("owner", (1, 2))

    async def leave(self) -> None:
        if self.rng.random() < 0.1:
            await self.hand.ledger.leave(b"owner")


@pytest.mark.parametrize("seed", range(2))
async def test_every_task_ends_exactly_once(
    hand: Hand, client: Client, keys: Keys, seed: int
) -> None:
    await hand.create(versions=10**6, devices=10**6)
    await hand.triggers.ensure()
    await hand.inbox.ensure()
    walk = Walk(hand, seed)
    for _ in range(STEPS):
        step = walk.rng.choice(walk.steps())
        if walk.rng.random() < 0.05:
            async with full(client):
                with suppress(OutOfMemory):
                    await step()
        else:
            await step()
        await hand.balanced()

    view = await hand.ledger.look()
    assert view.issued > 50
    assert all(n > 0 for n in view.outcomes.values()), view.outcomes  # it went everywhere
    assert view.reasons("stray").keys() >= {"answered twice", "late"}
    assert walk.retried > 0
    # What is counted is what was told, once for each task; and no end was told twice.
    ends = Counter(event.task for event in await hand.events())
    assert set(ends.values()) == {1}
    told = Counter(event.outcome for event in await hand.events())
    assert told == {outcome: n for outcome, n in view.outcomes.items() if n}
    assert ends.keys().isdisjoint({trigger.task for trigger in view.open})
    # An admitted task is in the queue, and only an admitted or buffered one is.
    queued = {m.task for _, m in await hand.queue() if isinstance(m, Upload)}
    admitted = set(await client.call("HKEYS", keys.admitted))
    assert {task.decode() for task in admitted} == queued - {u.task for _, u in walk.held}
