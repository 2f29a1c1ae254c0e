"""Hand-over of devices, with their tasks, between the replicas of a gateway.

A load balancer may send a device's next connection to any replica. So each replica announces newly
arrived devices to the others in one stream, whose order decides: a device is at the replica that
announced it last. The previous replica removes the device and hands its tasks over.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.errors import BadMessage
from fedstream.core.messages import ArrivedDevices, HandOver, decode
from fedstream.runtime.backoff import pause

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fedstream.broker.streams import Entry
    from fedstream.coordinator.gateway.device_sessions import Held
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.runtime.service import Context

GREET_S: Final = 10.0  # between two greetings of a replica
_SILENT_S = 3 * GREET_S + 5.0  # silence after which a replica is gone
_DEAF_S = 3.0  # pause in listening after which silence counts anew


class OtherReplicas:
    """The other live replicas. ``now`` is in monotonic seconds everywhere."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._listened = self._hears_since = -math.inf  # last time; begin without a break

    def __bool__(self) -> bool:
        """Whether there is another replica."""
        return bool(self._heard)

    def heard(self, name: str, now: float) -> None:
        """Note a message of a replica."""
        self._heard[name] = now

    def listened(self, now: float) -> None:
        """Note that all messages until now are read, and forget silent replicas.

        Silence counts only while messages can be read: not while Redis is away.
        """
        if now - self._listened > _DEAF_S:
            self._hears_since = now
        self._listened = now
        self._heard = {
            name: heard
            for name, heard in self._heard.items()
            if now - max(heard, self._hears_since) < _SILENT_S
        }


_SETTLE_S = 2.0  # within which another replica's tasks of an arrived device come here
_TOGETHER = 1000  # devices in one message
_REMEMBERED = 10_000  # devices that left, in case of tasks still on their way


class HeldElsewhere(Refusal):
    """The task is open, but another replica holds it than the replica that its device came to."""

    def __init__(self, task: str) -> None:
        super().__init__(
            503,
            "unavailable",
            f"task {task[:64]!r} has not come to this gateway yet: try again",
            retry_after_s=_SETTLE_S,
        )


class HandOvers:
    """Announces this replica's devices, and handles the other replicas' announcements."""

    def __init__(self, replica: Replica, tasks: Tasks, context: Context) -> None:
        self._sessions = replica.sessions
        self._run_cache = replica.run_cache
        self._ledger = replica.ledger
        self._name = replica.name
        self._lease_s = replica.settings.lease_s  # longest that a task stays at the last replica
        self._tasks = tasks
        self._context = context
        self._told: dict[int, tuple[tuple[int, int], float]] = {}  # device -> place, time
        self._left: dict[int, str] = {}  # departed device -> its replica
        # Devices not yet announced: place of another replica's announcement.
        self._meanwhile: dict[int, tuple[tuple[int, int], str]] = {}
        self._after: str | None = None  # id of the last read message
        self._greeted = -math.inf  # time of our last greeting
        self.others = OtherReplicas()  # replicas that greet
        self._settling: dict[int, asyncio.Event] = {}  # devices whose tasks may follow them here

    async def tell(self) -> None:
        """Announce newly arrived devices to the other replicas."""
        while some := list(self._sessions.newcomers)[:_TOGETHER]:
            told = await self._ledger.move(ArrivedDevices(gateway=self._name, devices=tuple(some)))
            self._sessions.newcomers.difference_update(some)
            now, place = time.monotonic(), _place(told)
            for device in some:
                self._left.pop(device, None)
                self._told[device] = (place, now)
                then, other = self._meanwhile.pop(device, (place, ""))
                if then > place:
                    await self._leave(other, (device,))

    async def greet(self) -> None:
        """Tell the other replicas periodically that this one is alive."""
        now = time.monotonic()
        if now - self._greeted >= GREET_S:
            await self._ledger.move(ArrivedDevices(gateway=self._name, devices=()))
            self._greeted = now

    async def follow(self) -> None:
        """Handle the other replicas' messages, waiting for up to a second."""
        if not self._tasks.has_begun:
            await pause(self._context.stop, 0.05)
            return
        if self._after is None:
            await self._catch_up()
            return
        for entry in await self._ledger.moves_after(self._after):
            match self._message(entry):
                case ArrivedDevices(gateway=other, devices=devices) if other != self._name:
                    self.others.heard(other, time.monotonic())
                    await self._leave(other, self._lost(devices, other, _place(entry.id)))
                case HandOver(gateway=self._name, stream=stream, entries=entries):
                    await self._tasks.take_over(stream, entries)
                    self._settle()
            self._after = entry.id
        # Tasks that arrived here after their device had left.
        late = {
            held.task.device for held in self._sessions
        } & self._left.keys() - self._sessions.newcomers
        for device in late:
            await self._leave(self._left[device], (device,))
        self.others.listened(time.monotonic())
        self._forget()

    async def _catch_up(self) -> None:
        """Hand over tasks from before a restart whose devices have come to other replicas."""
        last: dict[int, str] = {}
        entries = await self._ledger.moves()
        for entry in entries:
            message = self._message(entry)
            if isinstance(message, ArrivedDevices):
                last.update(dict.fromkeys(message.devices, message.gateway))
                if message.gateway != self._name:  # perhaps long ago, so present state is unknown
                    self.others.heard(message.gateway, time.monotonic())
        for device in {*self._sessions.present()} - self._sessions.newcomers:
            if (other := last.get(device, self._name)) != self._name:
                await self._leave(other, (device,))
        self._after = entries[-1].id if entries else "0"

    def _message(self, entry: Entry) -> ArrivedDevices | HandOver | None:
        """Decode a replica's message; None if this release can't read it."""
        try:
            return decode(entry.data, ArrivedDevices, HandOver)
        except BadMessage as error:
            self._context.log.warning("what another replica told is unreadable", reason=str(error))
            return None

    def _lost(self, devices: Iterable[int], other: str, place: tuple[int, int]) -> Iterator[int]:
        """The announced devices that are no longer here; ``place``: the announcement's."""
        for device in devices:
            told = self._told.get(device)
            if device in self._sessions.newcomers:
                self._meanwhile[device] = (place, other)
            elif told is None or told[0] < place:
                yield device

    async def _leave(self, other: str, devices: Iterable[int]) -> None:
        """Remove devices that came to another replica, and hand their tasks over."""
        tasks: dict[str, list[str]] = {}
        for device in devices:
            was_here = self._told.pop(device, None) is not None
            if was_here or self._sessions.is_present(device):
                self._left[device] = other
            for held in self._sessions.let_go(device):
                tasks.setdefault(held.stream, []).append(held.entry.id)
        for stream, entries in tasks.items():
            self._context.log.info("tasks left to another replica", to=other, tasks=len(entries))
            await self._ledger.move(HandOver(gateway=other, stream=stream, entries=tuple(entries)))

    def _forget(self) -> None:
        """Forget announcements of long absent devices."""
        if len(self._told) > 2 * len(self._sessions.present()) + _REMEMBERED:
            here = {*self._sessions.present()}
            self._told = {device: told for device, told in self._told.items() if device in here}
        while len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    async def find(self, task: str, device: int) -> Held:
        """A held task of this device, waiting a moment for a task that follows its device.

        Raises NotHeld; HeldElsewhere while another replica may still hold the task, which is at
        most ``lease_s`` after the device came; and Refusal if too many devices are present.
        """
        try:
            return self._sessions.held(task, device)
        except NotHeld:
            if task in self._sessions or not self._may_come(device):
                raise
            if not self._came(device, self._lease_s):
                raise
        if self._came(device, _SETTLE_S):
            await self._settled(device)
        try:
            return self._sessions.held(task, device)
        except NotHeld:
            # The other replica may be stopping, restarting or cut off, so only an ended task is
            # over.
            if task in self._sessions or not await self._may_be_elsewhere(task, device):
                raise
            raise HeldElsewhere(task) from None

    async def _may_be_elsewhere(self, task: str, device: int) -> bool:
        """Whether a task is open, so that another replica may hold it.

        An evaluation may be, if the device has one and this replica does not hold it.
        """
        [fate] = await self._ledger.fates([task])
        if fate.admitted is not None:
            return False
        if await self._ledger.is_open(task):
            return True
        return not self._sessions.evaluates(device) and await self._ledger.is_evaluating(device)

    def _may_come(self, device: int) -> bool:
        """Whether a device may become present without a check-in."""
        return (
            device < self._run_cache.run.devices
            and not self._run_cache.head.bars(device)
            and not self._sessions.has_declined(device)
        )

    async def _settled(self, device: int) -> None:
        """Add a device to the present ones, and wait a moment for its task."""
        self._sessions.arrive(device, time.monotonic())
        settled = self._settling.setdefault(device, asyncio.Event())
        try:
            await self.tell()
            async with asyncio.timeout(_SETTLE_S):
                await settled.wait()
        except TimeoutError:
            pass  # the caller checks whether the task has come
        finally:
            if self._settling.get(device) is settled:
                del self._settling[device]

    def _came(self, device: int, within_s: float) -> bool:
        """Whether a device came at most ``within_s`` seconds ago."""
        if not self._sessions.is_present(device) or device in self._sessions.newcomers:
            return True
        told = self._told.get(device)
        return told is not None and time.monotonic() - told[1] < within_s

    def _settle(self) -> None:
        """Wake requests whose tasks have come."""
        for device in tuple(self._settling):
            if self._sessions.first(device) is not None:
                self._settling.pop(device).set()


def _place(entry: str) -> tuple[int, int]:
    """An entry's place in its stream."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)
