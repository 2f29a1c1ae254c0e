"""The devices present at a gateway, their waiting check-ins and their tasks. No I/O, no clock.

A device is present from its check-in until ``away_s`` without a request, and while it has a task. A
task is held until its answer is sent, or until its device was away for ``lease_s``, or for
``away_s`` if the device never fetched the task.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.messages import Evaluation
from fedstream.protocol.messages import ATTEMPT_DIGITS

if TYPE_CHECKING:
    import asyncio

    from fedstream.broker.streams import Entry
    from fedstream.core.messages import Assignment

# Why a check-in's wait ends: there is a task; there was none in time; a newer check-in or another
# change replaced it.
Woken: TypeAlias = Literal["look", "nothing", "replaced"]


@dataclass(slots=True)
class Held:
    """A task that this replica holds: its stream entry is leased to us."""

    task: Assignment | Evaluation
    entry: Entry
    stream: str
    tau: int | None = None  # version of our last offer; None: no offer
    is_new: bool = False  # its device has not fetched it, so giving it up loses no work
    is_untouched: bool = False  # delivered for the first time, with no upload begun

    @property
    def attempt(self) -> str:
        """The id of the device's only attempt at this task.

        The id is derived from the entry, so a device can continue after the gateway's restart or at
        another replica.
        """
        text = f"{self.task.task} {self.entry.id}"
        return hashlib.sha256(text.encode()).hexdigest()[:ATTEMPT_DIGITS]


class NotHeld(Refusal):
    """This replica holds no such task of this device."""

    def __init__(self, task: str) -> None:
        super().__init__(404, "unknown task", f"task {task[:64]!r} is not in hand for this device")


@dataclass(slots=True)
class _Session:
    """The state of a present device."""

    heard: float  # end of its last request, monotonic seconds
    is_here: bool = False  # whether it has made a request here, or only has a task
    is_listed: bool = True  # announced as present; others get no tasks
    tasks: list[Held] = field(default_factory=list)  # in order of arrival
    poll: asyncio.Future[Woken] | None = None  # of the waiting check-in
    nonce: str = ""  # of the last answered check-in
    answer: bytes | None = None  # to that check-in; None: no task


class DeviceSessions:
    """The present devices and the held tasks.

    ``now`` is in monotonic seconds everywhere.
    """

    def __init__(self, *, away_s: float, lease_s: float, most: int) -> None:
        """``most``: the most devices present at once."""
        self._away_s = away_s
        self._lease_s = lease_s
        self._most = most
        self._by_device: dict[int, _Session] = {}  # least recently heard first
        self._held: dict[str, Held] = {}  # by task
        self._declined: set[int] = set()  # not eligible, by their last check-in here
        self._listed: tuple[int, ...] | None = ()
        self.polls = 0  # waiting check-ins
        self.newcomers: set[int] = set()  # devices not yet announced to other replicas

    # devices

    def arrive(self, device: int, now: float) -> None:
        """Note a request of an eligible device, and add it to the present devices.

        Raises Refusal if too many devices are present.
        """
        if device not in self._by_device and len(self._by_device) >= self._most:
            raise Refusal(
                503,
                "busy",
                f"{self._most} devices are present: try again later",
                retry_after_s=self._away_s,
            )
        self._declined.discard(device)
        self._come(device, now)

    def heard(self, device: int, now: float) -> None:
        """Note a request of a device, which counts only if the device is present."""
        if device in self._by_device:
            self._come(device, now)

    def is_present(self, device: int) -> bool:
        """Whether a device is present."""
        return device in self._by_device

    def has_declined(self, device: int) -> bool:
        """Whether the device's last check-in here said that it is not eligible."""
        return device in self._declined

    def let_go(self, device: int) -> list[Held]:
        """Remove a device that came to another replica; return its tasks."""
        self._declined.discard(device)
        session = self._by_device.get(device)
        if session is None:
            return []
        self._release(session, "replaced")
        for held in (tasks := list(session.tasks)):
            del self._held[held.task.task]
        self._remove(device)
        return tasks

    def expel(self, devices: Set[int]) -> list[Held]:
        """Remove devices that may no longer take part; return their tasks.

        The tasks stay held until the caller gives them up.
        """
        given_up: list[Held] = []
        for device in devices & self._by_device.keys():
            session = self._by_device[device]
            self._release(session, "replaced")
            self._unlist(session)
            given_up += session.tasks
            if not session.tasks:
                self._remove(device)
        return given_up

    def leave(self, device: int) -> None:
        """Note that a device is not eligible. It stays present while it has a task."""
        self._declined.add(device)
        session = self._by_device.get(device)
        if session is not None:
            self._release(session, "replaced")
            if not session.tasks:
                self._remove(device)

    def present(self) -> tuple[int, ...]:
        """The present devices; the same object until they change."""
        if self._listed is None:
            self._listed = tuple(
                device for device, session in self._by_device.items() if session.is_listed
            )
        return self._listed

    def answered(self, device: int, nonce: str) -> tuple[bool, bytes | None]:
        """Whether this check-in was answered before, and the offer (None: no task)."""
        session = self._by_device.get(device)
        if session is None or not nonce or session.nonce != nonce:
            return False, None
        return True, session.answer

    def answer(self, device: int, nonce: str, offer: bytes | None) -> None:
        """Store the answer to a device's check-in, for repetition."""
        if (session := self._by_device.get(device)) is not None:
            session.nonce, session.answer = nonce, offer

    # waiting check-ins

    def park(self, device: int, poll: asyncio.Future[Woken], now: float) -> None:
        """Register a waiting check-in, ending the device's previous one.

        Raises Refusal as :meth:`arrive` does.
        """
        self.arrive(device, now)
        session = self._by_device[device]
        self._release(session, "replaced")
        session.poll = poll
        self.polls += 1

    def unpark(self, device: int, poll: asyncio.Future[Woken]) -> None:
        """End the wait of this check-in, if it is still registered."""
        session = self._by_device.get(device)
        if session is not None and session.poll is poll:
            self._release(session)

    def release_all(self) -> None:
        """End all waits."""
        for session in self._by_device.values():
            self._release(session)

    def _release(self, session: _Session, why: Woken = "nothing") -> None:
        if session.poll is None:
            return
        if not session.poll.done():
            session.poll.set_result(why)
        session.poll = None
        self.polls -= 1

    # tasks

    def __len__(self) -> int:
        """The number of held tasks."""
        return len(self._held)

    def has(self, held: Held) -> bool:
        """Whether exactly this entry is held."""
        return self._held.get(held.task.task) is held

    def __contains__(self, task: str) -> bool:
        """Whether a task is held, by id."""
        return task in self._held

    def __iter__(self) -> Iterator[Held]:
        """The held tasks."""
        return iter(tuple(self._held.values()))

    def hold(self, held: Held, now: float) -> None:
        """Hold a task for its device, and wake the device's waiting check-in."""
        device = held.task.device
        self.ended(held.task.task)  # in case that it was sent again, as another entry
        session = self._by_device.get(device)
        if session is None:
            session = self._sit(device, now)
            session.is_listed = not held.is_new  # the device left before the task came
        self._held[held.task.task] = held
        session.tasks.append(held)
        self._release(session, "look")

    def first(self, device: int) -> Held | None:
        """The oldest held task of a device, to be done now; None if there is none."""
        session = self._by_device.get(device)
        return session.tasks[0] if session is not None and session.tasks else None

    def evaluates(self, device: int) -> bool:
        """Whether an evaluation of a device is held."""
        session = self._by_device.get(device)
        return session is not None and any(
            isinstance(held.task, Evaluation) for held in session.tasks
        )

    def held(self, task: str, device: int) -> Held:
        """A held task of this device. Raises NotHeld."""
        found = self._held.get(task)
        if found is None or found.task.device != device:
            raise NotHeld(task)
        return found

    def ended(self, task: str) -> None:
        """Release a task that was answered, ended, or taken over."""
        held = self._held.pop(task, None)
        if held is not None:
            self._by_device[held.task.device].tasks.remove(held)

    # time

    def gone(self, now: float, since: float = -math.inf) -> list[Held]:
        """Remove devices that are away; return the tasks of devices that stay away.

        The tasks stay held until the caller gives them up. A device that loses all its tasks is no
        longer present, as it would otherwise be sent new ones. A device with a waiting check-in is
        not away. ``since``: the time since when devices could be heard without a break.
        """
        given_up: list[Held] = []
        least_s = min(self._away_s, self._lease_s)
        for device, session in tuple(self._idle(now - least_s)):
            if session.poll is not None:
                continue
            silent_s = now - max(session.heard, since)
            if not session.tasks and silent_s >= self._away_s:
                self._remove(device)
                continue
            late = [
                held
                for held in session.tasks
                if silent_s >= (self._away_s if held.is_new else self._lease_s)
            ]
            if late and len(late) == len(session.tasks):
                self._unlist(session)
            given_up += late
        return given_up

    def _idle(self, since: float) -> Iterable[tuple[int, _Session]]:
        for device, session in self._by_device.items():
            if session.heard > since:
                return
            yield device, session

    def _come(self, device: int, now: float) -> None:
        session = self._sit(device, now)
        if not session.is_listed:
            session.is_listed, self._listed = True, None
        if not session.is_here:
            session.is_here = True
            self.newcomers.add(device)

    def _sit(self, device: int, now: float) -> _Session:
        session = self._by_device.pop(device, None)
        if session is None:
            session = _Session(now)
            self._listed = None
        session.heard = now
        self._by_device[device] = session
        return session

    def _unlist(self, session: _Session) -> None:
        if session.is_listed:
            session.is_listed, self._listed = False, None

    def _remove(self, device: int) -> None:
        del self._by_device[device]
        self.newcomers.discard(device)
        self._listed = None
