"""That the keys of a run hold what they should, that no open task is forgotten, or ended otherwise.

Users by ACL leave a trainer no way to spoil what others rely on. Where something foreign stands
nevertheless, it is put aside where that costs nothing that can't be said again (registers, inboxes,
tasks, which are given up and triggered anew), and named where it would: the run's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fedstream.broker.client import Client, Command
from fedstream.broker.errors import Foreign
from fedstream.broker.keys import POOL, TRAINERS, Keys
from fedstream.broker.records import End
from fedstream.broker.scripts import Script

T = TypeVar("T")

_MEND = Script("mend")
_SCAN = Script("scan")
_DROP = Script("drop_copies")
_FIND = Script("find_lost")
_OF_UPDATER = ("applied", "buffered")  # coordinators end no task so
_ASIDE_MS = 7 * 24 * 3600 * 1000  # what was put aside stays there for an operator to look at

_AT_ONCE = 500  # keys that one script looks at: Redis does nothing else meanwhile

_OF_SITES = ("update:", "workspace:")  # what sites write and nobody deletes if they forget it
_WORKSPACES = "workspace:"
_COPIES = "control:"  # what sites were given of what a strategy remembers of their devices
_FORGOTTEN_MS = 600_000  # what has no expiry is gone after this
_LONGEST_MS = 24 * 3600 * 1000  # an expiry further off is as good as none
_STEP = 1000  # keys that one step looks at: a site may write any number

_MENDED = {
    "triggers": "stream", "tasks": "stream", "events": "stream",
    "alive": "zset", "trainers": "hash", "owners": "hash", "rates": "hash", "sites": "set",
    "pool": "set", "letters": "zset",
}  # fmt: skip
_NAMED = {
    "run": "hash", "head": "hash", "kept": "zset", "lineage": "hash", "open": "hash",
    "admitted": "hash", "ended": "zset", "counts": "hash", "queue": "stream", "models": "stream",
    "dead": "stream",
}  # fmt: skip


def in_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Any number of them, as many at a time as one exchange may be about."""
    for at in range(0, len(items), _AT_ONCE):
        yield items[at : at + _AT_ONCE]


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
    found: list[tuple[str, str]] = []
    for some in in_parts(list(wanted)):
        about = (part for key in some for part in wanted[key])
        mended = await _MEND(
            client, keys.__dict__, _ASIDE_MS, *about,
            rest=[name for key in some for name in (key, keys.quarantine(key))],
        )  # fmt: skip
        found += [(key.decode(), why.decode()) for key, why in mended]
    return found


async def foreign(client: Client, keys: Keys) -> list[tuple[str, str]]:
    """Keys of the run's state that hold another type than theirs: [(key, what it holds)]."""
    names = [getattr(keys, name) for name in _NAMED]
    kinds = await client.pipeline([("TYPE", name) for name in names])
    return [
        (name, f"it holds a {kind.decode()}, not a {wanted}")
        for name, kind, wanted in zip(names, kinds, _NAMED.values(), strict=True)
        if kind.decode() not in (wanted, "none")
    ]


async def some_keys(client: Client, keys: Keys, cursor: bytes) -> tuple[bytes, list[bytes]]:
    """The run's keys that one step through Redis's comes upon, and where that step ended.

    ``cursor``: where the one before it ended, ``b"0"`` at first and behind the last. Keys whose
    names are longer than any of ours are let go.
    """
    cursor, found = await _SCAN(client, keys.__dict__, cursor, keys.prefix + "*", _STEP)
    return cursor, found


async def expire_forgotten(client: Client, keys: Keys, some: Iterable[bytes]) -> list[str]:
    """Gives an expiry to what sites wrote without one: those of ``some`` keys that it changed.

    Trainers of ours set one before all else, but a site may write what it likes. What is admitted
    meanwhile has another key by then, and is not made to expire.
    """
    ours = tuple((keys.prefix + kind).encode() for kind in _OF_SITES)
    names = [name for name in some if name.startswith(ours)]
    lives = await client.pipeline([("PTTL", name) for name in names]) if names else []
    left = dict(zip(names, lives, strict=True))
    changed = [name for name, ms in left.items() if ms == -1 or ms > _LONGEST_MS]
    cuts: list[Command] = [
        ("PEXPIRE", name, _FORGOTTEN_MS if left[name] == -1 else _LONGEST_MS) for name in changed
    ]
    if cuts:
        await client.pipeline(cuts)
    return [name.decode(errors="replace") for name in changed]


async def expire_unowned(
    client: Client, keys: Keys, some: Iterable[bytes], owners: Iterable[str]
) -> list[str]:
    """Gives an expiry to streams of tasks of trainers that are not on the register: which of
    ``some`` keys it changed.

    A site may make any number of them. What such a trainer says later takes the expiry back.
    ``owners``: trainers that own devices, and are to be struck off first if they are not there.
    """
    ours, known = f"{keys.tasks}:".encode(), {owner.encode() for owner in owners}
    named = {name: name.removeprefix(ours).removeprefix(f"{POOL}/".encode()) for name in some}
    streams = {name: who for name, who in named.items() if name.startswith(ours)}
    streams = {name: who for name, who in streams.items() if who not in known}
    if not streams:
        return []
    heard, *lives = await client.pipeline(
        [("ZMSCORE", keys.alive, *streams.values()), *(("PTTL", name) for name in streams)]
    )
    changed = [
        name for name, at, ms in zip(streams, heard, lives, strict=True) if at is None and ms == -1
    ]
    if changed:
        await client.pipeline([("PEXPIRE", name, _FORGOTTEN_MS) for name in changed])
    return [name.decode(errors="replace") for name in changed]


async def cap_workspaces(
    client: Client, keys: Keys, some: Iterable[bytes], held: dict[str, int], most: int
) -> set[str]:
    """Lets those of ``some`` keys go that are workspaces beyond ``most`` bytes of their site, or
    no workspaces at all: the sites. The pool's stay.

    ``held``: what each site had in the keys before these; it grows by what these have.
    """
    ours = (keys.prefix + _WORKSPACES).encode()
    places = {
        name: name.removeprefix(ours).partition(b"/")[0].decode(errors="replace")
        for name in some
        if name.startswith(ours)
    }
    others = {name: site for name, site in places.items() if site != POOL}
    sizes = await _lengths(client, list(others))
    over: list[bytes] = []
    for (name, site), size in zip(others.items(), sizes, strict=True):
        if size is None or held.get(site, 0) + size > most:
            over.append(name)
        else:
            held[site] = held.get(site, 0) + size
    if over:
        await client.pipeline([("PEXPIRE", name, 1) for name in over])
    return {others[name] for name in over}


async def _lengths(client: Client, names: Sequence[bytes]) -> list[int | None]:
    """Of strings; None: something else is there."""
    if not names:
        return []
    try:
        return await client.pipeline([("STRLEN", name) for name in names])
    except Foreign:
        if len(names) == 1:
            return [None]
        half = len(names) // 2
        return await _lengths(client, names[:half]) + await _lengths(client, names[half:])


async def drop_copies(client: Client, keys: Keys, some: Iterable[bytes]) -> int:
    """Deletes those of ``some`` keys that are a device's vector as a site was given it, where the
    site serves that device no more or the run is over: how many. An open task keeps its copy."""
    ours = (keys.prefix + _COPIES).encode()
    copies = [name.decode(errors="replace") for name in some if name.startswith(ours)]
    if not copies:
        return 0
    return int(await _DROP(client, keys.__dict__, rest=copies))


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


async def ended_unlike(
    client: Client, keys: Keys, done: Callable[[str], End | None], look: str
) -> list[End]:
    """The ends, by ``done``, of tasks that are open in Redis or that others ended otherwise there.

    So it is where Redis fell back: those tasks were open again, for whoever came first. ``look`` is
    noted down beforehand: where it stands, Redis has not gone back behind this look.
    """
    _, opened, ended = await client.pipeline(
        [("HSET", keys.tokens, "look", look), ("HKEYS", keys.open), ("ZRANGE", keys.ended, 0, -1)]
    )
    there = {task.decode(): ("open", "") for task in opened}
    for row in ended:
        task, _, outcome, reason = row.decode().split("|")
        if outcome not in _OF_UPDATER:
            there.setdefault(task, (outcome, reason))
    ends = ((done(task), how) for task, how in there.items())
    return [end for end, how in ends if end is not None and (end.outcome, end.reason) != how]
