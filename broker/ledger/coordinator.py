"""The coordinators' operations on Redis: hand out tasks, admit answers, clean up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from fedstream.broker import blobs, cleanup, streams
from fedstream.broker.keys import COORDINATORS, TRAINERS, member
from fedstream.broker.ledger.base import Pending, Rights, packed, verdict, word
from fedstream.broker.ledger.dead_letters import BURY, Letters
from fedstream.broker.ledger.queries import LOOK, MemoryUse, Models, Overview, Register
from fedstream.broker.scripts import Script, load_all
from fedstream.broker.streams import Entry
from fedstream.core import reasons
from fedstream.core.messages import (
    POOL,
    CloseRound,
    Event,
    GiveUp,
    Heartbeat,
    Measured,
    Presence,
    RoundEnd,
    Trigger,
    Upload,
    Withdraw,
)

_ADMIT = Script("admit")
_ADMIT_MEASURED = Script("admit_measured")
_AGE_LETTERS = Script("age_letters")
_ANNOUNCE = Script("announce")
_BEAT = Script("beat")
_CLOSE_ROUND = Script("close_round")
_DISPATCH = Script("dispatch")
_LEAVE = Script("leave")
_MEASURE = Script("measure")
_RELAY = Script("relay")
_SETTLE_UNSERVED = Script("settle_unserved")
_WITHDRAW = Script("withdraw")

_OF_SITES = ("update:*", "workspace:*", "tasks:*", "gateway:*")
_OWNERS = 1000  # fields of the register of owners per read

RIGHTS = Rights(
    both=(
        "triggers",
        "inbox:*",
        "tasks",
        "tasks:*",
        "open",
        "admitted",
        "ended",
        "counts",
        "evaluation",
        "evaluations",
        "measured",
        "events",
        "changes",
        "trainers",
        "alive",
        "owners",
        "owned:*",
        "pool",
        "working",
        "concurrent",
        "failing",
        "rates",
        "letters",
        "sites",
        "update:*",
        "queued:*",
        "control:*",
        "quarantine:*",
    ),
    reads=(
        "run",
        "head",
        "lineage",
        "kept",
        "best",
        "sealing",
        "models",
        "model:*",
        "device:*",
        "leader:scheduler",
        "leader:updater",  # for the live page
    ),
    writes=("queue", "dead"),
    commands=(
        "xgroup|create",
        "xreadgroup",
        "zrangebyscore",
        "zmscore",
        "hgetall",
        "info",
        "type",
        "sadd",
        "zrange",
        "smembers",
        "hscan",
        *blobs.READS,
    ),
    scripts=(
        _ADMIT,
        _ADMIT_MEASURED,
        _AGE_LETTERS,
        _ANNOUNCE,
        _BEAT,
        _CLOSE_ROUND,
        _DISPATCH,
        _LEAVE,
        _MEASURE,
        _RELAY,
        _SETTLE_UNSERVED,
        _WITHDRAW,
        BURY,
        LOOK,
        streams.CLAIM,
        streams.REAP,
        *cleanup.SCRIPTS,
    ),
    apart=(  # to expire what sites leave behind
        Rights(reads=_OF_SITES, commands=("pttl", "strlen")),
        Rights(writes=_OF_SITES, commands=("pexpire",)),
        Rights(both=("gateway:*",), scripts=(cleanup.TRIM,)),
    ),
)


class CoordinatorLedger(Overview, Models, Register, Letters, MemoryUse):
    """The coordinators' view of the run, and their changes to it."""

    async def prepare(self, sites: Iterable[str] = ()) -> None:
        """Register the sites, and load every script for all users, as trainers may load none."""
        await load_all(self._client)
        if names := sorted(sites):
            await self._client.call("SADD", self.keys.sites, *names)

    # tasks

    def dispatch(self, entry: Entry, trigger: Trigger) -> Pending[str]:
        """Send an open task to its device's owner, or else to the pool.

        Returns 'sent', 'ended' (the task has ended) or 'repeated' (the same trigger again).
        """
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "task": trigger.task,
            "device": trigger.device,
        }
        return self._pending(
            _DISPATCH, word, packed(about), trigger.assignment(), stream=self.keys.triggers
        )

    def take_up(
        self, site: str, entry: Entry, trigger: Trigger, *, anarchic: bool, rate: int, limit: int
    ) -> Pending[str]:
        """Open a task for a site's trigger of its own device.

        Returns 'sent', or a reason for refusal: 'unasked' (the run's policy doesn't let devices
        trigger tasks), 'foreign' (the device is not the site's or not in the run), 'limited' (the
        site exceeds ``rate`` triggers per second, or ``limit`` tasks are open), 'busy' (the device
        has a task, or an update in a private batch), 'quarantined' (the device is), 'spent' (it has
        no privacy budget left), 'resting' (it is, after failures), 'finished' (the run has
        finished) or 'repeated' (the trigger was taken before).
        """
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "task": trigger.task,
            "device": trigger.device,
            "site": site,
            "rate": rate,
            "limit": limit,
            "anarchic": anarchic,
        }
        return self._pending(
            _DISPATCH,
            word,
            packed(about),
            trigger.assignment(),
            trigger.encode(),
            stream=self.keys.inbox(site),
        )

    def close_round(self, entry: Entry, closing: CloseRound) -> Pending[str]:
        """Give up a round's unanswered tasks, and queue the end of the round for the updater."""
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "tasks": closing.tasks,
            "trainers": TRAINERS,
            "why": reasons.ROUND_OVER,
        }
        end = RoundEnd(version=closing.version, why=closing.why, drops=closing.drops).encode()
        return self._pending(_CLOSE_ROUND, word, packed(about), end, packed(self._event()))

    def withdraw(self, entry: Entry, wish: Withdraw) -> Pending[str]:
        """Give up the unanswered tasks in ``wish``; their trainers lose the leases."""
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "tasks": wish.tasks,
            "trainers": TRAINERS,
            "why": wish.why,
        }
        return self._pending(_WITHDRAW, word, packed(about), packed(self._event()))

    async def settle_unserved(self, lease_ms: int) -> int:
        """Reassign or give up the pool's tasks while no live trainer serves the pool.

        A task goes to its device's owner if there is one. Returns the number of tasks given up.
        """
        event = packed(self._event())
        return int(await self._run(_SETTLE_UNSERVED, TRAINERS, lease_ms, event))

    async def find_lost(
        self, seen: Mapping[str, str], cursor: bytes = b"0"
    ) -> tuple[int, dict[str, str], bytes]:
        """Give up lost open tasks, as :func:`fedstream.broker.cleanup.find_lost` does."""
        event = packed(self._event())
        return await cleanup.find_lost(self._client, self.keys, event, seen, cursor)

    async def leases(self, lease_ms: int, owners: Iterable[str]) -> tuple[int, list[str]]:
        """Count the tasks under a live lease, and find the streams with an expired lease.

        Covers the pool's stream and the streams of ``owners``.
        """
        leased, lapsed = 0, list[str]()
        for some in cleanup.in_parts([self.keys.tasks, *map(self.keys.tasks_of, sorted(owners))]):
            more, over = await self._run(_MEASURE, TRAINERS, lease_ms, rest=some)
            leased += more
            lapsed += [some[at] for at in over]
        return leased, lapsed

    # messages of sites

    def admit(
        self,
        entry: Entry,
        answer: Upload | GiveUp,
        *,
        size_limit: int,
        site: str = POOL,
        trusted: bool = True,
        most_steps: int = 1,
        sizes: tuple[int, int] | None = None,
        unfit: str = "",
    ) -> Pending[tuple[str, str]]:
        """Admit an answer to the queue, or refuse it.

        Returns ('admitted' | 'refused' | ..., reason).

        ``sizes``: the fewest and the most bytes of an update in this format and layout; None: the
        model's bytes. ``unfit``: the reason to refuse the format; '' for none.

        ``site``: the site of the inbox. For untrusted sites, staleness counts from the newest
        version at hand-out. An untrusted update's steps count as the steps that the task asked for;
        if the task gave epochs or a time, the claimed steps are bounded, from one per epoch to
        ``most_steps``.
        """
        about: dict[str, object] = {
            "group": COORDINATORS,
            "entry": entry.id,
            "site": site,
            "trusted": trusted,
            "task": answer.task,
            "attempt": answer.attempt,
            "device": answer.device,
        }
        event = self._event(device=answer.device)
        name = member(site, answer.trainer)
        if isinstance(answer, GiveUp):
            about["give_up"] = reason = reasons.of_giving_up(answer.reason)
            about["trainer_fails"] = site == POOL and answer.failing > 0
            if reason != answer.reason:
                event["text"] = answer.reason
            said = answer.encode()
        else:
            said = answer.encode(
                site=site,
                handed=None,
                claimed=None,
                trainer=name,
                steps=answer.steps if trusted else None,
            )
            about |= {
                "tau": answer.tau,
                "base": answer.base,
                "layout": answer.layout,
                "size": answer.size,
                "size_limit": size_limit,
                "unfit": unfit,
                "format": answer.format,
                "sealed": bool(answer.sealed),
                "steps": answer.steps,
                "most_steps": most_steps,
            }
            if sizes is not None:
                about["least"], about["most"] = sizes
            shortest, longest, chunks = blobs.SHORTEST, blobs.LONGEST, answer.chunks
            if chunks is None:
                shortest, longest, chunks = blobs.CHUNK, blobs.CHUNK, blobs.chunks_of(answer.size)
            about |= {"chunks": chunks, "shortest": shortest, "longest": longest}
        blob = f"{site}/{answer.task}.{answer.attempt}"
        return self._pending(
            _ADMIT,
            verdict,
            packed(about),
            said,
            packed(event),
            rest=[self.keys.update(blob), self.keys.queued(blob)],
            stream=self.keys.inbox(site),
        )

    def admit_measured(
        self, site: str, entry: Entry, answer: Measured, *, trusted: bool
    ) -> Pending[tuple[str, str]]:
        """Admit a device's answer to an evaluation.

        Returns ('evaluated', the counted outcome), ('stray', reason) or ('repeated', '').
        """
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "site": site,
            "task": answer.task,
            "attempt": answer.attempt,
            "device": answer.device,
            "version": str(answer.version),
            "base": answer.base,
            "outcome": answer.outcome,
        }
        return self._pending(
            _ADMIT_MEASURED,
            verdict,
            packed(about),
            answer.encode(site=site, trusted=trusted, trainer=member(site, answer.trainer)),
            packed(self._event(device=answer.device)),
            stream=self.keys.inbox(site),
        )

    def hear(
        self,
        site: str,
        entry: Entry,
        said: Presence,
        *,
        denied: Sequence[int] = (),
        most: int,
        rate: int,
    ) -> Pending[str]:
        """Record a trainer's announcement; return 'heard', 'leaves', 'repeated' or 'over'.

        ``denied``: those announced devices that the site may not own. 'over': the site has ``most``
        other trainers already, or has announced ``rate`` trainers and devices in this second.
        """
        name = member(site, said.trainer)
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "site": site,
            "name": name,
            "owns": said.owns,
            "denied": denied,
            "leaves": said.leaves,
            "most": most,
            "rate": rate,
            "pool": TRAINERS,
            "digest": said.digest,
            "concurrent": said.concurrent,
        }
        if said.digest is None:
            del about["digest"]
        kept = {
            "host": said.host,
            "pid": said.pid,
            "owns": said.owns,
            "device": said.device,
            "answers": said.answers,
            "failing": said.failing,
        }
        joined = self._event(what="trainer", text=f"{name} joined")
        return self._pending(
            _ANNOUNCE,
            word,
            packed(about),
            packed(kept),
            packed(joined),
            packed(self._event(what="trainer")),
            stream=self.keys.inbox(site),
            owned=self.keys.owned(name),
        )

    def beat(self, site: str, entry: Entry, said: Heartbeat, *, rate: int) -> Pending[str]:
        """Record a trainer's heartbeat; return 'heard', 'repeated', 'over', or 'unknown'.

        'over': the site has announced ``rate`` trainers and devices in this second. 'unknown': the
        heartbeat's digest is not that of the registered list of devices; the trainer will send its
        list.
        """
        name = member(site, said.trainer)
        about = {
            "group": COORDINATORS,
            "entry": entry.id,
            "site": site,
            "name": name,
            "owns": said.owns,
            "rate": rate,
        }
        kept = {"device": said.device, "answers": said.answers, "failing": said.failing}
        return self._pending(
            _BEAT,
            word,
            packed(about),
            packed(kept),
            stream=self.keys.inbox(site),
            owned=self.keys.owned(name),
        )

    def relay(
        self, site: str, entry: Entry, event: Event | None, *, most: int, why: str
    ) -> Pending[str]:
        """Relay a site's event to observers; return 'told', 'dropped' or 'repeated'.

        ``event``: None for an invalid event, which is dropped. ``most``: the site's events per
        second. ``why``: the reason under which dropped events are counted.
        """
        return self._pending(
            _RELAY,
            word,
            COORDINATORS,
            entry.id,
            site,
            event.encode() if event else "",
            most,
            why,
            stream=self.keys.inbox(site),
        )

    # departed trainers and old dead letters

    async def owning(self, cursor: bytes = b"0") -> tuple[set[str], bytes]:
        """Find the registered trainers with devices, and owners in a part of the owners' register.

        An owner that isn't a registered trainer is rare, so the owners' register, which may be
        large, is read in parts: ``cursor`` begins with ``b"0"`` and is returned for the next call.
        """
        alive, serve_all, (cursor, flat) = await self._client.pipeline(
            [
                ("ZRANGE", self.keys.alive, 0, -1),
                ("SMEMBERS", self.keys.pool),
                ("HSCAN", self.keys.owners, cursor, "COUNT", _OWNERS),
            ]
        )
        found = set[str]()
        for name in {*alive}.difference(serve_all).union(flat[1::2]):
            with suppress(UnicodeDecodeError):
                found.add(name.decode())
        return found, cursor

    async def unheard(self, owners: Iterable[str]) -> list[str]:
        """Find the owners that are not registered as trainers."""
        unheard: list[str] = []
        for some in cleanup.in_parts(sorted(owners)):
            scores = await self._client.call("ZMSCORE", self.keys.alive, *some)
            unheard += [owner for owner, at in zip(some, scores, strict=True) if at is None]
        return unheard

    async def leave(self, name: bytes, *, silent_s: float = 0.0) -> int | None:
        """Deregister a trainer that was silent for ``silent_s`` or has signed off.

        Returns the number of its devices' waiting tasks that were given up; None if the trainer was
        heard from since, or is neither registered nor an owner of devices.
        """
        shown = name.decode(errors="replace")
        left = self._event(what="trainer", text=f"{shown} left")
        lost = self._event(what="trainer", text=f"{shown} was not heard from for {silent_s:g} s")
        given_up = await self._run(
            _LEAVE,
            name,
            silent_s,
            packed(left),
            packed(lost),
            packed(self._event()),
            owned=self.keys.owned(shown),
        )
        return None if given_up < 0 else int(given_up)

    async def age_letters(self, days: float) -> int:
        """Delete dead letters older than ``days``; return their number."""
        return int(await self._run(_AGE_LETTERS, round(days * 86_400)))
