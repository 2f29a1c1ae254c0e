"""Who is present at a gateway, who waits for a task, and whose task is whose. No I/O, no clock.

A device is present from its check-in until it was away for ``away_s``, and while it works on a
task. A task is held until its answer was sent, or until its device was away for ``lease_s``; one
that it never came for, for ``away_s``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.protocol.messages import ATTEMPT_DIGITS

if TYPE_CHECKING:
    import asyncio

    from fedstream.broker.streams import Entry
    from fedstream.core.messages import Assignment

# Why a check-in's wait ends: there is a task; there was none in time; it does not count any more,
# as what came later took its place.
Woken: TypeAlias = Literal["look", "nothing", "replaced"]


@dataclass(slots=True)
class Held:
    """A task in hand: its entry is ours, in the stream it was sent to."""

    task: Assignment
    entry: Entry
    stream: str
    tau: int | None = None  # the version that it was offered with last; None: not by us
    is_new: bool = False  # its device has not come for it yet: no work would be lost
    is_untouched: bool = False  # nobody was sent it before, and no upload of it has begun

    @property
    def attempt(self) -> str:
        """The one attempt at this task that the device makes.

        It follows from the entry, so that a device may go on with it after the gateway restarted,
        or at another replica.
        """
        text = f"{self.task.task} {self.entry.id}"
        return hashlib.sha256(text.encode()).hexdigest()[:ATTEMPT_DIGITS]


class NotHeld(Refusal):
    """No such task is in hand for this device: it is over, or another's, or was never sent."""

    def __init__(self, task: str) -> None:
        super().__init__(404, "unknown task", f"task {task[:64]!r} is not in hand for this device")


@dataclass(slots=True)
class _Session:
    """A device that is present."""

    heard: float  # when its last request ended, monotonic seconds
    is_here: bool = False  # whether it made one, or only a task waits for it
    is_listed: bool = True  # among those present: others are sent no tasks
    tasks: list[Held] = field(default_factory=list)  # in the order in which they came
    poll: asyncio.Future[Woken] | None = None  # of a check-in that waits
    nonce: str = ""  # of the last check-in that was answered
    answer: bytes | None = None  # to it; None: no task


class DeviceSessions:
    """The devices that are present and the tasks in hand.

    ``now`` is in monotonic seconds everywhere.
    """

    def __init__(self, *, away_s: float, lease_s: float, most: int) -> None:
        """``most``: devices present at once."""
        self._away_s = away_s
        self._lease_s = lease_s
        self._most = most
        self._by_device: dict[int, _Session] = {}  # least recently heard first
        self._held: dict[str, Held] = {}  # by task
        self._declined: set[int] = set()  # whose last check-in here said that they are not eligible
        self._listed: tuple[int, ...] | None = ()
        self.polls = 0  # check-ins that wait
        self.newcomers: set[int] = set()  # whom nobody was told of yet

    # devices

    def arrive(self, device: int, now: float) -> None:
        """Note a request of an eligible device, which is present from now on.

        Raises Refusal if too many are.
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
        """Note a request of a device, if it is present."""
        if device in self._by_device:
            self._come(device, now)

    def is_present(self, device: int) -> bool:
        """Whether a device is present."""
        return device in self._by_device

    def has_declined(self, device: int) -> bool:
        """Whether a device is not eligible, as it said here last."""
        return device in self._declined

    def let_go(self, device: int) -> list[Held]:
        """Let a device go at once, with its tasks: it has come to another replica."""
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
        """Let devices go that may not take part any more, and return their tasks.

        These are to be given up, and stay in hand until they are.
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
        """Note that a device is not eligible. It stays while it has a task, unheard."""
        self._declined.add(device)
        session = self._by_device.get(device)
        if session is not None:
            self._release(session, "replaced")
            if not session.tasks:
                self._remove(device)

    def present(self) -> tuple[int, ...]:
        """The devices that are present; the same object while they are the same."""
        if self._listed is None:
            self._listed = tuple(
                device for device, session in self._by_device.items() if session.is_listed
            )
        return self._listed

    def answered(self, device: int, nonce: str) -> tuple[bool, bytes | None]:
        """Whether this check-in was answered before, and with which offer (None: no task)."""
        session = self._by_device.get(device)
        if session is None or not nonce or session.nonce != nonce:
            return False, None
        return True, session.answer

    def answer(self, device: int, nonce: str, offer: bytes | None) -> None:
        """Note the answer to a device's check-in, to be repeated."""
        if (session := self._by_device.get(device)) is not None:
            session.nonce, session.answer = nonce, offer

    # check-ins that wait

    def park(self, device: int, poll: asyncio.Future[Woken], now: float) -> None:
        """Let a device's check-in wait; one that waits already has to go.

        Raises Refusal as :meth:`arrive` does.
        """
        self.arrive(device, now)
        session = self._by_device[device]
        self._release(session, "replaced")
        session.poll = poll
        self.polls += 1

    def unpark(self, device: int, poll: asyncio.Future[Woken]) -> None:
        """End the wait of a check-in, if it still waits."""
        session = self._by_device.get(device)
        if session is not None and session.poll is poll:
            self._release(session)

    def release_all(self) -> None:
        """Send all check-ins away that wait."""
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
        """The number of tasks in hand."""
        return len(self._held)

    def has(self, held: Held) -> bool:
        """Whether this very entry is in hand."""
        return self._held.get(held.task.task) is held

    def __contains__(self, task: str) -> bool:
        """Whether a task is in hand, by its id."""
        return task in self._held

    def __iter__(self) -> Iterator[Held]:
        """The tasks in hand."""
        return iter(tuple(self._held.values()))

    def hold(self, held: Held, now: float) -> None:
        """Take a task in hand, until its device comes for it. A check-in that waits may look."""
        device = held.task.device
        self.ended(held.task.task)  # if it was sent again, in another entry
        session = self._by_device.get(device)
        if session is None:
            session = self._sit(device, now)
            session.is_listed = not held.is_new  # it left before the task came
        self._held[held.task.task] = held
        session.tasks.append(held)
        self._release(session, "look")

    def first(self, device: int) -> Held | None:
        """The task that a device is to do now: the oldest of those in hand for it."""
        session = self._by_device.get(device)
        return session.tasks[0] if session is not None and session.tasks else None

    def held(self, task: str, device: int) -> Held:
        """A task in hand for this device. Raises NotHeld."""
        found = self._held.get(task)
        if found is None or found.task.device != device:
            raise NotHeld(task)
        return found

    def ended(self, task: str) -> None:
        """Let go of a task: its answer was sent, or somebody else ended or took it."""
        held = self._held.pop(task, None)
        if held is not None:
            self._by_device[held.task.device].tasks.remove(held)

    # time

    def gone(self, now: float, since: float = -math.inf) -> list[Held]:
        """Let devices go that are away, and return the tasks of those that stay away.

        These are to be given up, and stay in hand until they are. A device whose tasks are given up
        is no longer present, or it would be sent others in their place. One whose check-in waits is
        not away. ``since``: from when on devices could be heard without a break.
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
