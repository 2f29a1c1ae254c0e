"""That the keys of a run hold what they should, and that no open task is forgotten.

Users by ACL leave a trainer no way to spoil what others rely on. Where something foreign stands
nevertheless, it is put aside where that costs nothing that can't be said again (registers, inboxes,
tasks, which are given up and triggered anew), and named where it would: the run's own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from broker.client import Client
from broker.keys import TRAINERS, Keys
from broker.scripts import Script

_MEND = Script("mend")
_FIND = Script("find_lost")
_ASIDE_MS = 7 * 24 * 3600 * 1000  # what was put aside stays there for an operator to look at

_MENDED = {
    "triggers": "stream", "tasks": "stream", "events": "stream",
    "alive": "zset", "trainers": "hash", "owners": "hash", "rates": "hash", "sites": "set",
}  # fmt: skip
_NAMED = {
    "run": "hash", "head": "hash", "kept": "zset", "lineage": "hash", "open": "hash",
    "admitted": "hash", "ended": "zset", "counts": "hash", "queue": "stream", "models": "stream",
    "dead": "stream",
}  # fmt: skip


async def mend(
    client: Client, keys: Keys, *, inboxes: Iterable[str], owners: Iterable[str], most: int
) -> list[tuple[str, str]]:
    """Puts aside what has no business under a key: [(key, what it held)].

    ``inboxes``: the sites; ``owners``: trainers with a stream of tasks; ``most``: entries of an
    inbox: one with more is deleted, nobody could read them all.
    """
    wanted = {getattr(keys, name): (kind, 0) for name, kind in _MENDED.items()}
    wanted |= {keys.inbox(site): ("stream", most) for site in inboxes}
    wanted |= {keys.tasks_of(owner): ("stream", 0) for owner in owners}
    found = await _MEND(
        client, keys.__dict__, _ASIDE_MS, *(part for pair in wanted.values() for part in pair),
        rest=[name for key in wanted for name in (key, keys.quarantine(key))],
    )  # fmt: skip
    return [(key.decode(), why.decode()) for key, why in found]


async def foreign(client: Client, keys: Keys) -> list[tuple[str, str]]:
    """Keys of the run's state that hold another type than theirs: [(key, what it holds)]."""
    names = [getattr(keys, name) for name in _NAMED]
    kinds = await client.pipeline([("TYPE", name) for name in names])
    return [
        (name, f"it holds a {kind.decode()}, not a {wanted}")
        for name, kind, wanted in zip(names, kinds, _NAMED.values(), strict=True)
        if kind.decode() not in (wanted, "none")
    ]


async def find_lost(
    client: Client, keys: Keys, event: bytes, seen: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """Gives open tasks up whose entry is gone and whose answer is not on its way.

    How many those were, and what the next search is to be told as ``seen``: a task is lost only if
    it was found so before, and all was read since that was said by then.
    """
    arguments: list[Any] = [part for pair in seen.items() for part in pair]
    lost, flat = await _FIND(client, keys.__dict__, TRAINERS, event, *arguments)
    names = [part.decode() for part in flat]
    return int(lost), dict(zip(names[::2], names[1::2], strict=True))
