"""One process holds a role, and whoever held it before cannot write any more."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.core.errors import Fenced, Unavailable
from tests.support import Proxy, wait_until


def lease(client: Client, keys: Keys, name: str, seconds: float = 60.0) -> Lease:
    return Lease(client, keys, "updater", name, seconds=seconds)


async def test_one_process_leads_and_the_other_stands_by(client: Client, keys: Keys) -> None:
    ann, bob = lease(client, keys, "ann"), lease(client, keys, "bob")
    assert await ann.acquire()
    assert ann.number == 1
    assert not await bob.acquire()
    assert bob.number == 0
    assert await ann.hold()


async def test_standby_takes_over_after_expiry_and_fences_the_leader(
    client: Client, keys: Keys
) -> None:
    ann, bob = lease(client, keys, "ann", seconds=0.05), lease(client, keys, "bob")
    assert await ann.acquire()
    await wait_until(bob.acquire)
    assert bob.number == 2
    with pytest.raises(Fenced, match="another updater has taken over"):
        await ann.hold()
    assert await bob.hold()


async def test_renewing_keeps_the_role(client: Client, keys: Keys) -> None:
    ann = lease(client, keys, "ann", seconds=30)
    await ann.acquire()
    await client.call("PEXPIRE", keys.leader("updater"), 50)
    assert await ann.hold()
    assert await client.call("PTTL", keys.leader("updater")) > 1000


async def test_a_restarted_process_of_the_same_name_need_not_wait(
    client: Client, keys: Keys
) -> None:
    before, after = lease(client, keys, "updater-0"), lease(client, keys, "updater-0")
    assert await before.acquire()
    assert await after.acquire()
    assert after.number > before.number
    with pytest.raises(Fenced):
        await before.hold()


async def test_releasing_lets_the_standby_take_over_at_once(client: Client, keys: Keys) -> None:
    ann, bob = lease(client, keys, "ann"), lease(client, keys, "bob")
    await ann.acquire()
    await ann.release()
    assert await bob.acquire()
    await ann.release()  # late: it is not ann's any more
    assert await bob.hold()


async def test_hanging_redis_does_not_delay_a_leaving_process(
    client: Client, keys: Keys, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.broker.lease._GOODBYE_S", 0.1)
    async with Proxy(redis, keys) as proxy:
        patient = Client(proxy.settings.model_copy(update={"timeout_s": 3600.0}))
        ann = lease(patient, keys, "ann")
        assert await ann.acquire()
        proxy.answering.clear()
        async with asyncio.timeout(60):
            with pytest.raises(Unavailable):
                await ann.release()
        await patient.close()
    await client.call("DEL", keys.leader("updater"))  # which it may have given back, or not


async def test_lost_lease_is_retaken_with_a_higher_token(client: Client, keys: Keys) -> None:
    ann = lease(client, keys, "ann")
    await ann.acquire()
    await ann.acquire()
    assert ann.number == 2
    await client.call("FLUSHALL")
    assert not await ann.hold()
    assert await ann.acquire(at_least=ann.number)
    assert ann.number == 3


async def test_takeover_during_an_outage_fences(client: Client, keys: Keys) -> None:
    ann, bob = lease(client, keys, "ann"), lease(client, keys, "bob")
    await ann.acquire()
    await client.call("FLUSHALL")
    assert await bob.acquire()
    # Both have number 1 now: the nonce tells them apart.
    assert (ann.number, bob.number) == (1, 1)
    with pytest.raises(Fenced):
        await ann.hold()
