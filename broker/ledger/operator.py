"""The operators' operations on Redis: inspect, retry dead letters, admit devices, delete a run."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence

from fedstream.broker import blobs, lease, streams
from fedstream.broker.commands import Command
from fedstream.broker.ledger import scheduler, trainer
from fedstream.broker.ledger.base import FINISH_RUN, Finishing, Rights, packed, verdict
from fedstream.broker.ledger.gateway import Registration
from fedstream.broker.ledger.queries import LOOK, Models, Register, Watch, device_of
from fedstream.broker.scripts import Script
from fedstream.core.messages import QUARANTINED, SetQuarantine, Trigger

MAY = Script("may")  # for `doctor`
_RETRY = Script("retry")
_SET_QUARANTINE = Script("set_quarantine")
_INVITE = Script("invite")
_SET_ACCESS = Script("set_access")

# For status, top, doctor, dead, devices and purge. `replay --redis` acts as scheduler and trainer.
RIGHTS = Rights(
    both=("*",),
    commands=(
        "script|kill",
        "function|kill",
        "client|kill",
        "scan",
        "exists",
        "type",
        "ttl",
        "pttl",
        "info",
        "dbsize",
        "config|get",
        "acl|whoami",
        "acl|dryrun",
        "acl|getuser",
        "acl|log",
        "memory|usage",
        "client|list",
        "slowlog|get",
        "get",
        "hget",
        "hgetall",
        "hlen",
        "hmget",
        "hkeys",
        "hscan",
        "hvals",
        "zrange",
        "zcard",
        "zscore",
        "zrangebyscore",
        "xlen",
        "xrange",
        "xrevrange",
        "xread",
        "xpending",
        "xinfo|stream",
        "xinfo|groups",
        "xinfo|consumers",
        "xadd",
        "xdel",
        "xgroup|create",
        "xreadgroup",
        "unlink",
        "hincrby",
        *blobs.WRITES,
        "rename",
        "zlexcount",  # for manual repairs: restore quarantined keys, count a site's letters
    ),
    scripts=(
        LOOK,
        MAY,
        FINISH_RUN,
        _RETRY,
        _SET_QUARANTINE,
        _INVITE,
        _SET_ACCESS,
        *lease.SCRIPTS,
        scheduler.TRIGGER,
        streams.CLAIM,
        trainer.FINISH,
    ),
)


class OperatorLedger(Watch, Models, Register, Finishing):
    """The operators' view of the run, and their changes to it."""

    async def retry(self, letter: str, before: str, trigger: Trigger) -> tuple[str, str]:
        """Retry a dead letter as the task in ``trigger``, and delete the letter.

        ``before``: the letter's task. Returns a verdict and a detail. 'sent': done. All other
        verdicts change nothing: 'gone' (there is no such letter), 'finished' (the run has
        finished), 'open' (the letter's task is still open), 'retried' (the task was retried before;
        the detail is the new task), 'ended' (the task ended otherwise than as dead; the detail is
        the outcome), 'forgotten' (Redis no longer has the task's end), 'round' (the task's round is
        over), 'busy' (the device has a task; the detail is that task), 'held' (an update of the
        device is buffered).
        """
        about: dict[str, object] = {
            "letter": letter,
            "before": before,
            "task": trigger.task,
            "device": trigger.device,
        }
        if trigger.version is not None:
            about["version"] = trigger.version
        return verdict(await self._run(_RETRY, packed(about), trigger.encode()))

    async def set_quarantine(self, wanted: SetQuarantine) -> tuple[str, str]:
        """Queue a control entry for the updater. Returns a verdict and a detail.

        'queued': done; the detail is the entry's id. All other verdicts change nothing: 'none'
        (there is no such run), 'finished' (the run has finished), 'unknown' (the detail is a device
        that the run lacks), 'full' (the detail is the resulting number of quarantined devices,
        above ``QUARANTINED``).
        """
        about = {
            "devices": list(wanted.devices),
            "release": wanted.release,
            "most": QUARANTINED,
        }
        return verdict(await self._run(_SET_QUARANTINE, packed(about), wanted.encode()))

    async def invite(
        self, site: str, invites: Mapping[int, str], *, seconds: float
    ) -> tuple[str, str]:
        """Invite devices to enrol at a site's gateway, all or none. Returns a verdict and a detail.

        ``invites``: digest of the invite by device. 'invited': done; the detail is the expiry in ms
        since 1970. All other verdicts change nothing: 'none' (there is no such run), 'finished'
        (the run has finished), 'unknown' or 'revoked' (the device in the detail is).
        """
        about = {
            "devices": list(invites),
            "digests": list(invites.values()),
            "holds_ms": round(seconds * 1000),
        }
        return verdict(
            await self._run(
                _INVITE,
                packed(about),
                invites=self.keys.invites(site),
                revoked=self.keys.revoked(site),
            )
        )

    async def set_access(
        self, site: str, devices: Sequence[int], *, admit: bool
    ) -> tuple[str, list[int]]:
        """Revoke devices at a site's gateway, or admit them again.

        Returns a verdict and devices: 'set' (the changed devices), 'unknown' (devices that the run
        lacks) or 'none' (no such run).
        """
        about = {"devices": list(devices), "admit": admit, "stamp": secrets.token_hex(16)}
        reply = await self._run(
            _SET_ACCESS,
            packed(about),
            invites=self.keys.invites(site),
            revoked=self.keys.revoked(site),
            changed=self.keys.enrolments(site),
        )
        what, changed = verdict(reply)
        return what, [int(device) for device in changed.split()]

    async def access(
        self, site: str
    ) -> tuple[dict[int, Registration], dict[int, float], dict[int, float]]:
        """Read a gateway's registrations, expiries of open invites, and times of revocation.

        Times are in seconds since 1970, by Redis's clock. Devices that change meanwhile may be
        missing; foreign fields are ignored.
        """
        enrolled, invites, revoked = [
            {
                device: value
                async for name, value in self._fields(key)
                if (device := device_of(name)) is not None
            }
            for key in (self.keys.enrolled(site), self.keys.invites(site), self.keys.revoked(site))
        ]
        return (
            {device: Registration.parsed(value) for device, value in enrolled.items()},
            {device: int(value.split()[1]) / 1000 for device, value in invites.items()},
            {device: int(value) / 1000 for device, value in revoked.items()},
        )

    async def _fields(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        cursor = b"0"
        while True:
            cursor, flat = await self._client.call("HSCAN", key, cursor, "COUNT", 1000)
            for name, value in zip(flat[::2], flat[1::2], strict=True):
                yield name, value
            if cursor == b"0":
                return

    async def ends(self, tasks: Sequence[str]) -> list[str]:
        """Look up the state of tasks: 'open', an outcome, or '' if forgotten.

        'retried': the dead task was issued again as another task.
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

    async def purge(self) -> int:
        """Delete every key of the run at once; return their number.

        To running services, the deletion looks like an emptied Redis, and they can repair that.
        After a deletion key by key, their counts would stay wrong for ever. New keys written
        between the scan and the deletion are blobs, which expire.
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
