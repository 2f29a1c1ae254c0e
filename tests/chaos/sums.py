"""Private runs under faults: of the helper, of what is between, of updaters, and of Redis.

    python -m tests.chaos.sums [--faults 300] [--of 6] [--seed N ...]

A plan is a run that is played step by step from a seed: devices seal updates and answer, and before
most steps something fails. A helper is a process of its own; updaters and devices are in this one.
After each plan, the run must go on, and :func:`complaints` must find nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import structlog

from experiments import machine
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.core.errors import ConfigError, FedstreamError, Fenced
from fedstream.core.layout import Payload
from fedstream.core.messages import CloseRound, Trigger, Upload
from fedstream.core.records import View
from fedstream.journal import EntryRecord, JournalSettings, RoundClosed, SumOpened, Taken, segments
from fedstream.journal.inspection import verify
from fedstream.journal.progress import OUT_OF_RANGE
from fedstream.journal.replay import Replayer
from fedstream.local.redis_server import find_servers
from fedstream.private.masks import in_model_units
from fedstream.private.settings import PrivateSettings
from fedstream.strategies import FedAvgSettings, FedBuffSettings
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms
from fedstream.updater.service import Updater, UpdaterSettings
from tests.broker.servers import redis as redis_server
from tests.helper.between import Between, Trouble
from tests.helper.killable import Killable
from tests.private.devices import Devices
from tests.private.enrolled import files, policy_of
from tests.support import EveryRole, Hand, Pauses, Proxy, context, layout_of, model_of, wait_until
from tests.updater.journalled import backed_up, go_back, records

FAULTS = 6  # of a plan
DEVICES = 10
K = 4
RULES = {"fedbuff": FedBuffSettings(buffer_size=K), "fedavg": FedAvgSettings(clients_per_round=K)}
LAYOUT = layout_of(50)  # so many that a malformed update can't look like an honest one
ASK_S = 0.4
LATE_S = 0.6  # of an answer that the updater does not wait for
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos-sums.md"


class Fault(StrEnum):
    """What fails, besides the troubles of :class:`Trouble`."""

    HELPER_KILLED = "helper killed"
    KILLED_BEHIND_THE_STORE = "helper killed between store and answer"
    KILLED_WHEN_ASKED = "helper killed while it opens"
    STORE_LOST = "helper's store lost"
    STORE_ROLLED_BACK = "helper's store rolled back"
    REPLAYED = "old intents asked again"
    UPDATER_KILLED = "updater killed"
    KILLED_WHILE_ASKING = "updater killed while it asks"
    KILLED_WITH_ANSWER = "updater killed with the answer"
    LEADER_FORGOTTEN = "two updaters at once"
    JOURNAL_TORN = "journal's unsynced end lost"
    POWER_LOST = "journal's unsynced end lost, and Redis emptied"
    REDIS_EMPTIED = "Redis emptied"
    REDIS_FELL_BACK = "Redis fell back"
    REDIS_CUT = "connections to Redis cut"
    MALFORMED = "device sends a malformed update"
    RETRIED = "device sends two attempts"
    LATE_DEVICE = "device answers several versions later"


KINDS: tuple[Fault | Trouble, ...] = (*Fault, *Trouble)


@dataclass(frozen=True)
class Plan:
    """A run's parameters and faults, drawn from its seed."""

    seed: int
    rule: str
    sync: Literal["always", "interval"]
    sigma: float
    weights: tuple[int, ...]
    look_s: float  # between two looks of the updater at the helper's key
    faults: tuple[Fault | Trouble, ...]

    def __str__(self) -> str:
        faults = ", ".join(self.faults)
        return f"seed {self.seed} ({self.rule}, sync {self.sync}, sigma {self.sigma:g}): {faults}"


def plan(seed: int, of: int = FAULTS) -> Plan:
    """The plan of a seed: half of its faults are drawn, half follow from the seed in turn."""
    rng, half = random.Random(seed), -(-of // 2)
    in_turn = [KINDS[(seed * half + number) % len(KINDS)] for number in range(half)]
    faults = [*in_turn, *rng.choices(KINDS, k=of - half)]
    rng.shuffle(faults)
    return Plan(
        seed=seed,
        rule=rng.choice(("fedbuff", "fedbuff", "fedavg")),
        sync=rng.choice(("always", "interval")),
        sigma=rng.choice((0.0, 0.0, 0.5)),
        weights=rng.choice(((1,) * 20, (1,) * 20, (3, *(2,) * 19))),
        look_s=rng.choice((0.05, 1.0)),
        faults=tuple(faults),
    )


@dataclass
class Outcome:
    """What became of a plan."""

    plan: Plan
    complaints: list[str]
    happened: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    versions: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # batches, by reason
    counts: dict[str, int] = field(default_factory=dict)
    asked: int = 0  # intents that the helper answered, repetitions included


class Played:
    """A plan's run."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        proxy: Proxy,
        between: Between,
        client: Client,
        keys: Keys,
    ) -> None:
        self.plan, self.proxy, self.between = plan, proxy, between
        self.client, self.keys = client, keys
        self.rng = random.Random(-plan.seed - 1)
        self.rule = RULES[plan.rule]
        self.policy = policy_of(
            parameters=LAYOUT.parameters,
            sigma=plan.sigma,
            max_batch=K,
            weights=plan.weights,
            participations=10_000,
        )
        self.hand = Hand(client, keys, EveryRole(client, keys, "test"), LAYOUT)
        self.devices = Devices(self.hand, self.policy, np.random.default_rng(plan.seed))
        self.helper = Killable(files(folder, self.policy))
        self.journal = folder / "journal"
        self.updaters: list[tuple[Updater, asyncio.Task[None]]] = []
        self.starting = asyncio.Lock()  # held also while the journal's end is lost
        self.started = 0
        self.failures: list[str] = []  # of updaters, and of what should have been refused
        self.backup: dict[bytes, Any] | None = None  # of Redis
        self.kept_store: bytes | None = None  # the helper's, of an earlier moment
        self.lost_tasks: list[dict[tuple[str, str], str]] = []  # that lost stores have opened
        self.lost_spent: Counter[int] = Counter()
        self.happened: Counter[str] = Counter()
        self.late: list[Upload] = []  # trained, but not answered yet
        self.malformed: set[str] = set()  # tasks
        self.doing: set[asyncio.Task[None]] = set()

    # services

    async def start_updater(self) -> None:
        """Start an updater on the journal, beside those that run."""
        self.started += 1
        rule = PrivateSums.of(self.rule, PrivateTerms(policy=self.policy))
        run = self.hand.run(
            strategy=rule.name,
            versions=1000,
            devices=DEVICES,
            max_staleness=rule.max_staleness,
            sends=rule.sends,
            policy=rule.policy,
        )
        updater = Updater(
            UpdaterSettings(lease_s=0.5),
            rule,
            JournalSettings(dir=str(self.journal), sync=self.plan.sync, sync_s=3600.0),
            keys=self.keys,
            redis=self.proxy.settings,
            name=f"updater-{self.started}",
            create_run=lambda: (run, model_of(LAYOUT)),
            private=PrivateSettings(helper=self.between.url, ask_s=ASK_S),
        )
        async with self.starting:
            self.updaters.append((updater, asyncio.create_task(updater.run(context()))))

    async def kill_updaters(self) -> None:
        """Cut every updater off, wherever it is."""
        ending, self.updaters = self.updaters, []
        for _, task in ending:
            task.cancel()
        for _, task in ending:
            await asyncio.wait({task})
            self._note_end(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not _is_fenced(error):  # its supervisor starts a fenced one again
            self.failures.append(f"updater: {''.join(traceback.format_exception(error))}")

    async def start_helper(self) -> None:
        """Start the helper, unless it runs."""
        if self.between.helper is None:
            self.between.helper = await self.helper.start()

    def kill_helper(self) -> None:
        """Kill the helper."""
        self.between.helper = None
        self.helper.kill()

    async def goes_on(self) -> None:
        """Start what does not run, and wait for a leader."""
        await self.start_helper()
        await wait_until(self._is_led, what="a leader that publishes")

    async def _is_led(self) -> bool:
        ended = [one for one in self.updaters if one[1].done()]
        for one in ended:
            self._note_end(one[1])
            self.updaters.remove(one)
        if not self.updaters:
            await self.start_updater()
        return await self.hand.ledger.head() is not None

    def _leader(self) -> Updater | None:
        """The updater that has led last; None if none runs."""
        updaters = [updater for updater, _ in self.updaters if updater._lease.number]
        return max(updaters, key=lambda updater: updater._lease.number, default=None)

    # devices

    async def answer(self, device: int, *, malformed: bool = False, attempts: int = 1) -> None:
        """A device trains and answers, so many times at once."""
        task = await self._opened(device)
        if malformed:
            self.malformed.add(task.task)
        await wait_until(self._has_key, what="the helper's key in Redis")
        try:
            uploads = [
                await self.devices.trains(task, f"a{number}", malformed=malformed)
                for number in range(attempts)
            ]
            await self.hand.admit(*uploads)
        except (FedstreamError, AssertionError):  # Redis was emptied meanwhile
            self.happened["devices that Redis lost amid an answer"] += 1

    async def _has_key(self) -> bool:
        if await self.client.call("EXISTS", self.keys.sealing):
            return True
        await self.start_helper()
        await self._is_led()  # an updater publishes it
        return False

    async def _opened(self, device: int) -> Trigger:
        """A task that is handed out, whoever has to become the scheduler for it."""

        async def opened() -> Trigger | None:
            if not await self._is_led():
                return None
            try:
                [task] = await self.hand.open(device=device)
            except (FedstreamError, AssertionError):  # Redis has forgotten the scheduler
                name = f"s{self.rng.random()}"
                await self.client.call("DEL", self.keys.leader("scheduler"))
                self.hand.scheduler = Lease(self.client, self.keys, "scheduler", name, seconds=60)
                await self.hand.scheduler.acquire()
                return None
            return task

        task: Trigger = await wait_until(opened, what="a task that is handed out")
        return task

    async def work(self, answers: int) -> None:
        """Devices answer, those of the past among them."""
        if self.late and self.rng.random() < 0.7:
            await self.hand.admit(self.late.pop(0))
        for _ in range(answers):
            await self.answer(self.rng.randrange(DEVICES - 1))  # the last one is malformed
        if self.plan.rule == "fedavg" and self.rng.random() < 0.5:
            await self._end_round()

    async def _end_round(self) -> None:
        """The round is over, with the updates that have come; they may be too few to be opened."""
        await wait_until(self._is_led)
        version = max(0, await self.hand.version())
        await self.hand.ledger.ask(CloseRound(version=version, tasks=(), why="its time is over"))
        await self.hand.dispatch()

    # the plan

    async def play(self) -> None:
        """Play all steps; then the run has to go on, and to recover without its helper."""
        await self.goes_on()
        for fault in self.plan.faults:
            if self.rng.random() < 0.5:
                self.backup = await backed_up(self.client)
            if self.rng.random() < 0.5:
                self.kept_store = self.helper.store.read_bytes()
            await self._fail(fault)
            await self.work(self.rng.randint(2, 5))
            if self.rng.random() < 0.6:
                await self.goes_on()
                await self._settles()
        await self._makes_versions()
        await self._recovers_alone()

    async def _fail(self, fault: Fault | Trouble) -> None:
        if isinstance(fault, Trouble):
            self.between.next.append(fault)
            return
        self.happened[fault] += 1
        await getattr(self, f"_{fault.name.lower()}")()

    async def _helper_killed(self) -> None:
        self.kill_helper()

    async def _killed_behind_the_store(self) -> None:
        self.between.at_answer = self.kill_helper

    async def _killed_when_asked(self) -> None:
        after_s = self.rng.uniform(0, 0.01)
        loop = asyncio.get_running_loop()
        self.between.at_request = lambda: loop.call_later(after_s, self.kill_helper)

    async def _store_lost(self) -> None:
        self.kill_helper()
        self._forget_store()
        await self.start_helper()

    def _forget_store(self) -> None:
        """The store is gone; what it had opened is still not to be opened again."""
        self.lost_tasks.append(self.helper.opened())
        self.lost_spent.update(self.helper.spent())
        self.helper.store.unlink()

    async def _store_rolled_back(self) -> None:
        """An operator restores a backup, which must be refused, and then begins with nothing."""
        self.kill_helper()
        answered = self.helper.opened().items() & self._answered()
        self._forget_store()
        if self.kept_store is not None:
            self.helper.store.write_bytes(self.kept_store)
        if self.kept_store is not None and self._lacks_one_of(answered):
            try:
                await self.helper.start()
            except ConfigError:
                pass
            else:
                self.failures.append("the helper started on a store that was rolled back")
                self.helper.kill()
        self.helper.store.unlink(missing_ok=True)
        await self.start_helper()

    def _answered(self) -> set[tuple[tuple[str, str], str]]:
        """Each task with the intent to which the helper has answered."""
        intents = [one.intent for one in self.between.exchanges]
        return {((i.run, u.task), i.digest) for i in intents if i is not None for u in i.updates}

    def _lacks_one_of(self, answered: set[tuple[tuple[str, str], str]]) -> bool:
        """Whether the store that is there forgot an answer, or was copied amid a write.

        It may lack what the helper had stored, but not answered when it was killed.
        """
        with suppress(sqlite3.DatabaseError):
            return not answered <= self.helper.opened().items()
        return True

    async def _replayed(self) -> None:
        await self.goes_on()
        asked = [n for n, one in enumerate(self.between.exchanges) if one.path == "/v1/open"]
        for number in self.rng.choices(asked, k=3) if asked else ():
            await self.between.again(number)

    async def _updater_killed(self) -> None:
        await self.kill_updaters()

    async def _killed_while_asking(self) -> None:
        self.between.at_request = self._cancel_updaters

    async def _killed_with_answer(self) -> None:
        self.between.at_answer = self._cancel_updaters

    def _cancel_updaters(self) -> None:
        for _, task in self.updaters:
            task.cancel()

    async def _leader_forgotten(self) -> None:
        await self.start_updater()
        await self.client.call("DEL", self.keys.leader("updater"))

    async def _journal_torn(self, *, with_redis: bool = False) -> None:
        def begin() -> None:
            tearing = asyncio.create_task(self._tear(with_redis))
            self.doing.add(tearing)
            tearing.add_done_callback(self.doing.discard)

        self.between.at_request = begin

    async def _power_lost(self) -> None:
        await self._journal_torn(with_redis=True)

    async def _tear(self, with_redis: bool) -> None:
        """The power fails when a sum is in the journal, before it is on disk."""
        leader = self._leader()
        if leader is None:
            return
        recorder = leader._recorder
        mark, until = recorder.appended, time.monotonic() + 2.0
        while recorder.appended == mark and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)  # the record is unsynced for a few milliseconds
        async with self.starting:
            unsynced, ending = recorder.appended - recorder.safe, recorder.ending
            await self.kill_updaters()
            if unsynced and ending is not None:
                self.happened["records lost with the power"] += 1
                os.truncate(ending.path, ending.at - self.rng.randint(1, unsynced))
            if with_redis:
                await self.client.call("FLUSHALL")

    async def _redis_emptied(self) -> None:
        await self.client.call("FLUSHALL")

    async def _redis_fell_back(self) -> None:
        if self.backup is None:
            await self.client.call("FLUSHALL")
        else:
            await go_back(self.client, self.backup)

    async def _redis_cut(self) -> None:
        self.proxy.cut()

    async def _malformed(self) -> None:
        await self.answer(DEVICES - 1, malformed=True)

    async def _retried(self) -> None:
        await self.answer(self.rng.randrange(DEVICES - 1), attempts=2)

    async def _late_device(self) -> None:
        task = await self._opened(self.rng.randrange(DEVICES - 1))
        await wait_until(self._has_key, what="the helper's key in Redis")
        with suppress(FedstreamError, AssertionError):  # Redis was emptied meanwhile
            self.late.append(await self.devices.trains(task))

    # the end

    async def _settles(self) -> None:
        """Wait until the updater has done all that it can."""

        async def is_quiet() -> bool:
            await self.start_helper()
            if not await self._is_led() or await self.hand.queue():
                return False
            leader = self._leader()
            state = getattr(leader._loop, "state", None) if leader is not None else None
            return state is not None and not state.is_due

        await wait_until(is_quiet, what="an updater that has done everything")

    async def _makes_versions(self) -> None:
        """Whatever went wrong, devices' sums make versions again."""
        if self.doing:
            await asyncio.wait(self.doing)
        await self.goes_on()
        await self._settles()
        before, answers = await self.hand.version(), 0
        while await self.hand.version() < before + 2:
            await self.answer(answers % (DEVICES - 1))
            await self.goes_on()
            await self._settles()
            answers += 1
            if answers > 60:
                self.failures.append("60 updates made no two versions")
                break
        for upload in self.late:
            await self.hand.admit(upload)
        await self.goes_on()
        await self._settles()

    async def _recovers_alone(self) -> None:
        """The newest version comes from the journal, without the helper."""
        await self.kill_updaters()
        self.kill_helper()
        await self.client.call("FLUSHALL")
        await wait_until(self._is_led)
        head = await self.hand.ledger.head()
        made = [one.digest for one in records(self.journal) if one.digest]
        if head is None or not made or head.digest != made[-1]:
            self.failures.append("another newest version without the helper")

    async def outcome(self) -> Outcome:
        """What became of the run, once it was played."""
        view = await self.hand.ledger.look()
        published = {one.version: one.digest for one in await self.hand.published()}
        leader = self._leader()
        state = leader._loop.state if leader is not None else None
        await self.kill_updaters()
        entries = records(self.journal)
        found = Outcome(self.plan, [*self.failures])
        found.complaints += _complaints_of_counts(entries, view)
        found.complaints += _complaints_of_sums(entries, self)
        found.complaints += _complaints_of_models(entries, self)
        if state is not None:  # recovered from the journal alone
            accounts = {device: one.squares for device, one in state.progress.accounts.items()}
            if accounts != _journalled(entries):
                found.complaints.append(f"the updater's accounts are {accounts}")
        told = {one.version: one.digest for one in entries if one.digest}
        wrong = [n for n, digest in published.items() if n and told.get(n) != digest]
        if wrong:
            found.complaints.append(f"versions {wrong}: published with another digest")
        found.happened = self.happened + Counter(map(str, self.between.met))
        found.versions = view.head.version
        found.dropped = Counter(
            one.reason for one in entries if isinstance(one, SumOpened) and one.reason
        )
        found.counts = {"issued": view.issued, "open": len(view.open)} | dict(view.outcomes)
        found.asked = sum(one.path == "/v1/open" for one in self.between.exchanges)
        return found


def _is_fenced(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_fenced, error.exceptions))
    return isinstance(error, Fenced)


# what must hold


def _complaints_of_counts(entries: Sequence[EntryRecord], view: View) -> Iterator[str]:
    """Every task has one outcome, and the journal's are those of Redis."""
    if view.issued != sum(view.outcomes.values()) + len(view.open):
        yield f"not balanced: {view.issued} issued, {view.outcomes}, {len(view.open)} open"
    taken = [one for one in entries if isinstance(one, Taken)]
    for task, n in Counter(one.upload.task for one in taken).items():
        if n > 1:
            yield f"task {task} has {n} records"
    for outcome, most in view.outcomes.items():
        journalled = sum(one.outcome == outcome for one in taken)
        if journalled > most or (outcome == "buffered" and journalled < most):
            yield f"{journalled} {outcome} in the journal, {most} in Redis"


def _batches(entries: Sequence[EntryRecord]) -> Iterator[tuple[list[Taken], SumOpened]]:
    """Each batch of the journal, with what became of its sum."""
    held: list[Taken] = []
    for one in entries:
        if isinstance(one, Taken) and one.outcome == "buffered":
            held.append(one)
        elif isinstance(one, SumOpened):
            yield held, one
            held = []
        elif isinstance(one, RoundClosed) and one.dropped:
            held = []


def _complaints_of_sums(entries: Sequence[EntryRecord], played: Played) -> Iterator[str]:
    """No task was opened twice, and both sides count the same."""
    between, batches = played.between, list(_batches(entries))
    opened = _opened(played)
    for name, intents in opened.items():
        if len(intents) > 1:
            yield f"task {name} was opened in {len(intents)} sums"
    answers = between.opened
    for digest, found in answers.items():
        if len(found) > 1:
            yield f"intent {digest} got {len(found)} different answers"
        count = len(between.sent[digest].updates)
        if not played.policy.min_batch <= count <= played.policy.max_batch:
            yield f"{count} updates were opened together"
    for held, one in batches:
        if one.masks is None:
            continue
        got = {Payload(np.frombuffer(m, np.uint8)).digest() for m in answers.get(one.intent, ())}
        if got != {one.masks}:
            yield f"version {one.version}: its masks are not the helper's answer to its intent"
        spoilt = played.malformed & {taken.upload.task for taken in held}
        if (one.reason == OUT_OF_RANGE) != bool(spoilt):
            yield f"version {one.version}: {one.reason or 'made'}, {len(spoilt)} malformed updates"
    known = {one.intent for _, one in batches if one.masks is not None}
    excused = {taken.upload.task for held, one in batches if one.masks is None for taken in held}
    without_sum: Counter[int] = Counter()
    for digest in {one for intents in opened.values() for one in intents} - known:
        intent = between.sent[digest]
        if not {update.task for update in intent.updates} <= excused:
            yield f"intent {digest} was opened, but the journal has neither its sum nor its loss"
        for update, weight in zip(intent.updates, intent.weights, strict=True):
            without_sum[update.device] += weight**2
    journalled = _journalled(entries)
    spent = played.lost_spent + Counter(played.helper.spent())
    if spent != journalled + without_sum:
        yield (
            f"the helper counts {dict(spent)}, the journal {dict(journalled)}, and the answers "
            f"that were lost {dict(without_sum)}"
        )


def _journalled(entries: Sequence[EntryRecord]) -> Counter[int]:
    """The squared weights of each device in the sums that the journal has."""
    found: Counter[int] = Counter()
    for held, one in _batches(entries):
        for taken in held if one.masks is not None else ():
            found[taken.upload.device] += int(taken.weight) ** 2
    return found


def _opened(played: Played) -> dict[tuple[str, str], set[str]]:
    """The intents in which each task was opened, by run and task: as answered, and as stored."""
    found: dict[tuple[str, str], set[str]] = {}
    for exchange in played.between.exchanges:
        if (intent := exchange.intent) is not None:
            for update in intent.updates:
                found.setdefault((intent.run, update.task), set()).add(intent.digest)
    for store in (*played.lost_tasks, played.helper.opened()):
        for name, digest in store.items():
            found.setdefault(name, set()).add(digest)
    return found


def _complaints_of_models(entries: Sequence[EntryRecord], played: Played) -> Iterator[str]:
    """The project's own replay, and without noise the sums of the plain updates, bit for bit."""
    damages = [one.damage for one in verify(segments(played.journal)) if one.damage is not None]
    yield from (f"verify: {damage}" for damage in damages)
    with Replayer(played.journal) as replayer:
        for moment in replayer:
            if moment.message.digest and not moment.identical:
                yield f"version {moment.version} replays to another model"
    if played.plan.sigma:
        return
    x = np.zeros(LAYOUT.parameters, np.float32)
    for held, one in _batches(entries):
        if one.digest is None:
            continue
        values = played.devices.values
        total = sum(int(u.weight) * values[u.upload.task, u.upload.attempt] for u in held)
        mean = in_model_units(np.asarray(total), max(played.policy.weights), played.policy)
        x = x + mean * np.float32(played.rule.rate / K)
        if model_of(LAYOUT, *x).digest() != one.digest:
            yield f"version {one.version} is not the sum of the plain updates"


# plans


@asynccontextmanager
async def playing(
    plan: Plan, folder: Path, redis: RedisSettings, keys: Keys
) -> AsyncIterator[Played]:
    """A plan's run, to be played against a Redis that is for it alone."""
    client = Client(redis, "test")
    client.bind(keys.prefix)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedstream.updater.loop.BLOCK_MS", 20)
        patched.setattr("fedstream.updater.sums.pause", Pauses(plan.look_s))
        patched.setattr("fedstream.runtime.service.pause", Pauses(0.05))  # also after failures
        async with Proxy(redis) as proxy, Between(late_s=LATE_S) as between:
            played = Played(plan, folder, proxy, between, client, keys)
            try:
                yield played
            finally:
                await played.kill_updaters()
                played.kill_helper()
                await client.call("FLUSHALL")
                await client.close()


async def play(plan: Plan, folder: Path, redis: RedisSettings, keys: Keys) -> Outcome:
    """Play a plan; say what became of it."""
    began = time.monotonic()
    async with playing(plan, folder, redis, keys) as played:
        try:
            await played.play()
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            played.failures.append(f"not played to the end: {said}")
        try:
            outcome = await played.outcome()
        except FedstreamError as error:
            outcome = Outcome(plan, [*played.failures, str(error)])
    outcome.seconds = time.monotonic() - began
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """The results for people."""
    about = ", ".join(f"{name} {value}" for name, value in machine.described().items())
    failed = [str(one.plan.seed) for one in outcomes if one.complaints]
    happened = sum((one.happened for one in outcomes), Counter[str]())
    dropped = sum((one.dropped for one in outcomes), Counter[str]())
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts.update(one.counts)
    seconds = sorted(one.seconds for one in outcomes)
    rows = [
        ("runs", str(len(outcomes))),
        ("runs in which a check failed", ", ".join(failed) or "none"),
        ("faults", str(sum(len(one.plan.faults) for one in outcomes))),
        ("versions", str(sum(one.versions for one in outcomes))),
        ("answers of the helper, repetitions included", str(sum(one.asked for one in outcomes))),
        *((f"batches dropped: {reason}", str(n)) for reason, n in sorted(dropped.items())),
        *((f"tasks {name}", str(n)) for name, n in counts.items()),
        ("seconds a run, median", f"{seconds[len(seconds) // 2]:.1f}"),
    ]
    lines = [
        "# Private runs under faults",
        "",
        "`make chaos`: private runs with faults drawn from a seed. docs/chaos.md says what is",
        "checked after each run.",
        "",
        about,
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {n} |" for kind, n in sorted(happened.items())),
    ]
    return "\n".join(lines) + "\n"


async def _main(plans: Sequence[Plan]) -> list[Outcome]:
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder) / "redis", binary=find_servers()[-1]) as server,
    ):
        settings = RedisSettings(url=server.url)
        for number, one in enumerate(plans):
            at = Path(folder) / str(number)
            at.mkdir()
            outcome = await play(one, at, settings, Keys(f"sums-{number}"))
            outcomes.append(outcome)
            said = "\n  ".join(["FAILED", *outcome.complaints] if outcome.complaints else ["held"])
            sys.stdout.write(f"{outcome.plan}: {outcome.seconds:.1f} s, {said}\n")
            sys.stdout.flush()
    return outcomes


def main() -> int:
    """Play, print, and write the table unless only some seeds were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="faults in all")
    parser.add_argument("--of", type=int, default=FAULTS, help="faults per plan")
    parser.add_argument("--seed", type=int, nargs="+", help="play only the plans of these seeds")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seeds = options.seed or range(-(-options.faults // options.of))
    outcomes = asyncio.run(_main([plan(seed, options.of) for seed in seeds]))
    text = table(outcomes)
    sys.stdout.write(text)
    if options.seed is None:
        RESULTS.write_text(text)
    return int(any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
