"""Foreign values in Redis, and missing ones: coordinators report them and work on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedstream.broker import cleanup
from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, TRAINERS, Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.streams import Group
from fedstream.coordinator import sweep
from fedstream.core.errors import Foreign, Unavailable
from tests.support import Hand, context, counted, running, wait_until

LARGEST = f"{2**64 - 1}-{2**64 - 1}"


@pytest.fixture
async def run(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> Hand:
    """A run that was created; what is missing is looked for at every sweep."""
    monkeypatch.setattr(sweep, "_SEARCH_S", 0.0)
    monkeypatch.setattr(sweep, "_SWEEP_S", 0.02)
    await hand.create()
    await hand.tasks.ensure()
    return hand


@pytest.fixture
def make(make: Any) -> Any:
    """A coordinator that serves the pool and a site."""
    return partial(make, sites=("pool", "north"))


async def works(run: Hand) -> None:
    """A task goes its way, from its trigger into the queue."""
    done = len(await run.queue())
    await run.tasks.ensure()
    await run.request()

    async def taken() -> Any:
        return await run.take()

    [(entry, task)] = await wait_until(taken)
    upload = await run.trained(task)
    assert await run.outbox.answer(run.keys.tasks, entry, upload) == "said"

    async def admitted() -> bool:
        return len(await run.queue()) == done + 1

    await wait_until(admitted)


MOVED_ASIDE = (
    *("events", "inbox:pool", "inbox:north", "triggers", "tasks"),
    *("alive", "trainers", "owners", "pool", "rates", "sites"),
    *("evaluation", "evaluations", "measured"),
)


@pytest.mark.parametrize("when", ["before", "while it runs"])
async def test_foreign_values_are_moved_aside_and_the_run_continues(
    make: Any, run: Hand, client: Client, keys: Keys, when: str
) -> None:
    asides = [keys.prefix + "quarantine:" + name for name in MOVED_ASIDE]

    async def strike() -> None:
        await client.pipeline([("SET", keys.prefix + name, "x") for name in MOVED_ASIDE])

    if when == "before":
        await strike()
    with capture_logs() as logs:
        async with running(make(), context()):
            if when != "before":
                await works(run)
                await strike()

            async def are_aside() -> bool:
                return int(await client.call("EXISTS", *asides)) == len(asides)

            await wait_until(are_aside)
            await works(run)
    told = [line for line in logs if line["event"] == "foreign value moved aside"]
    assert sorted(line["aside"] for line in told) == sorted(asides)
    assert all(line["why"].startswith("it held a string, not a ") for line in told)
    for aside in asides:
        assert await client.call("GET", aside) == b"x"
        assert await client.call("PTTL", aside) > 0
    await run.balanced()


@pytest.mark.parametrize("name", ["inbox:north", "events"])
async def test_stream_at_its_last_id_is_moved_aside(
    make: Any, run: Hand, client: Client, keys: Keys, name: str
) -> None:
    """Nothing can be added to it: what a site does so to its own inbox harms nobody else."""
    key = keys.prefix + name
    await client.call("XADD", key, LARGEST, "m", "x")
    with pytest.raises(Foreign) as raised:
        await client.call("XADD", key, "*", "m", "x")
    assert raised.value.retriable
    with capture_logs() as logs:
        async with running(make(), context()):
            await works(run)

            async def can_be_written() -> bool:
                try:
                    await client.call("XADD", key, "*", "m", "x")
                except Foreign:
                    return False
                return True

            await wait_until(can_be_written)
    [told] = [line for line in logs if line["event"] == "foreign value moved aside"]
    assert told["why"] == f"an entry had the id {LARGEST}"


async def test_inbox_beyond_its_limit_is_deleted(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    inbox = keys.inbox("north")
    await client.pipeline([("XADD", inbox, "*", "m", "x")] * 200)
    with capture_logs() as logs:
        async with running(make(inbox_limit=50), context()):

            async def is_gone() -> bool:
                return int(await client.call("XLEN", inbox)) == 0

            await wait_until(is_gone)
            await works(run)
    whys = [line["why"] for line in logs if line["event"] == "foreign value moved aside"]
    assert "it had more than 50 entries" in whys
    assert not await client.call("EXISTS", keys.quarantine(inbox))


async def test_foreign_state_key_is_logged_once_and_left_alone(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    await client.call("SET", keys.queue, "x")
    with capture_logs() as logs:
        async with running(make(), context()) as working:
            await wait_until(lambda: [one for one in logs if one["event"].startswith("a key of")])
            assert not working.done()
            await client.call("DEL", keys.queue)
            await works(run)
    assert [line["key"] for line in logs if line["event"].startswith("a key of")] == [keys.queue]


async def test_devices_of_vanished_owners_are_free_again(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    await client.call("HSET", keys.owners, "3", "ghost", "99999", "ghost", "junk", b"\xff")
    assert (await run.ledger.look()).owned == (3,)  # the run has ten
    await run.request(device=3)
    await run.dispatch()
    assert await client.call("XLEN", keys.tasks_of("ghost")) == 1
    async with running(make(), context()):

        async def are_free() -> bool:
            return (await run.ledger.look()).owned == ()

        await wait_until(are_free)
        await works(run)
    assert (await run.ledger.look()).reasons("given_up") == {"owner gone": 1}
    await run.balanced()


# what a site never lets expire


async def test_sites_keys_without_an_expiry_get_one(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    forgotten = [keys.update("north/t.a1"), keys.workspace("north", "t")]
    far, honest = keys.update("north/far.a1"), keys.update("north/honest.a1")
    year_ms = 365 * 24 * 3600 * 1000
    await client.pipeline(
        [
            ("HSET", forgotten[0], "size", 16),
            ("SET", forgotten[1], "x"),
            ("HSET", far, "size", 16),
            ("PEXPIRE", far, year_ms),
            ("HSET", honest, "size", 16),
            ("PEXPIRE", honest, 60_000),
        ]
    )
    admitted = await run.admitted()
    with capture_logs() as logs:
        async with running(make(), context()):

            async def all_expire() -> bool:
                lives = await client.pipeline([("PTTL", key) for key in (*forgotten, far)])
                return all(0 < ms < year_ms // 2 for ms in lives)

            await wait_until(all_expire)
            await works(run)
    lives = await client.pipeline([("PTTL", key) for key in (*forgotten, far, honest)])
    assert [ms <= most for ms, most in zip(lives, (6e5, 6e5, 864e5, 6e4), strict=True)] == [
        True
    ] * 4
    assert lives[2] > 6e5
    assert await client.call("PTTL", keys.queued(admitted.blob)) == -1
    told = [line for line in logs if line["event"].startswith("site left keys")]
    assert sum(line["keys"] for line in told) == 3
    assert {line["first"] for line in told} <= {*forgotten, far}


async def test_copies_a_site_no_longer_needs_are_deleted(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    await client.call("HSET", keys.device(3), "digest", "d", "0", "x")
    await run.announce("edge", 3, site="north")
    await run.request(device=3)
    await run.dispatch()
    assert await client.call("EXISTS", keys.control("north", 3))
    async with running(make(), context()):
        await run.ledger.leave(b"north/edge")

        async def is_gone() -> bool:
            return not await client.call("EXISTS", keys.control("north", 3))

        await wait_until(is_gone)
        await works(run)


async def test_task_streams_of_unknown_trainers_get_an_expiry(
    make: Any, run: Hand, client: Client, keys: Keys
) -> None:
    await run.announce("own", 3)
    await run.announce("pool")  # else the sweep gives up what nobody has taken yet
    names = ("north/ghost", "ghost", "own")
    for name in names:
        await Group(client, keys.tasks_of(name), TRAINERS, "t").ensure()
    async with running(make(), context()):

        async def lives() -> list[int]:
            return await client.pipeline([("PTTL", keys.tasks_of(name)) for name in names])

        async def expire() -> bool:
            return min((await lives())[:2]) > 0

        await wait_until(expire)
        assert (await lives())[2] == -1
        await works(run)


# tasks that nobody has


@pytest.mark.parametrize("how", ["deleted", "acknowledged", "trigger", "stream"])
async def test_open_task_without_an_entry_is_given_up(
    make: Any, run: Hand, client: Client, keys: Keys, how: str
) -> None:
    """By a member of the pool that deletes what it should do, or acknowledges it and leaves it."""
    lost, kept = await run.request(2)
    if how == "trigger":
        await client.call("DEL", keys.triggers)
        gone = {lost.task, kept.task}
    else:
        await run.dispatch()
        (entry, task), _ = await run.take()
        assert task.task == lost.task
        if how == "stream":
            await client.call("DEL", keys.tasks)
        else:
            assert await client.call("XACK", keys.tasks, TRAINERS, entry.id) == 1
        if how == "deleted":
            assert await client.call("XDEL", keys.tasks, entry.id) == 1
        gone = {lost.task, kept.task} if how == "stream" else {lost.task}
    async with running(make(), context()):

        async def given_up() -> bool:
            return (await run.ledger.look()).outcomes["given_up"] == len(gone)

        await wait_until(given_up)
        await works(run)
    view = await run.ledger.look()
    assert view.reasons("given_up") == {"entry lost": len(gone)}
    assert {one.task for one in view.open} & {lost.task, kept.task} == {lost.task, kept.task} - gone
    if how == "acknowledged":
        assert len(await client.call("XRANGE", keys.tasks, entry.id, entry.id)) == 0
    await run.balanced()


async def searched(hand: Hand, seen: dict[str, str]) -> tuple[int, dict[str, str]]:
    """A whole search for lost tasks: how many were given up, and those seen without an entry."""
    lost, found, cursor = await hand.ledger.find_lost(seen)
    assert cursor == b"0"
    return lost, found


async def test_task_with_an_answer_in_transit_is_not_lost(run: Hand, keys: Keys) -> None:
    """Not before everything was read that was said by then, however long that takes."""
    await run.request(device=1)
    await run.dispatch()
    [(entry, task)] = await run.take()
    assert await searched(run, {}) == (0, {})
    upload = await run.trained(task)
    assert await run.outbox.answer(keys.tasks, entry, upload) == "said"
    seen: dict[str, str] = {}
    for _ in range(3):
        lost, seen = await searched(run, seen)
        assert (lost, list(seen)) == (0, [task.task])
    inbox = Group(run.client, keys.inbox("pool"), COORDINATORS, "c")
    await inbox.ensure()
    [said] = await inbox.read(block_ms=0)
    await run.outbox.say(run.trigger(origin="t"))  # more is said meanwhile: it makes no difference
    assert (await searched(run, seen))[0] == 0
    assert await run.ledger.admit(said, upload, size_limit=1 << 20) == ("admitted", "")
    assert await searched(run, seen) == (0, {})
    await run.balanced()


async def test_task_that_was_seen_as_a_trigger_is_not_lost_with_its_answer_in_transit(
    run: Hand, keys: Keys
) -> None:
    """A trigger's entry says nothing of an answer that was sent after it was handed out."""
    await run.request(device=1)
    _, seen = await searched(run, {})
    assert len(seen) == 1, "it has no entry yet"
    await run.dispatch()
    [(entry, task)] = await run.take()
    assert await run.outbox.answer(keys.tasks, entry, await run.trained(task)) == "said"
    for _ in range(3):
        lost, seen = await searched(run, seen)
        assert (lost, list(seen)) == (0, [task.task])


async def test_parts_of_a_search_follow_one_another_at_every_sweep(
    make: Any, run: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lost task among 10,000 would stay open for minutes."""
    await run.request(3000)
    find, leases = CoordinatorLedger.find_lost, CoordinatorLedger.leases
    at, sweeps = list[bytes](), list[int]()

    async def finds(self: CoordinatorLedger, seen: Any, cursor: bytes) -> Any:
        monkeypatch.setattr(sweep, "_SEARCH_S", 1e9)
        lost, found, after = await find(self, seen, cursor)
        at.append(after)
        return lost, found, after

    async def sweeps_on(self: CoordinatorLedger, *arguments: Any) -> Any:
        sweeps.append(len(at))
        return await leases(self, *arguments)

    monkeypatch.setattr(CoordinatorLedger, "find_lost", finds)
    monkeypatch.setattr(CoordinatorLedger, "leases", sweeps_on)
    async with running(make(), context()):
        await wait_until(lambda: b"0" in at)
        done = len(sweeps)
        await wait_until(lambda: len(sweeps) > done + 5)
    assert at.index(b"0") == len(at) - 1 > 0  # the next search waits
    assert sweeps[: len(at)] == [*range(1, len(at) + 1)]


async def test_missing_task_waits_only_for_earlier_inbox_entries(
    run: Hand, client: Client, keys: Keys
) -> None:
    await run.request(device=1)
    await run.dispatch()
    [(entry, task)] = await run.take()
    await run.outbox.say(run.trigger(origin="before"))
    await client.call("XACK", keys.tasks, TRAINERS, entry.id)
    await client.call("XDEL", keys.tasks, entry.id)
    _, seen = await searched(run, {})
    await run.outbox.say(run.trigger(origin="after"))
    lost, seen = await searched(run, seen)
    assert (lost, list(seen)) == (0, [task.task])
    [before, _] = await client.call("XRANGE", keys.inbox("pool"), "-", "+")
    await client.call("XDEL", keys.inbox("pool"), before[0])
    assert await searched(run, seen) == (1, {})


async def test_site_workspaces_are_limited(
    make: Any, run: Hand, keys: Keys, client: Client
) -> None:
    """Each pass counts anew: what may stay does."""
    names = [keys.workspace("north", str(n)) for n in range(9)]
    for name in names:
        await client.call("SET", name, bytes(1000), "PX", 600_000)

    async def left() -> int:
        return int(await client.call("EXISTS", *names))

    made = make(site_workspace_bytes=3500)
    with capture_logs() as logs:
        watched = context()
        async with running(made, watched):

            def swept_at() -> float:
                return counted(watched, "fedstream_run_looked_timestamp_seconds")

            async def fits() -> bool:
                return await left() <= 3

            await wait_until(fits)
            swept = swept_at()

            def again() -> bool:
                return swept_at() > swept + 0.1

            await wait_until(again)
            assert await left() == 3
    told = [line for line in logs if "over its workspace limit" in line["event"]]
    assert {(line["site"], line["most"]) for line in told} == {("north", 3500)}


async def test_failed_pass_does_not_count_towards_the_next(
    make: Any, run: Hand, keys: Keys, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a site that has more than half of what it may would lose what it may keep."""
    names = [keys.workspace("north", str(n)) for n in range(3)]
    for name in names:
        await client.call("SET", name, bytes(1000), "PX", 600_000)
    looked: list[set[str]] = []

    async def fails(*arguments: Any) -> set[str]:
        looked.append(await cleanup.cap_workspaces(*arguments))
        if len(looked) == 1:
            raise Unavailable("between two commands")
        return looked[-1]

    monkeypatch.setattr(sweep, "cap_workspaces", fails)
    async with running(make(site_workspace_bytes=3500), context()):
        await wait_until(lambda: len(looked) > 2)
    assert looked[:3] == [set()] * 3
    assert await client.call("EXISTS", *names) == 3
