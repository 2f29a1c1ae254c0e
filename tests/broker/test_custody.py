"""What sites wrote and forgot, found a few keys at a time, also on one node of a cluster."""

from __future__ import annotations

import pytest

from fedstream.broker import cleanup
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.messages import GiveUp
from tests.support import Hand, wait_until


async def test_scan_continues_where_it_stopped(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "_STEP", 10)
    names = {keys.update(f"north/{n}") for n in range(300)}
    await client.pipeline([("HSET", name, "size", 1) for name in sorted(names)])
    cursor, steps = b"0", list[list[str]]()
    while not steps or cursor != b"0":
        cursor, some = await cleanup.some_keys(client, keys, cursor)
        steps.append(await cleanup.expire_forgotten(client, keys, some))
    assert len(steps) > 10  # Redis may give a few more than it is asked for
    assert sorted(name for found in steps for name in found) == sorted(names)  # each once


async def test_site_keeps_a_copy_while_it_serves_the_device(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await client.call("HSET", keys.device(3), "digest", "d", "0", "x")

    async def copies() -> set[str]:
        names = await client.call("KEYS", keys.prefix + "control:*")
        await cleanup.drop_copies(client, keys, names)
        left = await client.call("KEYS", keys.prefix + "control:*")
        return {name.decode().removeprefix(keys.prefix) for name in left}

    await hand.announce("edge", 3, site="north")
    await hand.open(device=3)
    assert await copies() == {"control:north/3"}
    await hand.ledger.leave(b"north/edge")  # its task is given up
    await hand.open(device=3)
    assert await copies() == {"control:pool/3"}
    [(_, given)] = await hand.take()
    await hand.announce("edge", 3, site="north")
    assert await copies() == {"control:pool/3"}  # its trainer may be about to read it
    await hand.admit(GiveUp(task=given.task, attempt="1", device=3, trainer="t", reason="raised"))
    assert await copies() == set()
    for device in (3, 4):
        await client.call("HSET", keys.device(device), "digest", "d", "0", "x")
        await hand.open(device=device)
    [_, other] = sorted((await hand.ledger.look()).open, key=lambda trigger: trigger.device)
    await hand.admit(GiveUp(task=other.task, attempt="1", device=4, trainer="t", reason="raised"))
    assert await copies() == {"control:north/3", "control:pool/4"}  # for the next tasks
    await hand.ledger.finish("enough")
    assert await copies() == {"control:north/3"}  # of which a task is open
    assert await client.call("EXISTS", keys.device(3), keys.device(4)) == 2


async def test_invalid_workspaces_are_deleted_and_the_rest_counted(
    client: Client, keys: Keys
) -> None:
    names = [keys.workspace("north", str(n)) for n in range(5)]
    for name in names[:4]:
        await client.call("SET", name, bytes(10))
    await client.call("HSET", names[4], "size", 1)
    held: dict[str, int] = {}
    some = [name.encode() for name in names]
    assert await cleanup.cap_workspaces(client, keys, some, held, 40) == {"north"}
    assert held == {"north": 40}

    async def gone() -> bool:
        return not await client.call("EXISTS", names[4])

    await wait_until(gone)
    assert await client.call("EXISTS", *names) == 4


async def test_long_key_names_are_not_fetched(client: Client, keys: Keys) -> None:
    """It is nobody's who reads what is under it, and goes."""
    long, short = (keys.update("north/" + "x" * length) for length in (4 << 20, 900))
    await client.pipeline([("HSET", name, "size", 1) for name in (long, short)])
    cursor, found = await cleanup.some_keys(client, keys, b"0")
    while cursor != b"0":
        cursor, more = await cleanup.some_keys(client, keys, cursor)
        found += more
    assert found == [short.encode()]

    async def gone() -> bool:
        return not await client.call("EXISTS", long)

    await wait_until(gone)
    assert await cleanup.expire_forgotten(client, keys, found) == [short]
