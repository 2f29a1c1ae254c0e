"""Clean-up and repair of a run's keys: foreign values, leftovers of sites, and lost tasks.

The rights of their Redis users keep trainers from damaging shared keys. If a key holds a foreign
value all the same, the value is quarantined where the service can recreate the key (registers,
inboxes, and tasks, which are given up and triggered again). A foreign value in the run's own state
is only reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.scripts import Script
from fedstream.core.errors import Foreign
from fedstream.core.messages import POOL
from fedstream.core.records import End

T = TypeVar("T")

_MEND = Script("mend")
_SCAN = Script("scan")
_DROP = Script("drop_copies")
_FIND = Script("find_lost")
TRIM = Script("trim_registers")
SCRIPTS = (_MEND, _SCAN, _DROP, _FIND)  # run by coordinators
_OF_UPDATER = ("applied", "buffered")  # outcomes that coordinators never set
_ASIDE_MS = 7 * 24 * 3600 * 1000  # time that quarantined keys stay for an operator to inspect

_AT_ONCE = 500  # keys per script call: Redis is blocked meanwhile

_WORKSPACES = "workspace:"
_OF_SITES = ("update:", _WORKSPACES)  # written by sites; leaked if a site forgets the expiry
# Keys of a gateway that expire too. Its other keys are registers: one key each.
_OF_GATEWAYS = re.compile(rb"gateway:[^:]*:(nonce|upload):")
_REGISTERED = (
    2048  # bytes of a value in a register: a public key and an invite's digest, or a secret
)
_MOVES = (20_000, 64 << 20)  # entries and bytes of a gateway's `moves`; gateways keep 2,000 entries
_COPIES = "control:"  # per-site copies of a strategy's device state
_FORGOTTEN_MS = 600_000  # expiry given to keys without one
_LONGEST_MS = 24 * 3600 * 1000  # longer expiries are cut to this
_STEP = 1000  # keys per scan step, or tasks: there may be any number

_MENDED = {
    "triggers": "stream",
    "tasks": "stream",
    "events": "stream",
    "changes": "stream",
    "alive": "zset",
    "trainers": "hash",
    "working": "hash",
    "concurrent": "hash",
    "owners": "hash",
    "rates": "hash",
    "failing": "hash",
    "evaluation": "hash",
    "evaluations": "hash",
    "measured": "hash",
    "sites": "set",
    "pool": "set",
    "letters": "zset",
}
_NAMED = {
    "run": "hash",
    "head": "hash",
    "kept": "zset",
    "best": "hash",
    "sealing": "string",
    "lineage": "hash",
    "open": "hash",
    "admitted": "hash",
    "ended": "zset",
    "counts": "hash",
    "queue": "stream",
    "models": "stream",
    "dead": "stream",
}


def in_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split items into batches small enough for one exchange."""
    for at in range(0, len(items), _AT_ONCE):
        yield items[at : at + _AT_ONCE]


async def mend(
    client: Client, keys: Keys, *, inboxes: Iterable[str], owners: Iterable[str], most: int
) -> list[tuple[str, str]]:
    """Quarantine foreign values; return [(key, the value's type)].

    ``inboxes``: sites that have an inbox. ``owners``: trainers that have a task stream. ``most``:
    entries allowed in an inbox; a longer inbox is deleted, as reading it would take too long.
    """
    wanted = {getattr(keys, name): (kind, 0) for name, kind in _MENDED.items()}
    wanted |= {keys.inbox(site): ("stream", most) for site in inboxes}
    wanted |= {keys.tasks_of(owner): ("stream", 0) for owner in owners}
    found: list[tuple[str, str]] = []
    for some in in_parts(list(wanted)):
        about = (part for key in some for part in wanted[key])
        mended = await _MEND(
            client,
            keys.__dict__,
            _ASIDE_MS,
            *about,
            rest=[name for key in some for name in (key, keys.quarantine(key))],
        )
        found += [(key.decode(), why.decode()) for key, why in mended]
    return found


async def foreign(client: Client, keys: Keys) -> list[tuple[str, str]]:
    """Find keys of the run's state with a value of the wrong type; return [(key, type)]."""
    names = [getattr(keys, name) for name in _NAMED]
    kinds = await client.pipeline([("TYPE", name) for name in names])
    return [
        (name, f"it holds a {kind.decode()}, not a {wanted}")
        for name, kind, wanted in zip(names, kinds, _NAMED.values(), strict=True)
        if kind.decode() not in (wanted, "none")
    ]


async def some_keys(client: Client, keys: Keys, cursor: bytes) -> tuple[bytes, list[bytes]]:
    """Scan one step through Redis's keys; return the next cursor and the run's keys found.

    ``cursor``: returned by the previous step; ``b"0"`` starts a scan, and marks its end when
    returned. Keys with longer names than any of ours are set to expire.
    """
    cursor, found = await _SCAN(client, keys.__dict__, cursor, keys.prefix + "*", _STEP)
    return cursor, found


def _of(keys: Keys, some: Iterable[bytes], *kinds: str) -> list[bytes]:
    """The keys in ``some`` whose names begin with one of ``kinds``."""
    prefixes = tuple((keys.prefix + kind).encode() for kind in kinds)
    return [name for name in some if name.startswith(prefixes)]


async def expire_forgotten(client: Client, keys: Keys, some: Iterable[bytes]) -> list[str]:
    """Limit the expiry of keys that sites wrote; return the changed keys of ``some``.

    Our trainers set an expiry first, but a site may run other software. An update that is admitted
    meanwhile has been renamed, so it doesn't expire.
    """
    names = _of(keys, some, *_OF_SITES)
    start = len(keys.prefix.encode())
    names += [name for name in _of(keys, some, "gateway:") if _OF_GATEWAYS.match(name, start)]
    lives = await client.pipeline([("PTTL", name) for name in names]) if names else []
    left = dict(zip(names, lives, strict=True))
    changed = [name for name, ms in left.items() if ms == -1 or ms > _LONGEST_MS]
    cuts: list[Command] = [
        ("PEXPIRE", name, _FORGOTTEN_MS if left[name] == -1 else _LONGEST_MS) for name in changed
    ]
    if cuts:
        await client.pipeline(cuts)
    return [name.decode(errors="replace") for name in changed]


def registers(keys: Keys, some: Iterable[bytes]) -> list[bytes]:
    """The gateways' registers in ``some``: all keys of gateways except nonces and uploads."""
    start = len(keys.prefix.encode())
    return [name for name in _of(keys, some, "gateway:") if not _OF_GATEWAYS.match(name, start)]


async def trim_registers(
    client: Client, keys: Keys, names: Sequence[bytes], devices: int
) -> list[str]:
    """Delete fields that belong to no device of the run; return the changed registers.

    Each call checks another 1,000 fields of a larger register.
    """
    trimmed = await TRIM(
        client,
        keys.__dict__,
        devices,
        _REGISTERED,
        *_MOVES,
        rest=[name.decode(errors="surrogateescape") for name in names],
    )
    return [name.decode(errors="replace") for name in trimmed]


async def expire_unowned(
    client: Client, keys: Keys, some: Iterable[bytes], owners: Iterable[str]
) -> list[str]:
    """Expire task streams of unregistered trainers; return the changed keys of ``some``.

    A site may create any number of streams. An announcement by the trainer removes the expiry.
    ``owners``: registered trainers with devices; their streams are kept.
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
    """Expire invalid workspaces, and those beyond ``most`` bytes per site; return their sites.

    The pool's workspaces are kept. ``held``: the bytes of each site's workspaces that were kept so
    far; this call adds those that it keeps.
    """
    ours = (keys.prefix + _WORKSPACES).encode()
    places = {
        name: name.removeprefix(ours).partition(b"/")[0].decode(errors="replace")
        for name in _of(keys, some, _WORKSPACES)
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
    """Measure strings, in bytes; None for keys of another type."""
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
    """Delete stale copies of device state among ``some`` keys; return their number.

    A copy is stale when its site no longer serves the device or the run is over, unless an open
    task still needs it.
    """
    copies = [name.decode(errors="replace") for name in _of(keys, some, _COPIES)]
    if not copies:
        return 0
    return int(await _DROP(client, keys.__dict__, rest=copies))


async def find_lost(
    client: Client, keys: Keys, event: bytes, seen: Mapping[str, str], cursor: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Give up open tasks whose entry is gone and whose answer is not in flight, one step at a time.

    A task counts as lost only if an earlier search found it without an entry and every message
    sent by then has been read since. ``seen``: tasks without an entry, from the earlier search.
    ``cursor``: returned by the previous step; ``b"0"`` starts a search, and marks its end when
    returned. Returns the number of tasks given up, ``seen`` for the next search, and the cursor.
    """
    arguments: list[Any] = [part for pair in seen.items() for part in pair]
    lost, cursor, flat = await _FIND(
        client, keys.__dict__, TRAINERS, event, cursor, _STEP, *arguments
    )
    names = [part.decode() for part in flat]
    return int(lost), dict(zip(names[::2], names[1::2], strict=True)), cursor


async def ended_unlike(
    client: Client, keys: Keys, done: Callable[[str], End | None], look: str
) -> list[End]:
    """Find the tasks whose end in ``done`` Redis lacks: there they are open or ended otherwise.

    There are such tasks after Redis fell back to an older state: they were open again, and another
    answer could end them. Returns their ends from ``done``. ``look`` is written to Redis first:
    while it is there, Redis has not fallen back to a state before this search.
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
