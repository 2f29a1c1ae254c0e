"""Streams and groups: nothing is lost by a crash, nothing comes back for ever."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.scripts import load_all
from fedstream.broker.streams import PARTS, Entry, Group, Reader, given, reading
from fedstream.core.errors import BrokerError, Unavailable
from tests.support import wait_until


@pytest.fixture
async def ann(client: Client, keys: Keys) -> Group:
    group = Group(client, keys.tasks, TRAINERS, "ann")
    await group.ensure()
    return group


@pytest.fixture
async def bob(client: Client, keys: Keys) -> Group:
    return Group(client, keys.tasks, TRAINERS, "bob")


async def add(client: Client, stream: str, *values: str) -> list[str]:
    return [(await client.call("XADD", stream, "*", "m", value)).decode() for value in values]


def data(entries: list[Entry]) -> list[bytes]:
    return [entry.data for entry in entries]


async def deliveries(client: Client, group: Group) -> dict[bytes, tuple[bytes, int]]:
    rows = await client.call("XPENDING", group.stream, group.group, "-", "+", 100)
    return {row[0]: (row[1], row[3]) for row in rows}


# reading


async def test_group_shares_entries_with_their_times(
    client: Client, ann: Group, bob: Group
) -> None:
    await client.call("XADD", ann.stream, "1500-0", "m", "x")
    await add(client, ann.stream, "y", "z")
    [first] = await ann.read()
    assert (first.data, first.time) == (b"x", 1.5)
    assert data(await bob.read(count=10, block_ms=0)) == [b"y", b"z"]
    assert await ann.read(block_ms=0) == []


async def test_group_lost_by_redis_is_recreated(client: Client, ann: Group) -> None:
    await client.call("FLUSHALL")
    assert await ann.read(block_ms=0) == []
    await add(client, ann.stream, "x")
    assert data(await ann.read()) == [b"x"]


async def test_group_lost_while_waiting_is_recreated(
    redis: RedisSettings, client: Client, ann: Group
) -> None:
    waiting = Client(redis, "waiting")
    group = Group(waiting, ann.stream, ann.group, "ann")
    read = asyncio.create_task(group.read(block_ms=20_000))

    async def waits() -> bytes | None:
        listed = (await client.call("CLIENT", "LIST")).splitlines()
        blocked = [line for line in listed if b"name=waiting" in line and b"flags=b" in line]
        return re.findall(rb"^id=(\d+)", blocked[0])[0] if blocked else None

    waiter: bytes = await wait_until(waits)
    await client.call("FLUSHALL")
    await add(client, ann.stream, "x")
    await client.call("CLIENT", "UNBLOCK", waiter)  # as when its time is over: 6.2 goes on waiting
    found = []
    with suppress(Unavailable):  # Redis 7 says that it is gone
        found = await read
    assert data(found or await group.read(block_ms=0) or await group.read()) == [b"x"]
    await waiting.close()


async def test_claiming_from_a_lost_group_finds_nothing(client: Client, ann: Group) -> None:
    await client.call("FLUSHALL")
    assert await ann.claim(idle_ms=0, most=3) == ([], [])
    assert not await ann.renew(Entry("1-1", b""))
    assert await ann.reap(idle_ms=0) == []


async def test_other_errors_than_a_missing_group_are_raised(client: Client, keys: Keys) -> None:
    await client.call("SET", keys.tasks, "no stream")
    group = Group(client, keys.tasks, TRAINERS, "ann")
    for attempt in (group.ensure, group.read, lambda: group.claim(idle_ms=0, most=3)):
        with pytest.raises(BrokerError, match="WRONGTYPE"):
            await attempt()


async def test_malformed_entry_has_empty_data(client: Client, ann: Group) -> None:
    await client.call("XADD", ann.stream, "*", "other", "x")
    assert data(await ann.read()) == [b""]


async def test_reader_continues_in_several_streams(client: Client, keys: Keys) -> None:
    reader = Reader(client, {keys.models: "0", keys.events: "$"})
    await add(client, keys.events, "before")
    await add(client, keys.models, "1", "2", "3")
    found = await reader.read(count=2, block_ms=0)
    assert {name: data(entries) for name, entries in found.items()} == {keys.models: [b"1", b"2"]}
    found = await reader.read()
    assert data(found[keys.models]) == [b"3"]
    assert await reader.read(block_ms=1) == {}
    reader.rewind(keys.models)
    assert len((await reader.read())[keys.models]) == 3


async def test_groups_streams_are_read_in_one_exchange(
    client: Client, keys: Keys, ann: Group
) -> None:
    other = Group(client, keys.inbox("pool"), TRAINERS, "ann")
    await other.ensure()
    await add(client, ann.stream, "1", "2", "3")
    await add(client, other.stream, "4")
    command = reading([ann, other], count=2, block_ms=0)
    found = given([ann, other], await client.call(*command))
    assert [(group, entry.data) for group, entry in found] == [
        (ann, b"1"),
        (ann, b"2"),
        (other, b"4"),
    ]
    assert len(given([ann, other], await client.call(*command))) == 1
    assert given([ann, other], await client.call(*command)) == []


# taking over


async def test_pending_entries_come_first_after_a_crash(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x", "y", "z")
    await ann.read(count=2)
    await bob.read()
    own, poison = await ann.claim(idle_ms=0, most=3, own=True)
    assert (data(own), poison) == ([b"x", b"y"], [])
    own, _ = await ann.claim(idle_ms=0, most=3, own=True, count=1)
    assert data(own) == [b"x"]


async def test_only_entries_idle_long_enough_are_claimed(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x")
    await ann.read()
    assert await bob.claim(idle_ms=60_000, most=3) == ([], [])
    taken, _ = await bob.claim(idle_ms=0, most=3)
    assert data(taken) == [b"x"]
    [(consumer, times)] = (await deliveries(client, bob)).values()
    assert (consumer, times) == (b"bob", 2)


async def test_claiming_quietly_counts_no_delivery(client: Client, ann: Group) -> None:
    await add(client, ann.stream, "x")
    await ann.read()
    for _ in range(5):  # Redis was at fault, not the entry: it never becomes poison
        taken, poison = await ann.claim(idle_ms=0, most=2, own=True, quiet=True)
        assert (data(taken), poison) == ([b"x"], [])
    assert [times for _, times in (await deliveries(client, ann)).values()] == [1]


async def test_consumer_hands_back_what_it_does_not_know_of(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x", "y", "bob's")
    kept, _ = await ann.read(count=2)
    await bob.read()
    assert await ann.release_others(kept)
    assert sorted((await deliveries(client, ann)).values()) == [
        (b"ann", 0),
        (b"ann", 1),
        (b"bob", 1),
    ]
    taken, _ = await bob.claim(idle_ms=60_000, most=1)
    assert data(taken) == [b"y"]
    assert not await ann.release_others(kept)
    await client.call("FLUSHALL")
    assert not await ann.release_others(kept)


async def test_poison_is_reported_with_its_deliveries_and_not_claimed(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "poison", "good")
    await ann.read()
    for _ in range(2):
        await ann.claim(idle_ms=0, most=3, own=True)
    await ann.read()
    taken, poison = await bob.claim(idle_ms=0, most=3)
    assert data(taken) == [b"good"]
    assert [(entry.data, times) for entry, times in poison] == [(b"poison", 3)]
    assert (await deliveries(client, ann))[poison[0][0].id.encode()] == (b"ann", 3)


async def test_without_a_consumer_poison_is_reported_and_nothing_claimed(
    client: Client, ann: Group
) -> None:
    await add(client, ann.stream, "x", "y")
    await ann.read()
    await ann.claim(idle_ms=0, most=9, own=True)
    await ann.read()
    nobody = Group(client, ann.stream, ann.group, "")
    taken, poison = await nobody.claim(idle_ms=0, most=2)
    assert taken == []
    assert [entry.data for entry, _ in poison] == [b"x"]
    assert {consumer for consumer, _ in (await deliveries(client, ann)).values()} == {b"ann"}


async def test_poison_is_found_once_among_many_entries(client: Client, ann: Group) -> None:
    await add(client, ann.stream, *(str(n) for n in range(30)))
    entries = await ann.read(count=30)
    bad = [entries[n] for n in (0, 9, 10, 19, 29)]
    for entry in bad * 2:
        await client.call("XCLAIM", ann.stream, ann.group, "ann", 0, entry.id)
    nobody = Group(client, ann.stream, ann.group, "")
    for count in (1, 10, 30, 100):
        _, poison = await nobody.claim(idle_ms=0, most=3, count=count)
        assert [entry for entry, _ in poison] == bad


async def test_poison_does_not_hide_other_entries(client: Client, ann: Group, bob: Group) -> None:
    await add(client, ann.stream, "poison", "good", "good too")
    for _ in await ann.read(count=3):
        await ann.claim(idle_ms=0, most=9, own=True, count=1)
    taken, poison = await bob.claim(idle_ms=0, most=3, count=1)
    assert (data(taken), [entry.data for entry, _ in poison]) == ([b"good"], [b"poison"])


@pytest.mark.parametrize("consumer", ["bob", ""])
async def test_deleted_pending_entries_are_acknowledged(
    client: Client, ann: Group, consumer: str
) -> None:
    gone, _ = await add(client, ann.stream, "gone", "there")
    await ann.read(count=2)
    await client.call("XDEL", ann.stream, gone)
    taken, poison = await Group(client, ann.stream, ann.group, consumer).claim(idle_ms=0, most=3)
    assert data(taken) == ([b"there"] if consumer else [])
    assert poison == []
    assert gone.encode() not in await deliveries(client, ann)


# leases


async def test_renewing_keeps_an_entry_and_counts_no_delivery(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x")
    [entry] = await ann.read()

    lease_ms = 3_600_000
    idle = ("IDLE", lease_ms, "JUSTID")
    await client.call("XCLAIM", ann.stream, ann.group, "ann", 0, entry.id, *idle)
    assert await ann.renew(entry)
    assert await bob.claim(idle_ms=lease_ms, most=3) == ([], [])
    assert [times for _, times in (await deliveries(client, ann)).values()] == [1]


async def test_many_leases_are_renewed_together_but_not_those_that_are_lost(
    client: Client, ann: Group, bob: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.broker.streams.RENEWED", 2)
    await load_all(client)
    ids = await add(client, ann.stream, *"abcde")
    await ann.read(count=5)
    await bob.claim(idle_ms=0, most=9, count=1)  # a, which is bob's now
    await client.call("XACK", ann.stream, ann.group, ids[1])  # b, which is done
    assert await ann.renew_all(ids) == set(ids[2:])
    assert await bob.renew_all([]) == set()
    owners = await deliveries(client, ann)
    assert owners[ids[0].encode()] == (b"bob", 2)
    assert {owners[one.encode()] for one in ids[2:]} == {(b"ann", 1)}
    await client.call("DEL", ann.stream)
    assert await ann.renew_all(ids) == set()


async def test_lost_lease_cannot_be_renewed(client: Client, ann: Group, bob: Group) -> None:
    await add(client, ann.stream, "x")
    [entry] = await ann.read()
    await bob.claim(idle_ms=0, most=3)
    assert not await ann.renew(entry)
    assert await bob.renew(entry)
    await client.call("XACK", ann.stream, ann.group, entry.id)
    assert not await bob.renew(entry)


async def test_handed_back_entry_is_available_at_once_and_not_a_crash(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x")
    [entry] = await ann.read()
    for _ in range(5):  # however often: being told to stop is no proof of poison
        assert await ann.release(entry)
        taken, poison = await bob.claim(idle_ms=3_600_000, most=1)
        assert (data(taken), poison) == ([b"x"], [])
        assert not await ann.release(entry)  # it is the other's now
        assert await bob.release(entry)
        taken, poison = await ann.claim(idle_ms=3_600_000, most=1)
        assert (data(taken), poison) == ([b"x"], [])


async def test_consumer_with_pending_entries_is_not_reaped(
    client: Client, ann: Group, bob: Group
) -> None:
    await add(client, ann.stream, "x")
    [entry] = await ann.read()
    assert await bob.reap(idle_ms=0) == []
    assert entry.id.encode() in await deliveries(client, ann)
    await client.call("XACK", ann.stream, ann.group, entry.id)
    assert await bob.reap(idle_ms=60_000) == []
    assert await bob.reap(idle_ms=0) == ["ann"]
    assert await client.call("XINFO", "CONSUMERS", ann.stream, ann.group) == []


async def test_reads_of_untrusted_streams_are_bounded(client: Client, keys: Keys) -> None:
    """What is larger than it may be comes without its data, and is no poison."""
    group = Group(client, keys.tasks, TRAINERS, "ann", largest=100)
    await group.ensure()
    sizes = [99, 100, 500, *[99] * 30]  # of the data; the field's name is a byte more
    await add(client, keys.tasks, *("x" * size for size in sizes))
    await client.call("XADD", keys.tasks, "*", "m", "y", "other", "z" * 100)
    read = await group.read(count=99)
    assert [entry.size for entry in read] == [*(size + 1 for size in sizes), 107]
    found: list[Entry] = []
    while True:
        taken, poison = await group.claim(idle_ms=0, most=9, own=True, count=64)
        if not taken:
            break
        assert sum(len(entry.data) for entry in taken) <= (PARTS + 1) * 100
        assert poison == []
        found += taken
        for entry in taken:
            await client.call("XACK", keys.tasks, TRAINERS, entry.id)
    assert [entry.id for entry in found] == [entry.id for entry in read]
    assert [entry.size for entry in found] == [entry.size for entry in read]
    assert {entry.size for entry in found if not entry.data} == {101, 501, 107}


async def test_oversized_entry_is_not_poison(client: Client, keys: Keys) -> None:
    group = Group(client, keys.tasks, TRAINERS, "ann", largest=10)
    await group.ensure()
    await add(client, keys.tasks, "x" * 99, "good")
    await group.read(count=2)
    taken, poison = await group.claim(idle_ms=0, most=1, own=True)
    assert [(entry.data, entry.size) for entry in taken] == [(b"", 100)]
    assert [entry.data for entry, _ in poison] == [b"good"]
