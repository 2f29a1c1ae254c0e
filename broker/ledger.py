"""The ledger of a run: open tasks, admitted answers, and the outcome of every task.

Every change is one Lua script (``broker/lua``) or one command, and so is atomic:
``issued = applied + buffered + refused + given up + dead + open`` holds at any moment.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgpack

from fedstream.broker import reasons
from fedstream.broker.blobs import CHUNK, LONGEST, SHORTEST, chunks_of
from fedstream.broker.client import Client, Command
from fedstream.broker.custody import ended_unlike, find_lost, in_parts
from fedstream.broker.errors import BadMessage, Fenced, NoRun, NoScript
from fedstream.broker.keys import COORDINATORS, POOL, TRAINERS, Keys, member
from fedstream.broker.messages import (
    OUTCOMES,
    SCHEMA,
    CloseRound,
    Dead,
    Event,
    GiveUp,
    Presence,
    RoundEnd,
    Task,
    Trigger,
    Upload,
    Version,
    Withdraw,
)
from fedstream.broker.records import (
    Commit,
    Committed,
    End,
    Head,
    Run,
    View,
    flattened,
    mapping,
    trigger_of,
)
from fedstream.broker.scripts import Script, load_all
from fedstream.broker.streams import Entry

_SCRIPTS = {
    name: Script(name)
    for name in (
        "admit", "age_letters", "announce", "bury", "close_round", "commit", "create", "dispatch",
        "finish_run", "hand_out", "leave", "look", "measure", "relay", "retire", "retry",
        "settle_unserved", "tell", "trigger", "withdraw",
    )
}  # fmt: skip

_DEVICE = re.compile(rb"0|[1-9]\d{0,17}")  # foreign fields may be there too

# Bytes of an entry that a dead letter keeps, more than most of ours have: 1,000 letters take 80 MiB
# of Redis's memory.
_LETTER = 64 << 10
_REGISTER = 64 << 20  # bytes of all trainers' descriptions together
_WHY = 1000  # characters of a reason: a site may send one of any length

T = TypeVar("T")


def _packed(value: object) -> bytes:
    """Pack an argument for a script, bytes as strings: Redis's cmsgpack has no binary type."""
    packed = msgpack.packb(value, use_bin_type=False)
    assert isinstance(packed, bytes)  # noqa: S101  (packb's type is Any)
    return packed


def _about(data: bytes) -> dict[str, Any]:
    """Decode a trainer's description of itself. Raises BadMessage."""
    try:
        about = msgpack.unpackb(data)
        json.dumps(about, allow_nan=False)  # shown as JSON: no bytes, only text and number keys
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(f"not what a trainer says: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("owns"), list):
        raise BadMessage("not what a trainer says: a map with what it 'owns' was expected")
    return about


def _text(reply: bytes) -> str:
    return reply.decode()


def _devices(fields: Iterable[bytes], devices: int) -> tuple[int, ...]:
    """The run's devices among field names, in order."""
    found = (int(field) for field in fields if _DEVICE.fullmatch(field))
    return tuple(sorted(device for device in found if device < devices))


def _verdict(reply: Sequence[bytes]) -> tuple[str, str]:
    verdict, reason = reply
    return verdict.decode(), reason.decode()


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A pending change: await it alone, or send its command with others in one pipeline."""

    command: Command
    parsed: Callable[[Any], T]  # parses the command's reply
    _alone: Callable[[], Awaitable[Any]]

    def __await__(self) -> Generator[Any, None, T]:
        return self.parsed((yield from self._alone().__await__()))


class Ledger:
    """The state of one run in Redis, changed atomically."""

    def __init__(self, client: Client, keys: Keys, service: str) -> None:
        client.bind(keys.prefix)
        self._client = client
        self._service = service
        self.keys = keys

    async def _script(
        self,
        name: str,
        *arguments: Any,
        rest: Sequence[str] = (),
        ahead: Sequence[Command] = (),
        **keys: str,
    ) -> Any:
        return await _SCRIPTS[name](
            self._client, {**self.keys.__dict__, **keys}, *arguments, rest=rest, ahead=ahead
        )

    def _decision(
        self,
        name: str,
        parsed: Callable[[Any], T],
        *arguments: Any,
        rest: Sequence[str] = (),
        **more: str,
    ) -> Decision[T]:
        script, keys = _SCRIPTS[name], {**self.keys.__dict__, **more}
        return Decision(
            script.command(keys, *arguments, rest=rest), parsed,
            partial(script, self._client, keys, *arguments, rest=rest),
        )  # fmt: skip

    async def prepare(self, sites: Iterable[str] = ()) -> None:
        """Register the sites and load every script, including those that trainers may not load."""
        await load_all(self._client)
        if names := sorted(sites):
            await self._client.call("SADD", self.keys.sites, *names)

    def _event(self, **fields: Any) -> dict[str, Any]:
        event = {
            "v": SCHEMA,
            "k": Event.kind,
            "service": self._service,
            "time": time.time(),
            **fields,
        }
        return {name: value for name, value in event.items() if value is not None}

    # state

    async def look(self, *, inboxes: bool = False) -> View:
        """Read everything countable in one step. Raises NoRun until the run is created.

        ``inboxes``: also count their entries, which takes Redis half a microsecond per site.
        """
        return self._view(await self._script("look", int(inboxes)))

    async def look_after(
        self, view: View, *, block_ms: int, opening: Decision[int] | None = None
    ) -> tuple[int, View]:
        """Open tasks, wait for news since ``view``, and look again, all in one exchange.

        Returns how many tasks were opened, and the new view, after at most ``block_ms``. Raises
        NoRun, and Fenced as :meth:`trigger` does.
        """
        streams = (*view.told, *view.told.values())
        news: Command = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *streams)
        look = _SCRIPTS["look"].command(self.keys.__dict__, 0)
        first = (opening.command,) if opening else ()
        try:
            *opened, _, reply = await self._client.pipeline(
                [*first, news, look], wait_s=block_ms / 1000
            )
        except NoScript:
            return await opening if opening else 0, await self.look()
        return opening.parsed(opened[0]) if opening else 0, self._view(reply)

    def _view(self, reply: Any) -> View:
        run, head, counts, *numbers, event, version, now = reply
        opened, admitted, queue, triggers, inbox, trainers, kept, dead, owned, pool = numbers
        if not run:
            raise NoRun(f"there is no run {self.keys.name!r} in Redis at {self._client.address}")
        record = Run.parsed(tuple(run))
        return View(
            run=record,
            head=Head.parsed(mapping(head)),
            counts={name: int(value) for name, value in mapping(counts).items()},
            open=tuple(trigger_of(data) for data in opened),
            admitted=admitted,
            queue=queue,
            triggers=triggers,
            inbox=inbox,
            trainers=trainers,
            kept=kept,
            dead=dead,
            owned=_devices(owned, record.devices),
            pool=bool(pool),
            now=float(now),
            told={self.keys.events: event.decode(), self.keys.models: version.decode()},
        )

    async def run(self) -> Run:
        """Read the run's record. Raises NoRun."""
        record = await self._client.call("HGETALL", self.keys.run)
        if not record:
            raise NoRun(f"there is no run {self.keys.name!r} in Redis at {self._client.address}")
        return Run.parsed(tuple(record))

    async def head(self) -> Head | None:
        """Read the newest version; None before the first."""
        record = mapping(await self._client.call("HGETALL", self.keys.head))
        return Head.parsed(record) if record else None

    async def kept(self) -> dict[str, int]:
        """Read the blobs of the models that are kept, with their versions, oldest first."""
        flat = await self._client.call("ZRANGE", self.keys.kept, 0, -1, "WITHSCORES")
        return {blob.decode(): int(float(v)) for blob, v in zip(flat[::2], flat[1::2], strict=True)}

    async def digest(self, version: int) -> str | None:
        """Read a version's digest; None unless it is one of the newest."""
        found = await self._client.call("HGET", self.keys.lineage, version)
        return found.decode() if found else None

    async def ended(self) -> list[Upload]:
        """Read the updates in the queue whose tasks have ended: done, but not yet deleted."""
        rows, opened = await self._client.pipeline(
            [("XRANGE", self.keys.queue, "-", "+"), ("HKEYS", self.keys.open)]
        )
        found = []
        for _, fields in rows:
            with suppress(BadMessage):  # the updater will come across it too
                found.append(Upload.decode(fields[1]))
        return [upload for upload in found if upload.task.encode() not in set(opened)]

    async def trainers(self) -> dict[str, dict[str, Any]]:
        """Read the latest description of every live trainer, by name.

        Foreign entries are left out. Raises ReplyTooLarge if sites have named too many devices.
        """
        asked: Command = ("HGETALL", self.keys.trainers)
        [flat] = await self._client.pipeline([asked], most=_REGISTER)
        found = {}
        for name, data in zip(flat[::2], flat[1::2], strict=True):
            with suppress(BadMessage, UnicodeDecodeError):
                found[name.decode()] = _about(data)
        return dict(sorted(found.items()))

    async def owners(self) -> dict[int, str]:
        """Read which trainer owns which device, leaving out foreign entries."""
        flat = await self._client.call("HGETALL", self.keys.owners)
        found = {}
        for device, owner in zip(flat[::2], flat[1::2], strict=True):
            with suppress(UnicodeDecodeError):
                if _DEVICE.fullmatch(device):
                    found[int(device)] = owner.decode()
        return found

    # scheduler

    def trigger(
        self, token: str, limit: int, draw: int, triggers: Iterable[Trigger]
    ) -> Decision[int]:
        """Open tasks while fewer than ``limit`` are open: how many were opened.

        ``draw`` is the number of tasks issued when these were drawn; if others were issued since,
        none is opened. Raises Fenced.
        """

        def opened(reply: Any) -> int:
            if reply == b"fenced":
                raise Fenced(f"another scheduler leads now (mine is token {token})")
            return reply if isinstance(reply, int) else 0

        pairs = [part for t in triggers for part in (t.task, t.encode())]
        return self._decision("trigger", opened, token, limit, draw, *pairs)

    async def ask(self, wish: CloseRound | Withdraw) -> None:
        """Ask the coordinator to end a round or to give up tasks."""
        await self._client.call("XADD", self.keys.triggers, "*", "m", wish.encode())

    # coordinator

    def dispatch(self, entry: Entry, trigger: Trigger) -> Decision[str]:
        """Turn a scheduler's trigger into a task for the device's owner, or else the pool.

        Returns 'sent', 'ended' (the task already has) or 'repeated'.
        """
        about = {
            "group": COORDINATORS, "entry": entry.id, "task": trigger.task,
            "device": trigger.device,
        }  # fmt: skip
        task = Task.of(trigger).encode()
        return self._decision(
            "dispatch", _text, _packed(about), task, trigger.encode(), stream=self.keys.triggers
        )

    def take_up(
        self, site: str, entry: Entry, trigger: Trigger, *, anarchic: bool, rate: int, limit: int
    ) -> Decision[str]:
        """Turn a site's trigger for its own device into a task.

        Returns 'sent', 'unasked' (devices don't decide by themselves in this run), 'foreign' (the
        device is not the site's or not in the run), 'limited' (the site exceeds ``rate`` per
        second, or ``limit`` tasks are open), 'busy' (the device has a task), 'finished' (the run
        has) or 'repeated'.
        """
        about = {
            "group": COORDINATORS, "entry": entry.id, "task": trigger.task,
            "device": trigger.device, "site": site, "rate": rate, "limit": limit,
            "anarchic": anarchic,
        }  # fmt: skip
        task = Task.of(trigger).encode()
        return self._decision(
            "dispatch", _text, _packed(about), task, trigger.encode(), stream=self.keys.inbox(site)
        )

    def close_round(self, entry: Entry, closing: CloseRound) -> Decision[str]:
        """Give up a round's unanswered tasks and tell the updater through the queue."""
        about = {
            "group": COORDINATORS, "entry": entry.id, "tasks": closing.tasks,
            "trainers": TRAINERS, "why": reasons.ROUND_OVER,
        }  # fmt: skip
        end = RoundEnd(version=closing.version, why=closing.why).encode()
        return self._decision("close_round", _text, _packed(about), end, _packed(self._event()))

    def withdraw(self, entry: Entry, wish: Withdraw) -> Decision[str]:
        """Give up the unanswered tasks of a request; their trainers lose their leases."""
        about = {
            "group": COORDINATORS, "entry": entry.id, "tasks": wish.tasks, "trainers": TRAINERS,
            "why": wish.why,
        }  # fmt: skip
        return self._decision("withdraw", _text, _packed(about), _packed(self._event()))

    def admit(
        self,
        entry: Entry,
        answer: Upload | GiveUp,
        *,
        size_limit: int,
        site: str = POOL,
        trusted: bool = True,
    ) -> Decision[tuple[str, str]]:
        """Admit an answer to the queue, or not: ('admitted' | 'refused' | ..., reason).

        ``site``: whose inbox the answer came through. For untrusted sites, staleness counts from
        the newest version at the time the task was handed out.
        """
        about: dict[str, object] = {
            "group": COORDINATORS, "entry": entry.id, "site": site, "trusted": trusted,
            "task": answer.task, "attempt": answer.attempt, "device": answer.device,
        }  # fmt: skip
        event = self._event(device=answer.device)
        name = member(site, answer.trainer)
        if isinstance(answer, GiveUp):
            about["give_up"] = reason = reasons.of_giving_up(answer.reason)
            if reason != answer.reason:
                event["text"] = answer.reason
            said: Upload | GiveUp = answer
            blob = f"{site}/{answer.task}.{answer.attempt}"
        else:
            said = answer.model_copy(update={"site": site, "handed": None, "trainer": name})
            blob = said.blob
            about |= {
                "tau": answer.tau, "base": answer.base, "layout": answer.layout,
                "size": answer.size, "size_limit": size_limit,
            }  # fmt: skip
            if answer.chunks is None:
                about |= {"chunks": chunks_of(answer.size), "shortest": CHUNK, "longest": CHUNK}
            else:
                about |= {"chunks": answer.chunks, "shortest": SHORTEST, "longest": LONGEST}
        return self._decision(
            "admit", _verdict, _packed(about), said.encode(), _packed(event),
            rest=[self.keys.update(blob), self.keys.queued(blob)], stream=self.keys.inbox(site),
        )  # fmt: skip

    def hear(
        self,
        site: str,
        entry: Entry,
        said: Presence,
        *,
        denied: Sequence[int] = (),
        most: int,
        rate: int,
    ) -> Decision[str]:
        """Record a trainer's announcement: 'heard', 'leaves', 'repeated' or 'over'.

        ``denied``: devices in the announcement that the site may not own. 'over': the site already
        has ``most`` other trainers, or has named ``rate`` trainers and devices in this second.
        """
        name = member(site, said.trainer)
        about = {
            "group": COORDINATORS, "entry": entry.id, "site": site, "name": name,
            "owns": said.owns, "denied": denied, "leaves": said.leaves, "most": most, "rate": rate,
            "pool": TRAINERS,
        }  # fmt: skip
        kept = {
            "host": said.host, "pid": said.pid, "owns": said.owns, "device": said.device,
            "answers": said.answers,
        }  # fmt: skip
        joined = self._event(what="trainer", text=f"{name} joined")
        return self._decision(
            "announce", _text, _packed(about), _packed(kept), _packed(joined),
            _packed(self._event(what="trainer")), stream=self.keys.inbox(site),
        )  # fmt: skip

    def relay(
        self, site: str, entry: Entry, event: Event | None, *, most: int, why: str
    ) -> Decision[str]:
        """Relay a site's event to observers: 'told', 'dropped' or 'repeated'.

        ``event``: None if it is invalid, to be dropped. ``most``: events per second for the site.
        ``why``: the reason under which dropped events are counted.
        """
        return self._decision(
            "relay", _text, COORDINATORS, entry.id, site, event.encode() if event else "", most,
            why, stream=self.keys.inbox(site),
        )  # fmt: skip

    async def bury(
        self,
        stream: str,
        group: str,
        entry: Entry,
        reason: str,
        *,
        task: Task | Trigger | Upload | GiveUp | None = None,
        deliveries: int = 0,
        found: Dead | None = None,
        site: str = "",
    ) -> bool:
        """Move an entry to ``dead`` and end the task it is about: whether the entry was there.

        ``site``: whose stream or inbox the entry was in; the task ends only if it was sent to that
        site. Beyond the site's rate, an entry that ends no task is dropped. ``found``: a trainer's
        report of an entry that it could not read; that entry is kept instead.
        """
        name, now = stream.removeprefix(self.keys.prefix), time.time()
        dead = found or Dead(
            stream=name, entry=entry.id, reason=reason, time=now,
            deliveries=deliveries, data=entry.data,
        )  # fmt: skip
        dead = dead.model_copy(
            update={"time": now, "reason": dead.reason[:_WHY], "data": dead.data[:_LETTER]}
        )
        kind = reasons.of_death(reason)
        event = self._event(
            device=task.device if task else None, text=reason[:_WHY] if reason != kind else None
        )
        return bool(
            await self._script(
                "bury", group, entry.id, dead.encode(), task.task if task else "", kind,
                _packed(event), site, stream=stream,
            )
        )  # fmt: skip

    async def age_letters(self, days: float) -> int:
        """Delete dead letters older than ``days``: how many."""
        return int(await self._script("age_letters", round(days * 86_400)))

    async def find_lost(self, seen: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        """Give up lost open tasks: see :func:`fedstream.broker.custody.find_lost`."""
        return await find_lost(self._client, self.keys, _packed(self._event()), seen)

    async def leases(self, lease_ms: int, owners: Iterable[str]) -> tuple[int, list[str]]:
        """Count the tasks under a live lease, and find the streams with an expired one.

        Looks at the pool's stream and those of ``owners``.
        """
        leased, lapsed = 0, list[str]()
        for some in in_parts([self.keys.tasks, *map(self.keys.tasks_of, sorted(owners))]):
            more, over = await self._script("measure", TRAINERS, lease_ms, rest=some)
            leased += more
            lapsed += [some[at] for at in over]
        return leased, lapsed

    async def memory(self) -> tuple[int, int]:
        """Read how many bytes Redis uses, and may use (0: no limit)."""
        info = await self._client.call("INFO", "memory")
        found = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        return int(found.get(b"used_memory", 0)), int(found.get(b"maxmemory", 0))

    async def silent(self, seconds: float) -> list[bytes]:
        """Find trainers not heard from for ``seconds`` that have not said good-bye.

        Returns names as written, which may not be valid text.
        """
        now = await self._client.call("TIME")
        names: list[bytes] = await self._client.call(
            "ZRANGEBYSCORE", self.keys.alive, "(0", int(now[0]) - seconds
        )
        return names

    async def unheard(self, owners: Iterable[str]) -> list[str]:
        """Find the owners of devices that are not on the register."""
        unheard: list[str] = []
        for some in in_parts(sorted(owners)):
            scores = await self._client.call("ZMSCORE", self.keys.alive, *some)
            unheard += [owner for owner, at in zip(some, scores, strict=True) if at is None]
        return unheard

    async def left(self) -> list[bytes]:
        """Find trainers that have said good-bye; returns names as written."""
        names: list[bytes] = await self._client.call("ZRANGEBYSCORE", self.keys.alive, 0, 0)
        return names

    async def settle_unserved(self, lease_ms: int) -> int:
        """Reassign or give up the pool's tasks when no live trainer serves it: how many given up.

        A task goes to its device's owner if there is one.
        """
        event = _packed(self._event())
        return int(await self._script("settle_unserved", TRAINERS, lease_ms, event))

    async def leave(self, name: bytes, *, silent_s: float = 0.0) -> int | None:
        """Deregister a trainer that has been silent for ``silent_s`` or has said good-bye.

        Returns how many tasks waiting for its devices were given up; None if it has been heard from
        since, or is neither registered nor an owner of devices.
        """
        shown = name.decode(errors="replace")
        left = self._event(what="trainer", text=f"{shown} left")
        lost = self._event(what="trainer", text=f"{shown} was not heard for {silent_s:g} s")
        given_up = await self._script(
            "leave", name, silent_s, _packed(left), _packed(lost), _packed(self._event())
        )
        return None if given_up < 0 else int(given_up)

    # updater

    async def awaits(self, upload: Upload) -> bool:
        """Check whether an update was admitted and its task has not ended."""
        admitted = await self._client.call("HGET", self.keys.admitted, upload.task)
        return bool(admitted == upload.attempt.encode())

    async def create(
        self,
        token: str,
        run: Run,
        version: Version,
        *,
        counts: Mapping[str, int] | None = None,
        journalled: Mapping[str, int] | None = None,
        done: Callable[[str], End | None] | None = None,
        held: Sequence[int] = (),
        mean_staleness: float = 0.0,
    ) -> Committed:
        """Create the run with its first version, or publish its newest one over Redis's state.

        Returns 'created', 'unwritten' (the model's blob is missing), 'lost' (the token is missing)
        or 'moved' (Redis fell back again meanwhile, or this request is late). ``counts``: the run's
        counts, for a Redis that was emptied. ``journalled``: the counts of the ends in the journal.
        ``done``: how a task ended, for a Redis that fell back; tasks that are open there, or have
        ended differently since, end as ``done`` says. Open tasks that Redis no longer knows are
        given up. Raises Fenced.
        """
        about: dict[str, Any] = {
            "token": token, "run": run.record(), "counts": dict(counts or {}),
            "outcomes": OUTCOMES, "journalled": _packed(dict(journalled or {})),
            "head": self._head(version, held, 0, mean_staleness),
            "version": version.version, "digest": version.digest, "blob": version.blob,
            "size": str(version.size), "chunks": version.chunks,
        }  # fmt: skip
        if done is not None:
            about["look"] = secrets.token_hex(8)
            unlike = await ended_unlike(self._client, self.keys, done, about["look"])
            about["ends"] = [self._ending(end) for end in unlike]
        blob = self.keys.model(version.blob)
        reply = await self._script("create", _packed(about), version.encode(), blob=blob)
        return self._committed(reply, token)

    async def commit(
        self, token: str, commit: Commit, *, ahead: Sequence[Command] = ()
    ) -> Committed:
        """Publish, end tasks and delete in one step, or do nothing at all.

        Returns 'done' (also for a repetition after a lost reply), 'lost' (Redis was emptied),
        'behind:<version>' (Redis's head is not this version's parent, or is older than `at`, or
        Redis has forgotten ends that it was told) or 'unwritten' (the model's blob is missing).
        Raises Fenced.

        ``ahead``: commands from :func:`fedstream.broker.blobs.prepare` that write the model's blob.
        """
        version = commit.version
        about: dict[str, Any] = {
            "token": token, "ends": [self._ending(end) for end in commit.ends],
            "entries": list(commit.entries),
            "retired": list(commit.retired), "time": repr(time.time()), "at": commit.at,
            "head": self._head(version, commit.held, commit.retained, commit.mean_staleness),
            "journalled": _packed(dict(commit.journalled)), "before": commit.before,
        }  # fmt: skip
        if commit.finish is not None:
            about["finish"] = commit.finish
        if version is not None:
            about |= {
                "version": version.version, "digest": version.digest, "blob": version.blob,
                "size": str(version.size), "chunks": version.chunks,
            }  # fmt: skip
        reply = await self._script(
            "commit", _packed(about), version.encode() if version else b"",
            blob=self.keys.model(version.blob if version else "none"),
            rest=[
                *(self.keys.queued(blob) for blob in commit.updates),
                *(self.keys.model(blob) for blob in commit.retired),
            ],
            ahead=ahead,
        )  # fmt: skip
        return self._committed(reply, token)

    async def hand_out(
        self, token: str, device: int, digest: str, size: int, *, ahead: Sequence[Command] = ()
    ) -> str:
        """Replace a device's state, as its trainers read it, with the staged one.

        Returns 'done', 'lost' (the token is missing) or 'unwritten' (nothing is staged, perhaps
        because it was handed out already). Raises Fenced. ``ahead``: commands from
        :func:`fedstream.broker.blobs.prepare` that write the staged state.
        """
        reply = await self._script(
            "hand_out", token, size, digest, chunks_of(size), ahead=ahead,
            staged=self.keys.staged(device, digest), device=self.keys.device(device),
        )  # fmt: skip
        return self._unless_fenced(reply, token)

    async def retire(self, token: str, blobs: Sequence[str]) -> str:
        """Delete models early, which takes no memory: 'done' or 'lost'. Raises Fenced."""
        rest = [self.keys.model(blob) for blob in blobs]
        return self._unless_fenced(await self._script("retire", token, *blobs, rest=rest), token)

    def _ending(self, end: End) -> tuple[str, str, str, str, dict[str, Any]]:
        event = self._event(
            device=end.device, version=end.version, staleness=end.staleness, weight=end.weight
        )
        return end.task, end.attempt, end.outcome, end.reason, event

    def _committed(self, reply: Any, token: str) -> Committed:
        if not isinstance(reply, list):
            return Committed(self._unless_fenced(reply, token))
        what, state, flat = reply
        counts = {name: int(value) for name, value in mapping(flat).items()}
        return Committed(what.decode(), counts, state == b"finished")

    def _unless_fenced(self, reply: bytes, token: str) -> str:
        if reply == b"fenced":
            raise Fenced(f"another updater has taken over (mine is token {token})")
        return reply.decode()

    def _head(
        self, version: Version | None, held: Sequence[int], retained: int, staleness: float
    ) -> list[str | bytes]:
        values: dict[str, object] = {
            "held": " ".join(map(str, held)), "retained": retained,
            "mean_staleness": repr(staleness),
        }  # fmt: skip
        if version is not None:
            values |= {
                "version": version.version, "digest": version.digest, "blob": version.blob,
                "time": repr(version.time), "epoch": version.epoch, "chunks": version.chunks,
            }  # fmt: skip
        return flattened(values)

    async def finish(self, why: str) -> bool:
        """End the run: whether it was running."""
        event = self._event(what="run", text=f"finished: {why}")
        now = time.time()
        return bool(await self._script("finish_run", why, repr(now), _packed(event)))

    # operator

    async def retry(self, letter: str, before: str, trigger: Trigger) -> tuple[str, str]:
        """Retry a dead letter's work as the task in ``trigger``, and delete the letter.

        ``before``: the task that the letter is about. Returns a verdict and a detail: 'sent', or
        else nothing was done: 'gone' (no such letter), 'finished' (the run), 'open' (the task
        still is), 'retried' (already; the detail is the new task), 'ended' (not as dead; the detail
        is the outcome), 'forgotten' (how the task ended), 'round' (it is over), 'busy' (the device;
        the detail is its task), 'held' (an update of the device is buffered).
        """
        about: dict[str, object] = {
            "letter": letter, "before": before, "task": trigger.task, "device": trigger.device,
        }  # fmt: skip
        if trigger.version is not None:
            about["version"] = trigger.version
        return _verdict(await self._script("retry", _packed(about), trigger.encode()))

    async def ends(self, tasks: Sequence[str]) -> list[str]:
        """Look up what became of tasks: 'open', an outcome, or '' if forgotten.

        'retried': the task was dead, and was issued again as another task.
        """
        asked: list[Command] = []
        for task in tasks:
            asked.append(("HEXISTS", self.keys.open, task))
            between = (f"[{task}|", f"[{task}}}", "LIMIT", 0, 1)
            asked.append(("ZRANGEBYLEX", self.keys.ended, *between))
        replies = await self._client.pipeline(asked) if asked else []
        return [
            "open" if is_open else ended[0].decode().split("|")[2] if ended else ""
            for is_open, ended in zip(replies[::2], replies[1::2], strict=True)
        ]

    # any role

    async def tell(self, event: Event) -> None:
        """Write an event for observers."""
        await self._script("tell", event.encode())

    async def purge(self) -> int:
        """Delete every key of the run at once: how many there were.

        To running services this looks as if Redis had been emptied, which they can repair; had the
        keys gone one by one, their counts would stay wrong for ever. New keys written between the
        scan and the deletion are blobs, which expire.
        """
        own = (name for name in vars(self.keys).values() if name.startswith(self.keys.prefix))
        names = {name.encode() for name in own if name != self.keys.prefix}
        names |= await self.stored()
        return int(await self._client.call("UNLINK", *sorted(names)))

    async def stored(self) -> set[bytes]:
        """Find all keys in Redis that begin with the run's prefix, blobs included."""
        names = set[bytes]()
        cursor, pattern = b"0", self.keys.prefix + "*"
        while True:
            cursor, found = await self._client.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            names.update(found)
            if cursor == b"0":
                return names
