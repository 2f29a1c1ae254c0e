"""A coordinator keeps the register of trainers, and of who owns which device."""

from __future__ import annotations

import math
import os

import msgpack
import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.core.messages import Assignment
from tests.broker.ledger.steps import exists
from tests.support import Hand, served_devices

# trainers


async def test_trainer_joins_once_and_may_update_its_announcement(hand: Hand) -> None:
    await hand.create()
    assert await hand.announce("ann") == ["heard"]
    assert await hand.announce("ann", 7) == ["heard"]
    [(name, about)] = (await hand.ledger.trainers()).items()
    assert (name, about["pid"], about["owns"]) == ("ann", os.getpid(), [7])
    assert await hand.ledger.owners() == {7: "ann"}
    assert (await hand.ledger.look()).trainers == 1
    assert [event.text for event in await hand.events("trainer")] == ["ann joined"]


async def test_a_trainer_leaves_once(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 7)
    await hand.announce("bob", 8)
    assert await hand.ledger.leave(b"ann") == 0
    assert await hand.ledger.leave(b"ann") is None
    assert await hand.ledger.owners() == {8: "bob"}
    assert list(await hand.ledger.trainers()) == ["bob"]
    assert [e.text for e in await hand.events("trainer")][-1] == "ann left"


async def test_devices_of_a_gateway_work_at_the_same_time(hand: Hand) -> None:
    """A hospital's trainer has as many, and works on one task."""
    await hand.create()  # ten devices

    async def workers() -> int:
        return (await hand.ledger.tally()).workers

    assert await workers() == 0
    await hand.announce("ann")
    await hand.announce("hospital", 0, 1, 2, site="north")
    await hand.announce("gw-0", 2, 3, 4, 5, 77, site="gateway", concurrent=True)
    assert await workers() == 1 + 1 + 3, "2 is another's, and there is no 77"
    await hand.announce("gw-0", 4, site="gateway", concurrent=True)
    assert await workers() == 1 + 1 + 1
    assert await hand.ledger.leave(b"gateway/gw-0") == 0
    assert await workers() == 2
    assert (await hand.ledger.tally()).trainers == 2


async def test_departed_trainer_is_removed_unless_it_is_back(hand: Hand) -> None:
    await hand.create()
    await hand.goodbye("nobody")  # who never joined
    await hand.announce("ann")
    await hand.goodbye("ann")
    assert await hand.ledger.left() == [b"ann"]
    assert await hand.ledger.silent(5) == []  # which would be a loss
    await hand.announce("ann")
    assert await hand.ledger.left() == []
    assert await hand.ledger.leave(b"ann", silent_s=30) is None
    await hand.goodbye("ann")
    assert await hand.ledger.leave(b"ann", silent_s=30) == 0
    assert await hand.ledger.trainers() == {}
    assert [e.text for e in await hand.events("trainer")] == ["ann joined", "ann left"]


async def test_trainer_is_silent_only_after_the_limit(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann")
    await hand.announce("bob")
    await client.call("ZINCRBY", keys.alive, -60, "ann")
    assert await hand.ledger.silent(30) == [b"ann"]
    assert await hand.ledger.leave(b"bob", silent_s=30) is None
    await hand.announce("ann")  # it came back in the last moment
    assert await hand.ledger.leave(b"ann", silent_s=30) is None
    await client.call("ZINCRBY", keys.alive, -60, "ann")
    assert await hand.ledger.leave(b"ann", silent_s=30) == 0
    assert [e.text for e in await hand.events("trainer")][-1] == "ann was not heard from for 30 s"


async def test_tasks_waiting_for_a_departed_owner_are_given_up(hand: Hand, client: Client) -> None:
    await hand.create()
    await hand.announce("owner", 3, 4)
    await hand.open(device=3)
    await hand.open(device=4)
    await hand.open(device=5)
    await client.call("XADD", hand.keys.tasks_of("owner"), "*", "m", b"junk")
    assert await hand.ledger.leave(b"owner") == 2
    view = await hand.ledger.look()
    assert [trigger.device for trigger in view.open] == [5]
    assert view.reasons("given_up") == {"owner gone": 2}
    assert {event.task for event in await hand.events()}.isdisjoint({view.open[0].task})
    assert not await exists(client, hand.keys.tasks_of("owner"))
    await hand.balanced()


@pytest.mark.parametrize("owned", [True, False], ids=["of an owner", "in the pool"])
async def test_admitted_task_is_not_given_up(hand: Hand, owned: bool) -> None:
    """A trainer may append to its inbox, and leave the task as if it had not answered."""
    await hand.create()
    if owned:
        await hand.announce("ann", 3)
    [trigger] = await hand.open(device=3)
    upload = await hand.trained(trigger)
    assert await hand.admit(upload) == [("admitted", "")]
    if owned:
        assert await hand.ledger.leave(b"ann") == 0
    else:
        await hand.announce("ann", 1)
        assert await hand.ledger.settle_unserved(60_000) == 0
    assert await hand.commit(1, upload) == "done"
    outcomes = (await hand.ledger.look()).outcomes
    assert (outcomes["applied"], outcomes["given_up"]) == (1, 0)
    await hand.balanced()


async def test_junk_on_the_register_hides_nobody_else(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Any trainer's user may write there; coordinators, the scheduler and status read it."""
    await hand.create()
    await hand.announce("ann", 7)
    junk: list[object] = [
        "x",
        7,
        [],
        {},
        {"owns": 7},
        {"owns": [b"\xff"]},
        {"owns": [], "at": msgpack.Timestamp(1)},
        {"owns": [], "pid": float("nan")},
    ]
    for n, data in enumerate((b"", b"\xc1", b"\x91" * 10_000 + b"\x01", *map(msgpack.packb, junk))):
        await client.call("HSET", keys.trainers, f"junk-{n}", data)
    await client.call("HSET", keys.trainers, b"\xff", msgpack.packb({"owns": []}))
    for field in (b"", b"seven", b"\xff", b"7.5", b"-1", b"07", "\u0663".encode(), b"9" * 5000):
        await client.call("HSET", keys.owners, field, "ann")
    await client.call("HSET", keys.owners, 8, b"\xff")
    await client.call("ZADD", keys.alive, 0, b"\xfe", 1, b"\xff")
    assert list(await hand.ledger.trainers()) == ["ann"]
    assert await hand.ledger.owners() == {7: "ann"}
    assert (await hand.ledger.look()).owned == (7, 8)
    assert await hand.ledger.leases(60_000, ["ann"]) == (0, [])
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await hand.ledger.left() == [b"\xfe"]
    assert await hand.ledger.silent(60) == [b"\xff"]
    for name in (b"ann", b"\xfe", b"\xff"):
        assert await hand.ledger.leave(name, silent_s=60 * (name != b"ann")) == 0
    assert await client.call("ZCARD", keys.alive) == 0
    told = [event.text for event in await hand.events("trainer")]
    assert told[-3:] == ["ann left", "\ufffd left", "\ufffd was not heard from for 60 s"]


# owners


async def test_trainer_owns_what_it_last_announced(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2, 3)
    await hand.announce("ann", 3, 4)
    assert await hand.ledger.owners() == {3: "ann", 4: "ann"}
    await hand.announce("ann")
    assert await hand.ledger.owners() == {}


async def test_device_stays_with_its_first_live_owner(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    for _ in range(3):
        await hand.announce("bob", 2, 3)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann", 3: "bob"}
    refusals = [event for event in await hand.events("trainer") if event.device is not None]
    assert [(event.device, event.text) for event in refusals] == [
        (2, "bob does not get device 2: it is owned by ann")  # told once
    ]
    await hand.ledger.leave(b"ann")
    await hand.announce("bob", 2, 3)
    assert await hand.ledger.owners() == {2: "bob", 3: "bob"}


async def test_disowning_a_device_takes_it_from_nobody_else(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Nor is what it owns, and goes on to own, new to it."""
    await hand.create()
    await hand.announce("ann", 1, 2)
    await hand.announce("bob", 2, 3)
    await client.call("XADD", keys.tasks, "*", "m", hand.trigger(device=3).assignment())
    await hand.announce("bob", 3)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann", 3: "bob"}
    assert await client.call("XLEN", keys.tasks) == 1


async def test_device_of_a_dead_trainer_passes_to_the_next_owner(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    await client.call("ZREM", keys.alive, "ann")
    await hand.announce("bob", 2)
    assert await hand.ledger.owners() == {1: "ann", 2: "bob"}


async def test_owner_missing_from_the_register_keeps_its_device(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    await client.call("HDEL", keys.trainers, "ann")  # as junk there is deleted
    await hand.announce("ann", 1, 2)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann"}
    assert [event.text for event in await hand.events("trainer")] == ["ann joined"]


async def test_unknown_devices_cannot_be_owned(hand: Hand) -> None:
    await hand.announce("ann", 9, 10)  # before the run: nobody knows
    await hand.create(devices=10)
    for _ in range(2):
        await hand.announce("bob", 0, 11)
    await hand.announce("ann", 9, 10)
    assert await hand.ledger.owners() == {0: "bob", 9: "ann"}
    [event] = [event for event in await hand.events("trainer") if event.device == 11]
    assert event.text == "bob does not get device 11: the run has 10 devices"


async def test_new_owner_takes_over_a_devices_waiting_tasks(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1)
    [task] = await hand.open(device=2)
    assert await client.call("XLEN", keys.tasks) == 1
    await hand.announce("ann", 1, 2)
    assert await client.call("XLEN", keys.tasks) == 0
    [(_, fields)] = await client.call("XRANGE", keys.tasks_of("ann"), "-", "+")
    assert Assignment.decode(fields[1]).task == task.task


async def test_pools_tasks_are_settled_if_only_owners_are_alive(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    [taken] = await hand.open(device=1)
    [(entry, _)] = await hand.take()
    await hand.open(device=2)
    await hand.open(device=3)
    assert await hand.ledger.settle_unserved(60_000) == 0  # somebody may come
    await hand.announce("ann", 1, 2)
    await hand.announce("pool")
    assert await hand.ledger.settle_unserved(60_000) == 0  # the pool serves anybody
    assert await client.call("XLEN", keys.tasks) == 2
    await hand.ledger.leave(b"pool")
    assert await hand.ledger.settle_unserved(60_000) == 1
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"nobody serves this device": 1}
    assert sorted(trigger.device for trigger in view.open) == [1, 2]
    # The one that was taken has its lease; when that ran out, its device's owner has it.
    await client.call("XCLAIM", keys.tasks, TRAINERS, "t", 0, entry.id, "IDLE", 61_000)
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await client.call("XLEN", keys.tasks) == 0
    assert await client.call("XPENDING", keys.tasks, TRAINERS) == [0, None, None, None]
    rows = await client.call("XRANGE", keys.tasks_of("ann"), "-", "+")
    assert [Assignment.decode(fields[1]).device for _, fields in rows] == [2, 1]
    assert Assignment.decode(rows[1][1][1]).task == taken.task
    await hand.balanced()


async def test_pool_serves_unowned_devices_while_it_has_a_trainer(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create(devices=4)

    async def served() -> tuple[int, ...]:
        return served_devices(await hand.ledger.look())

    assert await served() == (0, 1, 2, 3)  # somebody may come
    await hand.announce("ann", 1, 2)
    assert await served() == (1, 2)
    await hand.announce("bob")
    await hand.announce("cat")
    assert await served() == (0, 1, 2, 3)
    await hand.announce("bob", 3)  # it owns one now
    assert await served() == (0, 1, 2, 3)
    await hand.goodbye("cat")  # and is still on the register
    assert await served() == (1, 2, 3)
    await hand.announce("bob")
    assert await served() == (0, 1, 2, 3)
    await hand.ledger.leave(b"bob")
    assert await served() == (1, 2)
    await hand.ledger.leave(b"cat")
    assert not await client.call("EXISTS", keys.pool)
    await client.call("SADD", keys.pool, "ghost")  # that is not alive
    assert await served() == (1, 2)


async def test_junk_in_a_task_stream_stops_no_trainer(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Trainers may write these streams and the register, and not all that is there is ours."""
    await hand.create()
    await hand.open(device=3)
    junk: list[object] = [
        {"task": {"a": 1}, "device": 3},
        {"task": "x"},
        {"task": "x", "device": "3"},
        "x",
        [],
    ]
    for stream in (keys.tasks, keys.tasks_of("ann")):
        for one in (b"", b"\xc1", *map(msgpack.packb, junk)):
            await client.call("XADD", stream, "*", "m", one)
    for said in (b"\xc1", *(msgpack.packb({"owns": one}) for one in ([math.nan], [[1]], "1"))):
        await client.call("HSET", keys.trainers, "ann", said)
        await hand.announce("ann", 1)
    assert await hand.ledger.settle_unserved(60_000) == 1
    await hand.announce("ann", 1, 3)
    assert await hand.ledger.leave(b"ann") == 0
    await client.call("ZADD", keys.alive, 1, "nobody on the register")
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await client.call("XLEN", keys.tasks) == 7
    await hand.balanced()
