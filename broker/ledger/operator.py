"""What operators do in Redis: they look, retry dead letters, and delete a run."""

from __future__ import annotations

from collections.abc import Sequence

from fedstream.broker import blobs, lease, streams
from fedstream.broker.commands import Command
from fedstream.broker.ledger import scheduler, trainer
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.ledger.plumbing import packed, verdict
from fedstream.broker.ledger.reading import LOOK, Models, Register, Watch
from fedstream.broker.messages import QUARANTINED, SetQuarantine, Trigger
from fedstream.broker.scripts import Script

MAY = Script("may")  # asked by `doctor`
_RETRY = Script("retry")
_SET_QUARANTINE = Script("set_quarantine")

# For status, top and doctor, for repairs (dead) and for purge. `replay --redis` acts as scheduler
# and trainer.
RIGHTS = Rights(
    both=("*",),
    commands=(
        "script|kill", "function|kill", "client|kill",
        "scan", "exists", "type", "ttl", "pttl", "time", "info", "dbsize", "config|get",
        "acl|whoami", "acl|dryrun", "acl|getuser", "acl|log", "memory|usage", "client|list",
        "slowlog|get",
        "get", "hget", "hgetall", "hlen", "hmget", "hkeys", "hvals", "zrange", "zcard",
        "zscore", "zrangebyscore", "xlen", "xrange", "xrevrange", "xread", "xpending",
        "xinfo|stream", "xinfo|groups", "xinfo|consumers", "xadd", "xdel", "xgroup|create",
        "xreadgroup", "unlink", "hincrby", *blobs.WRITES,
        "rename", "zlexcount",  # by hand: bring back what was put aside, count a site's letters
    ),
    scripts=(
        LOOK, MAY, _RETRY, _SET_QUARANTINE,
        *lease.SCRIPTS, scheduler.TRIGGER, streams.CLAIM, trainer.FINISH,
    ),
)  # fmt: skip


class OperatorLedger(Watch, Models, Register):
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
            "letter": letter, "before": before, "task": trigger.task, "device": trigger.device,
        }  # fmt: skip
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
            "devices": list(wanted.devices), "release": wanted.release, "most": QUARANTINED,
        }  # fmt: skip
        return verdict(await self._run(_SET_QUARANTINE, packed(about), wanted.encode()))

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
