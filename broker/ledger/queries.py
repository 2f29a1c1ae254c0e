"""Queries that several roles share, besides the run's record and the newest version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgpack

from fedstream.broker.commands import Command
from fedstream.broker.ledger.base import Ledger
from fedstream.broker.scripts import Script
from fedstream.core.errors import BadMessage, NoScript
from fedstream.core.records import (
    Best,
    Bookmark,
    Failing,
    Head,
    Run,
    Tally,
    View,
    mapping,
    trigger_of,
)

LOOK = Script("look")
# Keys that `look` reads in one step without counting inboxes; of most keys only the length.
LOOKED_AT = (
    "run",
    "head",
    "open",
    "admitted",
    "queue",
    "triggers",
    "sites",
    "counts",
    "alive",
    "kept",
    "dead",
    "owners",
    "pool",
    "events",
    "models",
    "changes",
    "concurrent",
    "failing",
    "best",
)

_DEVICE = re.compile(rb"0|[1-9]\d{0,17}")  # other fields are foreign
_FAILING = 1000  # devices, read at once
_REGISTER = 64 << 20  # bytes of all trainers' descriptions together


class Overview(Ledger):
    """The run's counts, open tasks and owned devices."""

    async def look(self, *, inboxes: bool = False) -> View:
        """Read the run's counts, all open tasks and all owned devices, in one step.

        ``inboxes``: also count the inboxes' entries, which takes Redis half a microsecond per site.
        Raises NoRun until the run is created.
        """
        return self._view(await self._run(LOOK, int(inboxes), "all"))

    async def tally(self, *, inboxes: bool = False) -> Tally:
        """Read the run's counts in one step, as :meth:`look` does, without the two lists."""
        return self._tally(await self._run(LOOK, int(inboxes), "none"))

    async def failing(self) -> dict[int, Failing]:
        """Read the devices that failed more than once in a row, at most 1,000 of them."""
        _, flat = await self._client.call("HSCAN", self.keys.failing, 0, "COUNT", _FAILING)
        return repeated(failing_devices(flat))

    def _view(self, reply: Any) -> View:
        tally, (*_, (_, opened), (_, owned), _, _) = self._tally(reply), reply
        triggers = tuple(trigger_of(data) for data in opened)
        return View(**tally.__dict__, open=triggers, owned=_devices(owned, tally.run.devices))

    def _tally(self, reply: Any) -> Tally:
        run, head, counts, best, *numbers, event, version, now, _, _, failing, _ = reply
        tasks, admitted, queue, triggers, inbox, trainers, workers, kept, dead, owners, pool = (
            numbers
        )
        if not run:
            raise self._no_run()
        return Tally(
            run=Run.parsed(tuple(run)),
            head=Head.parsed(mapping(head)),
            counts={name: int(value) for name, value in mapping(counts).items()},
            tasks=tasks,
            admitted=admitted,
            queue=queue,
            triggers=triggers,
            inbox=inbox,
            trainers=trainers,
            workers=workers,
            kept=kept,
            dead=dead,
            owners=owners,
            pool=bool(pool),
            failing=repeated(failing_devices(failing)),
            best=Best.parsed(best),
            now=float(now),
            told={self.keys.events: event.decode(), self.keys.models: version.decode()},
        )


class Watch(Overview):
    """Waiting for events and versions of the run."""

    async def look_after(self, view: View, *, block_ms: int) -> View:
        """Wait for an event or version after ``view``, then read a new view, in one exchange.

        Returns after at most ``block_ms``. Raises NoRun.
        """
        look = LOOK.command(self.keys.__dict__, 0, "all")
        try:
            _, reply = await self._client.pipeline(
                [news_since(view, block_ms), look], wait_s=block_ms / 1000
            )
        except NoScript:
            return await self.look()
        return self._view(reply)


def asked_since(place: Bookmark | None) -> tuple[str | bytes, ...]:
    """The scripts' arguments for the changes since a place in the log; None: for everything."""
    return ("all",) if place is None else ("since", place.id, place.field, place.value)


def paired(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair alternating names and values."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def news_since(seen: Tally, block_ms: int) -> Command:
    """The command that waits for an event or version after ``seen``."""
    return ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *seen.told, *seen.told.values())


class Models(Ledger):
    """The kept models, and the digests of recent versions."""

    async def kept(self) -> dict[str, int]:
        """Read the blob names of kept models with their versions, oldest first."""
        flat = await self._client.call("ZRANGE", self.keys.kept, 0, -1, "WITHSCORES")
        return {blob.decode(): int(float(v)) for blob, v in zip(flat[::2], flat[1::2], strict=True)}

    async def best(self) -> Best | None:
        """Read which version is the best; None if none is."""
        return Best.parsed(await self._client.call("HGETALL", self.keys.best))

    async def digest(self, version: int) -> str | None:
        """Read the digest of a version's float32 model; None for an old version."""
        fields = (f"f32:{version}", version)
        own, given = await self._client.call("HMGET", self.keys.lineage, *fields)
        found = own or given
        return found.decode() if found else None

    async def given(self, version: int) -> str | None:
        """Read the digest of the model that devices receive; None for an old one but the best."""
        found = await self._client.call("HGET", self.keys.lineage, version)
        if found is None and (best := await self.best()) and best.version == version:
            return best.digest
        return found.decode() if found else None


class Register(Ledger):
    """The trainers and the owners of devices."""

    async def trainers(self) -> dict[str, dict[str, Any]]:
        """Read the latest announcement of every live trainer, by name.

        Ignores foreign entries. Raises ReplyTooLarge if sites have announced too many devices.
        """
        asked: list[Command] = [("HGETALL", self.keys.trainers), ("HGETALL", self.keys.working)]
        flat, since = await self._client.pipeline(asked, most=_REGISTER)
        found = {}
        for name, data in zip(flat[::2], flat[1::2], strict=True):
            with suppress(BadMessage, UnicodeDecodeError):
                found[name.decode()] = _about(data)
        for name, data in zip(since[::2], since[1::2], strict=True):
            with suppress(BadMessage, UnicodeDecodeError, KeyError):
                found[name.decode()] |= _map(data)
        return dict(sorted(found.items()))

    async def owners(self) -> dict[int, str]:
        """Read the owner of each owned device, ignoring foreign entries."""
        flat = await self._client.call("HGETALL", self.keys.owners)
        found = {}
        for device, owner in zip(flat[::2], flat[1::2], strict=True):
            with suppress(UnicodeDecodeError):
                if (number := device_of(device)) is not None:
                    found[number] = owner.decode()
        return found

    async def silent(self, seconds: float) -> list[bytes]:
        """Find trainers that were silent for ``seconds`` without having signed off.

        Returns names as bytes, which may be invalid text.
        """
        now = await self._client.time()
        names: list[bytes] = await self._client.call(
            "ZRANGEBYSCORE", self.keys.alive, "(0", now - seconds
        )
        return names

    async def left(self) -> list[bytes]:
        """Find trainers that have signed off; return their names as bytes."""
        names: list[bytes] = await self._client.call("ZRANGEBYSCORE", self.keys.alive, 0, 0)
        return names


class MemoryUse(Ledger):
    """The memory of Redis."""

    async def memory(self) -> tuple[int, int]:
        """Read the bytes that Redis uses, and its limit (0: none)."""
        info = await self._client.call("INFO", "memory")
        found = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        return int(found.get(b"used_memory", 0)), int(found.get(b"maxmemory", 0))


def failing_devices(flat: Sequence[Any]) -> dict[int, Failing | None]:
    """The noted failures by device, without foreign entries; None for a device that works again."""
    return {
        device: None if data is None else Failing.parsed(data)
        for name, data in paired(flat)
        if (device := device_of(name)) is not None
    }


def repeated(failing: Mapping[int, Failing | None]) -> dict[int, Failing]:
    """The devices that failed more than once, in order of their numbers."""
    return {d: one for d, one in sorted(failing.items()) if one is not None and one.tasks > 1}


def about_trainer(data: bytes | None, since: bytes | None) -> dict[str, Any]:
    """A trainer's announcement, updated by its newest heartbeat; {} if unreadable."""
    try:
        found = _about(data or b"")
    except BadMessage:
        return {}
    with suppress(BadMessage):
        found |= _map(since or b"\x80")
    return found


def _about(data: bytes) -> dict[str, Any]:
    """Decode a trainer's announcement. Raises BadMessage."""
    about = _map(data)
    if not isinstance(about.get("owns"), list):
        raise BadMessage("not a trainer's announcement: expected a map with what it 'owns'")
    return about


def _map(data: bytes) -> dict[str, Any]:
    """Decode a map that a trainer wrote. Raises BadMessage."""
    try:
        said = msgpack.unpackb(data)
        json.dumps(said, allow_nan=False)  # shown as JSON: no bytes, only text and number keys
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(f"not a trainer's announcement: {error}") from error
    if not isinstance(said, dict):
        raise BadMessage("not a trainer's announcement: expected a map")
    return said


def _devices(fields: Iterable[bytes], devices: int) -> tuple[int, ...]:
    """The run's devices among field names, in order."""
    named = map(device_of, fields)
    return tuple(sorted(device for device in named if device is not None and device < devices))


def device_of(name: bytes) -> int | None:
    """Parse the name of a hash field as a device; None if the name is foreign."""
    return int(name) if _DEVICE.fullmatch(name) else None
