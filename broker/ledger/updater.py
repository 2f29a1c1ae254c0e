"""The updater's operations on Redis: publish versions and end tasks, in one step each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedstream.broker import blobs, lease
from fedstream.broker.blobs import chunks_of
from fedstream.broker.cleanup import ended_unlike
from fedstream.broker.commands import Command
from fedstream.broker.ledger.base import Rights, packed
from fedstream.broker.ledger.dead_letters import BURY, Letters
from fedstream.broker.ledger.queries import LOOK, LOOKED_AT, MemoryUse, Models, Overview
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Look
from fedstream.core.errors import BadMessage, Fenced, NoScript
from fedstream.core.messages import OUTCOMES, Upload, Version
from fedstream.core.records import (
    NO_QUARANTINES,
    Commit,
    Committed,
    End,
    PrivacyLoss,
    Quarantines,
    Run,
    StepSize,
    flattened,
    mapping,
)

_COMMIT = Script("commit")
_CREATE = Script("create")
_HAND_OUT = Script("hand_out")
_RETIRE = Script("retire")

RIGHTS = Rights(
    both=(
        "leader:updater",
        "tokens",
        "run",
        "head",
        "kept",
        "best",
        "lineage",
        "model:*",
        "models",
        "queue",
        "open",
        "admitted",
        "ended",
        "counts",
        "events",
        "changes",
        "failing",
        "queued:*",
        "device:*",
        "rates",
        "letters",
        "sealing",
    ),
    reads=(*LOOKED_AT, "evaluation"),
    writes=("dead",),
    commands=(
        "xread",
        "xrange",
        "xlen",
        "xadd",
        "set",
        "hget",
        "hgetall",
        "hkeys",
        "hlen",
        "hstrlen",
        "persist",
        "zrange",
        "unlink",
        "info",
        *blobs.READS,
        *blobs.WRITES,
    ),
    scripts=(*lease.SCRIPTS, LOOK, BURY, _COMMIT, _CREATE, _HAND_OUT, _RETIRE),
)


class UpdaterLedger(Overview, Models, Letters, MemoryUse):
    """The updater's view of the run, and its changes to it."""

    async def awaits(self, upload: Upload) -> bool:
        """Whether the update was admitted and its task has not ended."""
        admitted = await self._client.call("HGET", self.keys.admitted, upload.task)
        return bool(admitted == upload.attempt.encode())

    async def ended(self) -> list[Upload]:
        """Read the queued updates whose tasks have ended, and that only remain to be deleted."""
        rows, opened = await self._client.pipeline(
            [("XRANGE", self.keys.queue, "-", "+"), ("HKEYS", self.keys.open)]
        )
        found = []
        for _, fields in rows:
            with suppress(BadMessage):  # the updater reports it when it reads the queue
                found.append(Upload.decode(fields[1]))
        return [upload for upload in found if upload.task.encode() not in set(opened)]

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
        quarantines: Quarantines = NO_QUARANTINES,
        privacy: PrivacyLoss | None = None,
        step: StepSize | None = None,
    ) -> Committed:
        """Create the run with its first version, or restore its newest version in Redis.

        Returns 'created', 'unwritten' (the model's blob is missing), 'lost' (the token is missing)
        or 'moved' (Redis fell back again meanwhile, or this request is late). ``counts``: the run's
        counts, for a Redis that was emptied. ``journalled``: the counts of the ends in the journal.
        ``done``: gives the journal's end of a task, for a Redis that fell back: a task that is open
        in that Redis, or ended differently since, gets this end. Open tasks that Redis no longer
        knows are given up. A run that is finished in Redis stays finished, unless ``run`` has more
        versions. Raises Fenced.
        """
        about: dict[str, Any] = {
            "token": token,
            "run": run.record(),
            "versions": run.versions,
            "counts": dict(counts or {}),
            "outcomes": OUTCOMES,
            "journalled": packed(dict(journalled or {})),
            "head": self._head(version, held, 0, mean_staleness, privacy, step),
        } | _published(version)
        if quarantines.taken:
            about["quarantines"] = quarantines.packed()
        if done is not None:
            about["look"] = secrets.token_hex(8)
            unlike = await ended_unlike(self._client, self.keys, done, about["look"])
            about["ends"] = [self._ending(end) for end in unlike]
        blob = self.keys.model(version.blob)
        reply = await self._run(_CREATE, packed(about), version.encode(), blob=blob)
        return self._committed(reply, token)

    async def commit(
        self,
        token: str,
        commit: Commit,
        *,
        ahead: Sequence[Command] = (),
        look: Look | None = None,
    ) -> Committed:
        """Publish versions, end tasks and delete queue entries in one step, or change nothing.

        Returns 'done' (also for a repetition after a lost reply), 'lost' (Redis was emptied),
        'behind:<version>' (Redis's head is neither the first version's parent nor one of the
        versions, or is older than `at`, or Redis has forgotten committed ends) or 'unwritten' (the
        last version's blob is missing; only the last version has a blob). Raises Fenced.

        ``ahead``: commands from :func:`fedstream.broker.blobs.prepare` that write the last
        version's blob. ``look``: a read that is sent with the commit, after it; its reply is
        awaited later.
        """
        versions = commit.versions
        about: dict[str, Any] = {
            "token": token,
            "ends": [self._ending(end) for end in commit.ends],
            "entries": list(commit.entries),
            "retired": list(commit.retired),
            "time": repr(self.now()),
            "at": commit.at,
            "head": self._head(
                versions[-1] if versions else None,
                commit.held,
                commit.retained,
                commit.mean_staleness,
                commit.privacy,
                commit.step,
            ),
            "journalled": packed(dict(commit.journalled)),
            "before": commit.before,
            "versions": [_published(version) for version in versions],
            "events": [event.encode() for event in commit.events],
        }
        if commit.finish is not None:
            about["finish"] = commit.finish
        if commit.quarantines is not None:
            about["quarantines"] = commit.quarantines.packed()
        if commit.quarantines_before:
            about["quarantines_before"] = commit.quarantines_before
        arguments = (packed(about), *(version.encode() for version in versions))
        rest = [
            *(self.keys.model(version.blob) for version in versions[-1:]),
            *(self.keys.queued(blob) for blob in commit.updates),
            *(self.keys.model(blob) for blob in commit.retired),
        ]
        if look is not None:
            reply = await self._looking(look, arguments, rest, ahead)
            if reply is not None:
                return self._committed(reply, token)
            ahead = ()  # executed with the failed script
        reply = await self._run(_COMMIT, *arguments, rest=rest, ahead=ahead)
        return self._committed(reply, token)

    async def _looking(
        self,
        look: Look,
        arguments: Sequence[bytes],
        rest: Sequence[str],
        ahead: Sequence[Command],
    ) -> Any:
        """Run the commit's script, then the look; None if Redis does not have the script."""
        command = _COMMIT.command(self.keys.__dict__, *arguments, rest=rest)
        try:
            started = await self._client.start([*ahead, command, look.command], wait_s=look.wait_s)
        except NoScript:
            return None
        look.begun(started)
        return started.replies[-1]

    async def hand_out(
        self, token: str, device: int, digest: str, size: int, *, ahead: Sequence[Command] = ()
    ) -> str:
        """Let trainers read the device's staged state in place of the state before.

        Returns 'done', 'lost' (the token is missing) or 'unwritten' (nothing is staged, perhaps
        because an earlier call has handed it out). Raises Fenced. ``ahead``: commands from
        :func:`fedstream.broker.blobs.prepare` that write the staged state.
        """
        reply = await self._run(
            _HAND_OUT,
            token,
            size,
            digest,
            chunks_of(size),
            ahead=ahead,
            staged=self.keys.staged(device, digest),
            device=self.keys.device(device),
        )
        return self._unless_fenced(reply, token)

    async def retire(self, token: str, blobs: Sequence[str]) -> str:
        """Delete models early, even out of memory, and even the best version's.

        Returns 'done' or 'lost'. Raises Fenced.
        """
        rest = [self.keys.model(blob) for blob in blobs]
        return self._unless_fenced(await self._run(_RETIRE, token, *blobs, rest=rest), token)

    def _ending(self, end: End) -> tuple[str, str, str, str, dict[str, Any]]:
        event = self._event(
            device=end.device, version=end.version, staleness=end.staleness, weight=end.weight
        )
        return end.task, end.attempt, end.outcome, end.reason, event

    def _committed(self, reply: Any, token: str) -> Committed:
        if not isinstance(reply, list):
            return Committed(self._unless_fenced(reply, token))
        what, state, flat, *spared = reply
        counts = {name: int(value) for name, value in mapping(flat).items()}
        kept = frozenset(blob.decode() for some in spared for blob in some)
        return Committed(what.decode(), counts, state == b"finished", kept)

    def _unless_fenced(self, reply: bytes, token: str) -> str:
        if reply == b"fenced":
            raise Fenced(f"another updater has taken over (mine is token {token})")
        return reply.decode()

    def _head(
        self,
        version: Version | None,
        held: Sequence[int],
        retained: int,
        staleness: float,
        privacy: PrivacyLoss | None,
        step: StepSize | None,
    ) -> list[str | bytes]:
        values: dict[str, object] = {
            "held": " ".join(map(str, held)),
            "retained": retained,
            "mean_staleness": repr(staleness),
        }
        if privacy is not None:
            values["privacy"] = privacy.packed()
        if step is not None:
            values["step"] = packed(vars(step))
        if version is not None:
            values |= {
                "version": version.version,
                "digest": version.digest,
                "blob": version.blob,
                "time": repr(version.time),
                "epoch": version.epoch,
                "chunks": version.chunks,
            }
            if version.encoded is not None:
                # With the blob's name, as a release that knows no formats won't replace this field.
                values["encoded"] = f"{version.blob} {version.encoded.text}"
        return flattened(values)


def _published(version: Version) -> dict[str, Any]:
    """The description of a version to publish, as an argument of the scripts."""
    about: dict[str, Any] = {
        "version": version.version,
        "digest": version.digest,
        "blob": version.blob,
        "size": str(version.size),
        "chunks": version.chunks,
    }
    if version.encoded is not None:
        about |= {"encoded": version.encoded.text, "given": version.encoded.digest}
    return about
