"""What operators do in Redis: they look, retry dead letters, admit devices, and delete a run."""

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

MAY = Script("may")  # asked by `doctor`
_RETRY = Script("retry")
_SET_QUARANTINE = Script("set_quarantine")
_INVITE = Script("invite")
_SET_ACCESS = Script("set_access")

# For status, top and doctor, for repairs (dead) and for purge. `replay --redis` acts as scheduler
# and trainer.
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
        "zlexcount",  # by hand: bring back what was put aside, count a site's letters
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
    """The run as operators and their commands see and change it."""

    async def retry(self, letter: str, before: str, trigger: Trigger) -> tuple[str, str]:
        """Retry a dead letter's work as the task in ``trigger``, and delete the letter.

        ``before``: the task that the letter is about. Returns a verdict and a detail: 'sent', or
        else nothing was done: 'gone' (no such letter), 'finished' (the run), 'open' (the task
        still is), 'retried' (already; the detail is the new task), 'ended' (not as dead; the detail
        is the outcome), 'forgotten' (how the task ended), 'round' (it is over), 'busy' (the device;
        the detail is its task), 'held' (an update of the device is buffered).
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

        'queued' (the detail is the entry's id), or else nothing was done: 'none' (no such run),
        'finished' (the run), 'unknown' (the detail is a device that the run lacks), 'full' (the
        detail is how many devices would be in quarantine, more than ``QUARANTINED``).
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

        ``invites``: the digest of each device's. 'invited' (the detail is until when, in ms since
        1970), or else nothing was done: 'none' (no such run), 'finished' (the run), 'unknown' or
        'revoked' (the detail is that device).
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
        """Have a site's gateway turn devices away, or admit them again.

        Returns a verdict and devices: 'set' (those that were not so already), 'unknown' (that the
        run lacks) or 'none' (no such run).
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
        """A gateway's devices: registrations, until when others are invited, since when revoked.

        In seconds since 1970, by Redis's clock. Devices that change meanwhile may be missing;
        foreign fields are left out.
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
