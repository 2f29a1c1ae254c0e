"""`fedstream devices`: puts devices into quarantine, releases them, and lists them.

A command is a control entry in the updater's queue, so it has a place in the order of updates: a
device's earlier updates count, and later ones are refused. The head in Redis lists the quarantined
devices once the updater has journalled the entry.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ValidationError
from rich.table import Table

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.core.errors import BadMessage, ConfigError, FedstreamError, NoRun
from fedstream.core.messages import (
    QUARANTINED,
    WHY_QUARANTINED,
    Event,
    Quarantine,
    SetQuarantine,
)
from fedstream.core.records import Quarantines, View
from fedstream.terminal import cell, clock, console, line

_AT = "%Y-%m-%d %H:%M:%S"
_LOOK_S = 0.05  # between two checks whether the updater has processed an entry
_EVENTS = 10_000  # about the stream's limit
_USED = ("applied", "buffered")

Became = Literal["taken", "waiting", "no updater", "without effect"]


@dataclass(frozen=True)
class Answer:
    """The result of a command."""

    what: Became
    wanted: SetQuarantine
    before: Quarantines
    waiting: int = 0  # entries of the queue that the updater has not processed

    @property
    def unchanged(self) -> tuple[int, ...]:
        """The devices that needed no change."""
        changed = self.before.changed(self.wanted)
        return tuple(device for device in self.wanted.devices if device not in changed)


async def ask(
    client: Client, keys: Keys, devices: Sequence[int], *, release: bool, why: str, wait_s: float
) -> Answer:
    """Queue a command, and wait at most ``wait_s`` until the updater has processed it.

    Raises NoRun, and FedstreamError if the command can't be queued.
    """
    ledger = OperatorLedger(client, keys, "devices")
    wanted = _wanted(devices, release=release, why=why)
    before = await _quarantines(ledger)
    verdict, detail = await ledger.set_quarantine(wanted)
    if verdict == "none":
        raise NoRun(f"there is no run {keys.name!r} in Redis at {client.address}")
    if verdict != "queued":
        limit = f"at most {QUARANTINED} devices may be in quarantine"
        raise FedstreamError(_WHY_NOT[verdict].format(detail=detail, limit=limit))
    changed, until = before.changed(wanted), time.monotonic() + wait_s
    while True:
        # In this order: an entry leaves the queue only after the head was told.
        left = await client.call("XRANGE", keys.queue, detail, detail)
        now = await _quarantines(ledger)
        obeyed = not now.changed(wanted)
        if obeyed and (changed or not left):
            return Answer("taken", wanted, before)
        if not left:
            return Answer("without effect", wanted, before)
        if time.monotonic() >= until:
            alive = await client.call("EXISTS", keys.leader("updater"))
            view = await ledger.look()
            return Answer("waiting" if alive else "no updater", wanted, before, view.backlog)
        await asyncio.sleep(_LOOK_S)


_WHY_NOT = {
    "finished": "the run is finished: no more updates are taken",
    "unknown": "device {detail} is not in this run",
    "full": "{limit}, and these would make {detail}: release others, or turn away their whole site",
}


def _wanted(devices: Sequence[int], *, release: bool, why: str) -> SetQuarantine:
    """The control entry. Raises ConfigError."""
    if len(why) > WHY_QUARANTINED:
        raise ConfigError(f"--reason: {len(why)} characters; at most {WHY_QUARANTINED} are kept")
    try:
        return SetQuarantine(devices=tuple(sorted({*devices})), release=release, why=why)
    except ValidationError as error:
        raise ConfigError(
            f"{len({*devices})} devices: give 1 to {QUARANTINED} in one command"
        ) from error


async def _quarantines(ledger: OperatorLedger) -> Quarantines:
    head = await ledger.head()
    return head.quarantines if head is not None else Quarantines()


def tell(answer: Answer) -> bool:
    """Print the result of a command; return whether the updater has processed it."""
    wanted, named = answer.wanted, _named(answer.wanted.devices)
    if answer.what == "taken":
        changed = _named([d for d in wanted.devices if d not in answer.unchanged])
        if changed:
            line(f"{'released from' if wanted.release else 'in'} quarantine: {changed}")
        if answer.unchanged:
            state = "not in quarantine" if wanted.release else "already in quarantine"
            line(f"{state}: {_named(answer.unchanged)}")
        return True
    command = "release" if wanted.release else "quarantine"
    if answer.what == "without effect":
        text = (
            "the updater has passed the command, but it has no effect: a later command undid it, "
            "Redis lost it, or the updater is of an older release (then it is in `fedstream dead "
            "list`); see `fedstream devices list`, and repeat it"
        )
    elif answer.what == "no updater":
        text = "no updater is running: the command waits in the queue until one does"
    else:
        text = f"not taken yet; entries waiting for the updater: {answer.waiting}"
    line(f"fedstream: {command} of {named}: {text}", err=True)
    return False


def _named(devices: Sequence[int]) -> str:
    """Devices as words, 'device 3' or 'devices 3, 4'."""
    if not devices:
        return ""
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


# listing


@dataclass
class Device:
    """A device, according to the run's newest events and head."""

    device: int
    outcomes: Counter[str] = field(default_factory=Counter)
    suspected: int = 0  # how often an update of it stood out
    seen: float | None = None  # when its last answer was processed, in seconds since 1970
    quarantine: Quarantine | None = None

    @property
    def used(self) -> int:
        """Number of the device's updates that were applied or buffered."""
        return sum(self.outcomes[outcome] for outcome in _USED)


@dataclass(frozen=True)
class DeviceList:
    """The devices in quarantine or events, and the time of the oldest event."""

    found: tuple[Device, ...]  # quarantined ones first, then by refusals, suspicions
    since: float | None  # of the oldest event; None: there is none

    def in_quarantine(self) -> DeviceList:
        """The list without the devices that are not in quarantine."""
        return replace(self, found=tuple(one for one in self.found if one.quarantine is not None))


async def read(client: Client, keys: Keys) -> DeviceList:
    """Read the devices that are in quarantine or in the newest 10,000 events. Raises NoRun."""
    ledger = OperatorLedger(client, keys, "devices")
    view: View = await ledger.look()
    rows = await client.call("XREVRANGE", keys.events, "+", "-", "COUNT", _EVENTS)
    events = []
    for _, fields in rows:
        with suppress(BadMessage):  # another release's
            events.append(Event.decode(fields[1]))
    return listed(view.head.quarantines, events)


def listed(quarantines: Quarantines, events: Sequence[Event]) -> DeviceList:
    """The devices in quarantine, and those of ``events``, newest first."""
    found = {d: Device(d, quarantine=one) for d, one in quarantines.by_device.items()}
    for event in events:
        if event.what == "suspect" and event.device is not None:
            found.setdefault(event.device, Device(event.device)).suspected += 1
        if event.what != "outcome" or event.device is None or event.outcome is None:
            continue
        one = found.setdefault(event.device, Device(event.device))
        one.outcomes[event.outcome] += 1
        if one.seen is None and event.outcome in (*_USED, "refused"):
            one.seen = event.time
    inside = (one for one in found.values() if one.quarantine is not None)
    others = (one for one in found.values() if one.quarantine is None)
    return DeviceList(
        (
            *sorted(inside, key=lambda one: one.device),
            *sorted(others, key=lambda one: (-one.outcomes["refused"], -one.suspected, one.device)),
        ),
        events[-1].time if events else None,
    )


def plain(devices: DeviceList) -> dict[str, Any]:
    """The devices as plain values, for JSON."""
    return {"since": devices.since, "devices": [_plain(one) for one in devices.found]}


def _plain(one: Device) -> dict[str, Any]:
    barred = one.quarantine
    return {
        "device": one.device,
        "quarantine": barred and barred.model_dump(exclude={"devices"}),
        "updates": one.used,
        "refused": one.outcomes["refused"],
        "suspected": one.suspected,
        "given_up": one.outcomes["given_up"],
        "dead": one.outcomes["dead"],
        "last_seen": one.seen,
    }


def show(devices: DeviceList) -> None:
    """Print the devices as a table."""
    if not devices.found:
        line("no device is in quarantine, and none has answered yet")
        return
    console().print(_table(devices.found))
    if devices.since is not None:
        line(f"updates, refusals and tasks given up since {clock(devices.since, _AT)}")


def _table(found: Sequence[Device]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("device", "updates", "refused", "stood out", "given up"):
        table.add_column(name, justify="right")
    for name in ("last seen", "in quarantine since", "version", "reason"):
        table.add_column(name)
    for one in found:
        barred = one.quarantine
        about: Mapping[str, str] = (
            {}
            if barred is None
            else {
                "since": clock(barred.since, _AT),
                "version": str(barred.version),
                "why": barred.why,
            }
        )
        table.add_row(
            str(one.device),
            str(one.used),
            str(one.outcomes["refused"]),
            str(one.suspected),
            str(one.outcomes["given_up"]),
            "" if one.seen is None else clock(one.seen, _AT),
            about.get("since", ""),
            about.get("version", ""),
            cell(about.get("why", "")),
        )
    return table
