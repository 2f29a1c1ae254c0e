"""Live services of a run, and deletion of a run without live services."""

from __future__ import annotations

import re

from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.core.errors import BrokerError, FedstreamError, NoRun
from fedstream.terminal import counted

_SILENT_S = 10.0  # a trainer without a heartbeat for this long is gone
_COORDINATOR_IDLE_MS = 3000  # a live coordinator reads every second
_LEADERS = ("scheduler", "updater")


async def serving(client: Client, keys: Keys) -> list[str]:
    """Names of live services, from Redis's data; evaluators are invisible there."""
    ledger = OperatorLedger(client, keys, "presence")
    leaders = [role for role in _LEADERS if await client.call("EXISTS", keys.leader(role))]
    # A trainer that signed off stays on the register until a coordinator sweeps it.
    gone = {*await ledger.silent(_SILENT_S), *await ledger.left()}
    trainers = [name for name in await ledger.trainers() if name.encode() not in gone]
    return [*await _coordinators(client, keys), *leaders, *trainers]


async def _coordinators(client: Client, keys: Keys) -> list[str]:
    try:
        rows = await client.call("XINFO", "CONSUMERS", keys.triggers, COORDINATORS)
    except BrokerError as error:
        if error.retriable:
            raise
        return []  # no such stream or group
    found = (dict(zip(row[::2], row[1::2], strict=True)) for row in rows)
    return [one[b"name"].decode() for one in found if one[b"idle"] < _COORDINATOR_IDLE_MS]


async def purgeable(client: Client, keys: Keys, *, force: bool) -> int:
    """Number of keys of the run that can be deleted. Raises as :func:`purge` does."""
    await _check_idle(client, keys, force=force)
    return _present(len(await OperatorLedger(client, keys, "purge").stored()), client, keys)


async def purge(client: Client, keys: Keys, *, force: bool) -> int:
    """Delete the run's keys; return their number.

    Raises NoRun if there are none, and FedstreamError if the run is being served, unless ``force``.
    """
    await _check_idle(client, keys, force=force)
    return _present(await OperatorLedger(client, keys, "purge").purge(), client, keys)


async def elsewhere(client: Client) -> dict[int, int]:
    """The number of keys in each of Redis's other databases."""
    found = (await client.call("INFO", "keyspace")).decode()
    keys = {int(db): int(n) for db, n in re.findall(r"^db(\d+):keys=(\d+)", found, re.MULTILINE)}
    return {db: n for db, n in keys.items() if db != client.database}


def in_words(database: int, keys: int) -> str:
    """A line about another database's keys."""
    return f"database {database} of this Redis has {counted(keys, 'key')}"


async def _check_idle(client: Client, keys: Keys, *, force: bool) -> None:
    if not force and (busy := await serving(client, keys)):
        raise FedstreamError(
            f"run {keys.name!r} is being served by {', '.join(busy)}: stop them first (a crashed "
            "one still counts for 10 s), or give --force"
        )


def _present(count: int, client: Client, keys: Keys) -> int:
    if not count:
        raise NoRun(f"there is no run {keys.name!r} in Redis at {client.address}")
    return count
