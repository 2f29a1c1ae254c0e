"""The scheduler's copy of the open tasks and devices, updated by the log of changes."""

from __future__ import annotations

from heapq import heappop, heappush

from fedstream.broker.ledger.queries import repeated
from fedstream.coordinator.cooldowns import LONGEST_REST_S
from fedstream.coordinator.device_set import DeviceSet
from fedstream.coordinator.open_tasks import OpenTasks
from fedstream.core.messages import Trigger, time_of
from fedstream.core.records import NO_QUARANTINES, Bookmark, Changes, Failing, Tally
from fedstream.runtime.task_settings import Participation


class Mirror:
    """The open tasks, the available devices, and the idle ones among these.

    The cost of a change doesn't grow with the number of tasks and devices.
    """

    def __init__(self, participation: Participation) -> None:
        self._participation = participation
        self.tasks = OpenTasks()
        # Served by a trainer, and neither in quarantine, without a privacy budget, nor resting
        # after failures.
        self.devices = DeviceSet(0)
        self.idle = DeviceSet(0)  # the available devices that may be asked now
        self.failing: dict[int, Failing] = {}  # only devices that failed repeatedly
        self.begin_to_fail: list[int] = []  # since the previous look
        self.work_again: list[int] = []
        self.place: Bookmark | None = None  # place in the log up to which changes are applied
        self._owned: set[int] = set()
        self._foreign = 0  # fields of the owners' register that are no devices of the run
        self._serves_all = False  # whether unowned devices are served, too
        self._limit = 0  # the run's devices
        self._quarantines = NO_QUARANTINES
        self._spent = frozenset[int]()  # devices without a privacy budget
        # Devices with an update in the batch of a private run, which takes one from each; with
        # correlated noise also in one of the last sums.
        self._in_batch = frozenset[int]()
        self._resting: dict[int, float] = {}  # device -> end of its rest, seconds since 1970
        self._ends: list[tuple[float, int]] = []  # heap of ends of rests, outdated ones included
        self._now = 0.0  # time of the previous look

    def follow(self, tally: Tally, changes: Changes, now: float) -> bool:
        """Apply a look at the run; ``now``: seconds since 1970, by Redis's clock.

        Returns whether the mirror's numbers of tasks and owners equal Redis's. If not, a change was
        not logged (by an earlier release, or because a key was quarantined): apply a look at
        everything.
        """
        self.place = changes.place
        changed = self._follow_tasks(changes, now)
        if changes.all_devices:
            owned = set(changes.devices)
            self._foreign = tally.owners - len(owned)
            changed |= owned ^ self._owned
            self._owned = owned
        for device, is_owned in () if changes.all_devices else changes.devices.items():
            (self._owned.add if is_owned else self._owned.discard)(device)
            changed.add(device)
        changed |= self._follow_failing(changes, now)
        barred, before = tally.head.quarantines, self._quarantines
        if barred is not before:
            changed |= barred.by_device.keys() ^ before.by_device.keys()
            self._quarantines = barred
        spent = tally.head.spent
        in_batch = frozenset(tally.head.held if tally.run.policy else ()) | tally.head.recent
        changed |= (spent ^ self._spent) | (in_batch ^ self._in_batch)
        self._spent, self._in_batch = spent, in_batch
        serves_all = tally.pool or not self._owned
        if (serves_all, tally.run.devices) != (self._serves_all, self._limit):
            self._serves_all, self._limit = serves_all, tally.run.devices
            self._begin_anew()
        else:
            for device in changed:
                if device < self._limit:
                    self._settle(device)
        return (len(self.tasks), len(self._owned) + self._foreign) == (tally.tasks, tally.owners)

    def _follow_tasks(self, changes: Changes, now: float) -> set[int]:
        """Apply changes of tasks; return their devices."""
        if changes.all_tasks:
            before, opened = self.tasks, [t for t in changes.tasks.values() if t is not None]
            since = {t.task: before.since(t.task) or opened_at(t, now) for t in opened}
            self.tasks = OpenTasks(opened, since)
            return {trigger.device for some in (before, opened) for trigger in some}
        changed = set()
        for task, trigger in changes.tasks.items():
            if trigger is None:
                trigger = self.tasks.end(task)
            elif self.tasks.since(task) is None:
                self.tasks.open(trigger, opened_at(trigger, now))
            if trigger is not None:
                changed.add(trigger.device)
        return changed

    def _follow_failing(self, changes: Changes, now: float) -> set[int]:
        """Apply changes of failing devices; return the devices that begin or end a rest."""
        known = self.failing.keys() if changes.all_devices else set[int]()
        told = changes.failing
        if now < self._now and not changes.all_devices:  # clock set back: no rest gets longer
            told = {**self.failing, **told}
        self._now, latest = now, now + LONGEST_REST_S
        changed = known | told.keys()
        was = {device for device in changed if device in self.failing}
        for device in changed:
            self.failing.pop(device, None)
            self._resting.pop(device, None)
        for device, one in repeated(told).items():
            self.failing[device] = one
            self._resting[device] = end = min(one.until, latest)
            heappush(self._ends, (end, device))
        is_now = changed & self.failing.keys()
        self.begin_to_fail, self.work_again = sorted(is_now - was), sorted(was - is_now)
        while self._ends and self._ends[0][0] <= now:
            end, device = heappop(self._ends)
            if self._resting.get(device) == end:
                del self._resting[device]
                changed.add(device)
        return changed

    def _begin_anew(self) -> None:
        barred = self._quarantines.by_device.keys() | self._spent | self._resting.keys()
        served = range(self._limit) if self._serves_all else self._owned
        self.devices = DeviceSet(self._limit, (d for d in served if d not in barred))
        idle = (device for device in self.devices if self._is_free(device))
        self.idle = DeviceSet(self._limit, idle, self._participation.shares(self._limit))

    def _settle(self, device: int) -> None:
        """Put a device into the sets that it belongs to."""
        is_served = self._serves_all or device in self._owned
        is_barred = device in self._quarantines.by_device or device in self._spent
        if is_served and not is_barred and device not in self._resting:
            self.devices.add(device)
        else:
            self.devices.discard(device)
        if device in self.devices and self._is_free(device):
            self.idle.add(device)
        else:
            self.idle.discard(device)

    def _is_free(self, device: int) -> bool:
        return device not in self.tasks.at_work and device not in self._in_batch


def opened_at(trigger: Trigger, now: float) -> float:
    """The opening time of a newly seen task, in seconds since 1970.

    The scheduler's own task ids contain the time; any other task counts from now.
    """
    made = time_of(trigger.task) if trigger.origin == "scheduler" else None
    return now if made is None else min(now, made)
