"""The faults: what each does to services, Redis, the ways between them, clocks and disks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker import blobs
from fedstream.broker.keys import Keys
from fedstream.broker.scripts import Script
from fedstream.core.errors import BrokerError, OutOfMemory, Unavailable
from fedstream.core.layout import Model
from fedstream.core.messages import (
    POOL,
    Event,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Upload,
    decode,
)
from tests.chaos import disk, pages
from tests.chaos.account import USED
from tests.chaos.faults import TRAINERS, UPDATER, UPDATERS, Fault, Kind, Plan
from tests.chaos.front import Front
from tests.chaos.phones import Phones
from tests.chaos.seams import HELD_AT, Control
from tests.chaos.sentinel import Sentineled
from tests.chaos.server import Server
from tests.chaos.services import Child, Services
from tests.chaos.wire import Wire
from tests.support import EveryRole, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TAKEN_OVER_S = 60.0
_TWICE_S = 10.0
_TOLD_S = 60.0  # within which damage must be told
_GOES_ON_S = 10.0  # within which something comes that may not come: no work, another fault
# Of a request: the script that it runs, and what stands in none of those that publish nothing.
_COMMIT = hashlib.sha1(Script("commit").source, usedforsecurity=False).hexdigest()
_OF_A_VERSION = (_COMMIT.encode(), b"digest")
_ERRNO = (("write", errno.EIO), ("sync", errno.EIO), ("read", errno.EIO))


class Injector:
    """Does what a plan says. What is found out on the way goes into ``findings``."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        server: Server | Sentineled,
        wires: dict[str, Wire],
        services: Services,
        controls: dict[str, Control],
        keys: Keys,
        findings: list[str],
        front: Front,
        phones: Phones,
    ) -> None:
        self._rng = random.Random(plan.seed)
        self._sync = plan.sync
        self._journal = folder / "journal"
        self._platter = folder / "platter"
        self._server = server
        self._wires = wires
        self._services = services
        self._controls = controls
        self._keys = keys
        self._ledger = EveryRole(server.client, keys, "chaos")
        self._findings = findings
        self._front = front
        self._phones = phones
        self._disks = asyncio.Lock()  # one trouble with disks at a time
        self.forged: set[tuple[str, str]] = set()  # second answers: task and attempt
        self.did: Counter[str] = Counter()  # what faults came to that may come to nothing
        self._done: dict[Kind, Callable[[Fault], Awaitable[None]]] = {
            Kind.KILL: self._kill,
            Kind.PAUSE: self._pause,
            Kind.USURP: self._usurp,
            Kind.DOUBLE: self._double,
            Kind.TWICE: self._twice,
            Kind.CLOCK: self._clock,
            Kind.EMPTY: self._empty,
            Kind.REWIND: self._rewind,
            Kind.TORN: self._torn,
            Kind.BACKUP: self._backup,
            Kind.AMNESIA: self._amnesia,
            Kind.RELAPSE: self._relapse,
            Kind.TAKEOVER: self._takeover,
            Kind.MEMORY: self._memory,
            Kind.ERASE: self._erase,
            Kind.CUT: self._cut,
            Kind.DELAY: self._delay,
            Kind.PARTITION: self._partition,
            Kind.LATE: self._late,
            Kind.DISK: self._disk,
            Kind.EIO: self._eio,
            Kind.FAILOVER: self._fail_over,
            Kind.SPLIT: self._fail_over,
            Kind.HANG_UP: self._hang_up,
            Kind.CRASH: self._crash,
            Kind.POWER: self._power,
            Kind.BLACKOUT: self._blackout,
            Kind.ROT: self._rot,
        }

    async def inject(self, fault: Fault) -> None:
        """One fault, from its beginning to its end."""
        await asyncio.sleep(fault.after_s)
        try:
            await self._done[fault.kind](fault)
        except AssertionError as error:  # what was waited for never came
            self._findings.append(f"{fault}: {error}")

    async def bar(self, fault: Fault) -> None:
        """With every fault an operator puts a device into quarantine, or releases it."""
        release = fault.share < 0.4
        wanted = SetQuarantine(devices=(int(fault.share * 10) % 3,), release=release, why="chaos")
        with suppress(Unavailable, OutOfMemory):  # another fault took Redis away, or its memory
            verdict, _ = await self._ledger.set_quarantine(wanted)
            self.did["quarantines and releases asked for"] += verdict == "queued"

    async def scale(self, fault: Fault) -> None:
        """With every fault an evaluator proposes another scale of the rule's step."""
        proposed = StepProposed(at=fault.at, scale=0.25 + 1.5 * fault.share, metric="loss")
        with suppress(Unavailable, OutOfMemory):
            await self._ledger.propose(proposed)
            self.did["scales proposed"] += 1

    # processes

    async def _name(self, fault: Fault) -> str:
        return await self._leader() if fault.target == UPDATER else fault.target

    async def _kill(self, fault: Fault) -> None:
        name = await self._name(fault)
        child = self._services[name]
        child.signal(signal.SIGKILL)
        await child.wait()
        await wait_until(lambda: self._services[name] is not child, what=f"{name} again")
        await self._services.alive(name)

    async def _pause(self, fault: Fault) -> None:
        with self._services[fault.target].asleep():
            await asyncio.sleep(fault.seconds)

    async def _usurp(self, fault: Fault) -> None:
        life = self._server.life
        with ExitStack() as asleep:
            sleeper, _ = await self._taken_over(asleep)
            await asyncio.sleep(fault.seconds)
        await wait_until(
            lambda: sleeper.ended or life != self._server.life,  # it may lead again
            timeout=_TAKEN_OVER_S,
            what=f"an updater that has a successor ends: {sleeper.log.name}",
        )

    async def _double(self, fault: Fault) -> None:
        twin = await self._services.twin(await self._name(fault))
        await asyncio.sleep(fault.seconds + 0.5)
        twin.signal(signal.SIGKILL)
        if await twin.wait() != -signal.SIGKILL and not twin.ended_by(
            "Fenced", "JournalError", "JournalDamaged"
        ):
            self._findings.append(f"{fault}: a second one ended:\n{twin.last_words}")

    async def _twice(self, _fault: Fault) -> None:
        """What lies in the queue is answered once more, with other bytes.

        The leader sleeps until that was judged, so that first answers still wait.
        """
        leader = self._services[await self._leader()]
        with leader.asleep():
            try:
                uploads = await wait_until(self._waiting, timeout=_TWICE_S)
                said = {await self._forge(upload) for upload in uploads}
                pool = self._keys.inbox(POOL)
                await wait_until(lambda: self._left(pool, said), timeout=_TWICE_S)
                strays = await self._strays() & {upload.task for upload in uploads}
                self.did["second answers turned away"] += len(strays)
            except (AssertionError, Unavailable, OutOfMemory):
                pass  # nobody answers now, or another fault took Redis away, or its memory

    async def _waiting(self) -> list[Upload]:
        """The uploads in the queue, of which some must be admitted and nothing more.

        With `interval` most have ended and wait for their records to be on disk.
        """
        try:
            rows = await self._server.client.call("XRANGE", self._keys.queue, "-", "+")
            admitted = await self._server.client.call("HKEYS", self._keys.admitted)
        except Unavailable:
            return []
        entries = [
            decode(fields[1], Upload, RoundEnd, SetQuarantine, StepProposed) for _, fields in rows
        ]
        uploads = [
            one
            for one in entries
            if isinstance(one, Upload) and (one.task, "again") not in self.forged
        ]
        return uploads if any(one.task.encode() in admitted for one in uploads) else []

    async def _forge(self, upload: Upload) -> bytes:
        """Says a second answer: its entry."""
        model = Model((await self._ledger.run()).layout)
        model.floats[:] = self._rng.random()
        size = model.buffer.nbytes
        again = upload.model_copy(
            update={
                "attempt": "again",
                "digest": model.digest(),
                "size": size,
                "format": "f32",
                "chunks": blobs.chunks_of(size),
            }
        )
        self.forged.add((again.task, again.attempt))
        client, inbox = self._server.client, self._keys.inbox(POOL)
        await blobs.write(client, self._keys.update(again.blob), model, expire_s=600.0)
        entry: bytes = await client.call("XADD", inbox, "*", "m", again.encode())
        return entry

    async def _entries(self, stream: str) -> set[bytes]:
        rows = await self._server.client.call("XRANGE", stream, "-", "+")
        return {entry for entry, _ in rows}

    async def _left(self, stream: str, entries: set[bytes]) -> bool:
        """Whether all of these are dealt with."""
        return not entries & await self._entries(stream)

    async def _strays(self) -> set[str]:
        """The tasks of answers that were turned away."""
        rows = await self._server.client.call("XRANGE", self._keys.events, "-", "+")
        events = [Event.decode(fields[1]) for _, fields in rows]
        return {event.task for event in events if event.what == "stray" and event.task}

    async def _clock(self, fault: Fault) -> None:
        control = self._controls[await self._name(fault)]
        control["clock_s"] = 7200.0 * (fault.share - 0.5)
        await asyncio.sleep(fault.seconds)
        control["clock_s"] = 0.0

    # Redis

    @property
    def _redis(self) -> Server:
        """Where it is one alone."""
        assert isinstance(self._server, Server)
        return self._server

    async def _fail_over(self, fault: Fault) -> None:
        assert isinstance(self._server, Sentineled)
        await self._server.fail_over(split=fault.kind is Kind.SPLIT)

    @asynccontextmanager
    async def _changed(self, size: int) -> AsyncIterator[None]:
        """Redis dies; behind the block it is there again with the first bytes of its file."""
        await self._redis.kill()
        self._redis.remember(size)
        yield
        await self._redis.start()

    async def _empty(self, fault: Fault) -> None:
        async with self._server.changing, self._changed(0):
            await asyncio.sleep(fault.seconds)

    async def _rewind(self, fault: Fault) -> None:
        async with self._server.changing:
            size = self._redis.written
            await asyncio.sleep(fault.seconds)  # what is done now, Redis will not know
            async with self._changed(size):
                pass

    async def _torn(self, fault: Fault) -> None:
        async with self._server.changing:
            lost = int(fault.share * min(self._redis.written, 400_000))
            async with self._changed(self._redis.written - lost):
                await asyncio.sleep(fault.seconds)

    async def _backup(self, fault: Fault) -> None:
        async with (
            self._server.changing,
            self._changed(int(fault.share * self._redis.written)),
        ):
            await asyncio.sleep(fault.seconds)

    async def _amnesia(self, fault: Fault) -> None:
        await self._forgotten(fault, lambda: 0)

    async def _relapse(self, fault: Fault) -> None:
        await self._forgotten(fault, lambda: self._redis.written)

    async def _forgotten(self, fault: Fault, kept: Callable[[], int]) -> None:
        """Redis comes back without a trace of the successor, and so does the sleeper."""
        async with self._server.changing:
            size = kept()
            with ExitStack() as asleep:
                _, successor = await self._taken_over(asleep)
                await asyncio.sleep(fault.seconds)
                async with self._changed(size):
                    if fault.share < 0.5:
                        successor.signal(signal.SIGKILL)
                    asleep.close()

    async def _takeover(self, fault: Fault) -> None:
        """The token is forgotten at some step of a take-over; both updaters live, and both work.

        The successor waits at that step until the first one has committed something on top of
        what it read, or found that it may not: however fast either of them is.
        """
        async with self._server.changing:
            size = self._redis.written if fault.share < 0.5 else 0
            sleeper = self._services[await self._leader()]
            other = next(name for name in UPDATERS if self._services[name] is not sleeper)
            control = self._controls[other]
            with suppress(AssertionError), ExitStack() as held, ExitStack() as asleep:
                asleep.enter_context(sleeper.asleep())
                held.callback(control.__setitem__, "hold", 0.0)
                control["held"] = 0.0
                control["hold"] = HELD_AT.index(self._rng.choice(("read", "link", "link")))
                await wait_until(
                    lambda: sleeper.ended or control["held"] > 0, timeout=_GOES_ON_S
                )  # not where the sleeper was about to note what it synced: both do that
                held.enter_context(self._services[other].asleep())
                before = self._used()
                async with self._changed(size):
                    asleep.close()
                self.did["tokens forgotten while one took over"] += not sleeper.ended
                await wait_until(
                    lambda: sleeper.ended or self._commits(besides=before), timeout=_GOES_ON_S
                )

    def _used(self) -> dict[str, bytes]:
        """The tasks in the newest segment whose updates were used, each with its entry."""
        taken = (one.message for one in pages.read(self._newest()).records if one.kind == "taken")
        return {
            one["upload"]["task"]: one["entry"].encode() for one in taken if one["outcome"] in USED
        }

    async def _commits(self, *, besides: Container[str]) -> bool:
        """Whether another task's update was journalled, told, and has left the queue."""
        used = {task: entry for task, entry in self._used().items() if task not in besides}
        try:
            rows = await self._server.client.call("XRANGE", self._keys.events, "-", "+")
            queued = await self._entries(self._keys.queue)
        except BrokerError:
            return False
        told = {Event.decode(fields[1]).task for _, fields in rows}
        return any(task in told and entry not in queued for task, entry in used.items())

    async def _memory(self, fault: Fault) -> None:
        client = self._server.client
        try:
            used, _ = await self._ledger.memory()
            await client.call("CONFIG", "SET", "maxmemory", used + int(60_000 * fault.share))
            await asyncio.sleep(fault.seconds)
            await client.call("CONFIG", "SET", "maxmemory", 0)
        except Unavailable:
            pass  # another fault took it away, and with it its limit

    async def _erase(self, _fault: Fault) -> None:
        """Nobody but the updater has the newest model: Redis lost it, and trainers begin anew."""
        async with self._server.changing:
            await self._services.down(*TRAINERS)
            try:
                await wait_until(self._at_rest, timeout=_TAKEN_OVER_S, what="nothing is to do")
                head = await self._ledger.head()
                if head is not None:
                    await self._server.client.call("DEL", self._keys.model(head.blob))
                    self.did["newest models erased"] += 1
            finally:
                self._services.up(*TRAINERS)

    async def _at_rest(self) -> bool:
        try:
            await asyncio.sleep(0.1)
            view = await self._ledger.look(inboxes=True)
        except BrokerError:
            return False
        return not view.queue and not view.inbox

    # the ways to it

    async def _cut(self, fault: Fault) -> None:
        await asyncio.gather(*(wire.cut(fault.seconds) for wire in self._wires.values()))

    async def _delay(self, fault: Fault) -> None:
        async with AsyncExitStack() as stack:
            for wire in self._wires.values():
                await stack.enter_async_context(wire.held())
            await asyncio.sleep(fault.seconds)

    async def _partition(self, fault: Fault) -> None:
        async with self._wires[await self._name(fault)].held():
            await asyncio.sleep(fault.seconds)

    async def _late(self, fault: Fault) -> None:
        if fault.target == UPDATER and fault.share < 0.5:
            await self._late_commit()
            return
        wire = self._wires[await self._name(fault)]
        before = wire.delivered
        async with wire.late():
            await asyncio.sleep(fault.seconds)
        await asyncio.sleep(0.1)
        self.did["requests that came too late"] += wire.delivered - before

    async def _late_commit(self) -> None:
        """A version's commit arrives once it was repeated, and others were published on top.

        As where a connection breaks whose last bytes a proxy still has.
        """
        async with self._server.changing:
            wire = self._wires[await self._leader()]
            with suppress(AssertionError):
                async with wire.straggling(*_OF_A_VERSION) as kept:
                    await wait_until(kept.is_set, timeout=_GOES_ON_S)
                    version = await self._version()
                    await wait_until(lambda: self._is_past(version + 2), timeout=_GOES_ON_S)
                    self.did["commits that came after later ones"] += 1
            await asyncio.sleep(0.1)

    async def _version(self) -> int:
        """The newest; -1: there is none, or Redis is away."""
        try:
            head = await self._ledger.head()
        except BrokerError:
            return -1
        return head.version if head else -1

    async def _is_past(self, version: int) -> bool:
        return await self._version() > version

    # devices over HTTP

    async def _hang_up(self, _fault: Fault) -> None:
        self._front.hang_up()

    async def _crash(self, fault: Fault) -> None:
        self._phones.crash(fault.share)
        self.did["devices killed"] += 1

    # disks

    @contextmanager
    def _both(self, name: str, value: float) -> Iterator[None]:
        """Both updaters have the same disk."""
        for updater in UPDATERS:
            self._controls[updater][name] = value
        try:
            yield
        finally:
            for updater in UPDATERS:
                self._controls[updater][name] = 0.0

    @asynccontextmanager
    async def _excused(self) -> AsyncIterator[None]:
        """An updater may end for what its disk does, as long as it says so."""
        self._services.excuse(True)
        try:
            yield
            for name in UPDATERS:
                await self._services.alive(name)
        finally:
            self._services.excuse(False)

    async def _disk(self, fault: Fault) -> None:
        async with self._disks:
            with self._both("room", 1 + int(20_000 * fault.share)):
                await asyncio.sleep(fault.seconds)

    async def _eio(self, fault: Fault) -> None:
        async with self._disks, self._excused():
            what, number = _ERRNO[int(fault.share * len(_ERRNO))]
            with self._both(what, number):
                await asyncio.sleep(fault.seconds)
        for name in UPDATERS:
            lost, self._controls[name]["lost"] = self._controls[name]["lost"], 0.0
            self.did["pages that a failed sync did not write"] += int(lost)
        self._forget()

    def _forget(self) -> None:
        """The cache has forgotten the journal: what was counted must be on disk."""
        platter = disk.Platter(self._journal, self._platter)
        for path in self._journal.glob(f"*{pages.SUFFIX}"):
            with suppress(FileNotFoundError):  # retention deletes the oldest
                platter.forget(path)

    async def _power(self, fault: Fault) -> None:
        """With `interval`, Redis has what the disk has not yet: meanwhile it forgets nothing."""
        async with self._disks, self._server.changing:
            await self._synced()
            await asyncio.sleep(self._rng.uniform(0, 0.4))  # what is done now is not on disk yet
            await self._services.down(*UPDATERS)
            self._lose_power()
            await asyncio.sleep(fault.seconds)
            self._services.up(*UPDATERS)
            if self._sync == "interval":
                queued = await self._entries(self._keys.queue)  # until they are on disk
                await wait_until(
                    lambda: self._left(self._keys.queue, queued),
                    timeout=_TAKEN_OVER_S,
                    what="what was queued is on disk",
                )

    def _lose_power(self) -> None:
        self.did["pages lost with the power"] += disk.fail(self._journal, self._platter, self._rng)

    async def _synced(self) -> None:
        """With `interval`: until what the journal has now, and counts, is on disk."""
        if self._sync == "always":
            return
        newest = self._newest()
        about = newest.stat()

        def on_disk() -> bool:
            # A successor syncs what it counts of a segment before it begins; nobody syncs the rest.
            superseded = self._newest() != newest
            return superseded or disk.holds(self._platter, about.st_ino, about.st_size)

        what = "what was journalled is on disk"
        await wait_until(on_disk, timeout=_TAKEN_OVER_S, what=what)

    async def _blackout(self, fault: Fault) -> None:
        async with self._disks, self._server.changing:
            await self._services.down(*UPDATERS)
            lost = int(fault.share * min(self._redis.written, 400_000))
            async with self._changed(self._redis.written - lost):
                self._lose_power()
                await asyncio.sleep(fault.seconds)
            self._services.up(*UPDATERS)

    async def _rot(self, fault: Fault) -> None:
        """A byte of a record that is surely on disk changes: whoever reads it has to say where."""
        async with self._disks, self._excused():
            await self._services.down(*UPDATERS)
            before = [self._services[name] for name in UPDATERS]
            try:
                found = self._on_disk()
                if found is None:
                    return
                path, record = found
                at = self._byte_of(record, fault.share)
                disk.flip(path, at)
                self._services.up(*UPDATERS)
                where = (record.segment, f"at byte {record.at}")

                def told() -> bool:
                    now = (self._services[name] for name in UPDATERS)
                    said = [
                        one for child in now if child not in before for one in child.failed_with
                    ]
                    return any(all(part in one["reason"] for part in where) for one in said)

                what = f"an updater tells of damage in {record}, where byte {at} is wrong"
                try:
                    await wait_until(told, timeout=_TOLD_S, what=what)
                    self.did["rotten bytes that were told"] += 1
                finally:
                    await self._services.down(*UPDATERS)
                    if path.exists():
                        disk.unflip(path, self._platter, at)
            finally:
                self._services.up(*UPDATERS)

    def _newest(self) -> Path:
        """The segment that is written now. Raises AssertionError if the journal has none."""
        segments = [*self._journal.glob(f"*{pages.SUFFIX}")]
        assert segments, "the journal's folder has no segment"
        return max(segments)

    def _on_disk(self) -> tuple[Path, pages.Written] | None:
        """A record of the newest segment behind which another says that it was on disk."""
        path = self._newest()
        records = pages.read(path).records
        known = max((record.synced for record in records), default=0)
        safe = [record for record in records if record.end <= known]
        return (path, self._rng.choice(safe)) if safe else None

    @staticmethod
    def _byte_of(record: pages.Written, share: float) -> int:
        """One of its message's bytes, or of its payload's."""
        if record.payload and share < 0.5:
            return record.begins + int(2 * share * len(record.payload))
        return record.at + int(share * (record.ends - record.at))

    # who leads

    async def _taken_over(self, asleep: ExitStack) -> tuple[Child, Child]:
        """The updater that leads, until ``asleep`` is closed, and who took its place meanwhile."""
        while True:
            sleeper = self._services[await self._leader()]
            asleep.enter_context(sleeper.asleep())
            successor = await self._leader(but=sleeper)
            if not sleeper.ended:  # by another fault, and its name leads again
                return sleeper, self._services[successor]

    async def _leader(self, *, but: Child | None = None) -> str:
        """Which updater leads; waits until one does, and is another process than ``but``."""
        found = ""

        async def leads() -> bool:
            nonlocal found
            found = await self._holder()
            child = self._services[found] if found else None
            # The lease may still be that of one which has ended, and has the same name.
            return child is not None and child is not but and child.leads

        await wait_until(leads, timeout=_TAKEN_OVER_S, what="another updater leads")
        return found

    async def _holder(self) -> str:
        """Who has the updater's lease; '' if nobody has, or Redis is away."""
        try:
            holder = await self._server.client.call("GET", self._keys.leader("updater"))
        except BrokerError:
            return ""
        return (holder or b"").decode().partition("|")[0]
