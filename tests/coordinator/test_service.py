"""The coordinator against a real Redis: triggers become tasks, answers enter the queue, and bad
input blocks nothing."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Group
from fedstream.core.messages import Assignment, GiveUp
from tests.coordinator.waiting import dead, is_open, queued, tasks
from tests.support import Hand, Proxy, context, counted, running, wait_until

# the run of things


async def test_trigger_becomes_a_task_and_its_answer_is_queued(make: Any, run: Hand) -> None:
    watched = context()
    async with running(make(), watched):
        triggers = await run.request(2)
        (first, one), (second, two) = await tasks(run, 2)
        assert [one, two] == [Assignment.decode(trigger.assignment()) for trigger in triggers]
        upload = await run.trained(one)
        gone = GiveUp(
            task=two.task, attempt="1", device=two.device, trainer="t", reason="dropped out"
        )
        assert await run.outbox.answer(run.keys.tasks, first, upload)
        assert await run.outbox.answer(run.keys.tasks, second, gone)
        assert await queued(run, 1) == [upload]
        await wait_until(lambda: is_open(run, 1))
        view = await run.ledger.look(inboxes=True)
        assert view.reasons("given_up") == {"dropped out": 1}
        assert (view.triggers, view.inbox) == (0, 0)
        await run.balanced()
        answers, dispatched = "fedstream_answers_total", "fedstream_tasks_dispatched_total"
        for verdict, reason in (("admitted", ""), ("given_up", "dropped out")):
            labels = {"verdict": verdict, "reason": reason}
            await wait_until(lambda: counted(watched, answers, **labels) == 1)  # noqa: B023
        assert counted(watched, dispatched, verdict="sent") == 2


async def test_trainers_reasons_do_not_become_labels(make: Any, run: Hand) -> None:
    watched = context()
    async with running(make(), watched):
        await run.request(5)
        for n, (entry, task) in enumerate(await tasks(run, 5)):
            mood = GiveUp(
                task=task.task, attempt="1", device=task.device, trainer="t", reason=f"mood {n}"
            )
            assert await run.outbox.answer(run.keys.tasks, entry, mood)
        answers = "fedstream_answers_total"
        labels = {"verdict": "given_up", "reason": "another reason"}
        await wait_until(lambda: counted(watched, answers, **labels) == 5)
        ended = {"outcome": "given_up", "reason": "another reason"}
        await wait_until(lambda: counted(watched, "fedstream_run_tasks_total", **ended) == 5)
    assert b"mood" not in generate_latest(watched.registry)
    assert [event.text for event in await run.events()] == [f"mood {n}" for n in range(5)]


async def test_coordinator_may_start_before_the_run(make: Any, hand: Hand) -> None:
    async with running(make(), context()) as coordinator:
        await wait_until(lambda: groups(hand))
        assert not coordinator.done()
        await hand.create()
        await hand.request()
        await tasks(hand, 1)


async def groups(hand: Hand) -> bool:
    """Its consumer groups are there."""
    names = [hand.keys.triggers, hand.keys.inbox("pool")]
    return bool(await hand.client.call("EXISTS", *names) == 2)


async def test_replicas_share_the_work_without_duplicates(make: Any, run: Hand) -> None:
    async with (
        running(make(name="coordinator-0"), context()),
        running(make(name="coordinator-1"), context()),
    ):
        await run.request(40)
        found = await tasks(run, 40)
        assert len({task.task for _, task in found}) == 40
        for entry, task in found:
            upload = await run.trained(task)
            await run.outbox.answer(run.keys.tasks, entry, upload)
        assert len({upload.task for upload in await queued(run, 40)}) == 40
        await run.balanced()


async def test_size_limit_is_configurable(make: Any, run: Hand) -> None:
    async with running(make(max_update_bytes=run.layout.nbytes - 1), context()):
        await run.request()
        [(entry, task)] = await tasks(run, 1)
        await run.outbox.answer(run.keys.tasks, entry, await run.trained(task))
        await wait_until(lambda: is_open(run, 0))
        assert (await run.ledger.look()).reasons("refused") == {"too large": 1}


async def test_self_triggered_tasks_are_limited(make: Any, run: Hand) -> None:
    async with running(make(open_limit=2, anarchic=True), context()):
        for _ in range(4):
            await run.outbox.say(run.trigger(origin="ann"))
        await tasks(run, 2)
        await wait_until(lambda: strays(run, 2))


async def strays(hand: Hand, n: int) -> bool:
    return sum((await hand.ledger.look()).reasons("stray").values()) == n


async def test_entries_read_together_are_decided_in_one_exchange(
    make: Any, run: Hand, redis: RedisSettings
) -> None:
    dispatch = Script("dispatch")._sha.encode()
    writes = 0

    def count(data: bytes) -> bool:
        nonlocal writes
        writes += dispatch in data
        return False

    async with Proxy(redis) as proxy:
        proxy.refuse = count
        await run.request(20)
        async with running(make(redis=proxy.settings), context()):
            await tasks(run, 20)
            assert 1 <= writes <= 2  # more than one only where the proxy saw it in parts


# bad input


@pytest.mark.parametrize("stream", ["triggers", "inbox:pool"])
async def test_junk_becomes_dead_letters_and_blocks_nothing(
    make: Any, run: Hand, stream: str
) -> None:
    await run.client.call("XADD", run.keys.prefix + stream, "*", "m", b"junk")
    await run.client.call("XADD", run.keys.prefix + stream, "*", "other", b"field")
    async with running(make(), context()):
        letters = await dead(run, 2)
        assert [(letter.stream, letter.data) for letter in letters] == [
            (stream, b"junk"),
            (stream, b""),
        ]
        assert all("not m" in letter.reason for letter in letters)
        await run.request()
        [(entry, task)] = await tasks(run, 1)
        await run.outbox.answer(run.keys.tasks, entry, await run.trained(task))
        await queued(run, 1)


async def poisoned(run: Hand, name: str, device: int) -> None:
    """The device's owner was given its task three times."""
    await run.announce(name, device)
    await run.request(device=device)
    await run.dispatch()
    owner = Group(run.client, run.keys.tasks_of(name), TRAINERS, name)
    await owner.ensure()
    await owner.read()
    for _ in range(2):
        await owner.claim(idle_ms=0, most=9, own=True)


async def test_sweeps_cover_every_owner_in_turn(
    make: Any, run: Hand, client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.broker.cleanup._AT_ONCE", 3)
    for device in (0, 1, 3, 4, 5):
        await run.announce(f"o{device}", device)
    await poisoned(run, "o2", 2)
    await poisoned(run, "o6", 6)
    await client.call("SET", keys.tasks_of("o5"), "x")
    await client.call("HSET", keys.owners, 7, "ghost", 8, "o-ghost", 9, "z-ghost")
    async with running(make(lease_s=0.05), context()):
        letters = await dead(run, 2)
        assert {letter.stream for letter in letters} == {"tasks:pool/o2", "tasks:pool/o6"}

        async def mended() -> bool:
            aside = await client.call("EXISTS", keys.quarantine(keys.tasks_of("o5")))
            return bool(aside) and sorted(await run.ledger.owners()) == list(range(7))

        await wait_until(mended)
    await run.balanced()


async def test_sweep_needs_no_exchange_per_owner(
    make: Any, run: Hand, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.sweep._SWEEP_S", 0.0)
    said = dict.fromkeys(("claim", "measure"), 0)

    def count(data: bytes) -> bool:
        for name in said:
            said[name] += Script(name)._sha.encode() in data
        return False

    for device in range(10):
        await run.announce(f"o{device}", device)
    async with Proxy(redis) as proxy:
        proxy.refuse = count
        async with running(make(redis=proxy.settings), context()):
            await wait_until(lambda: said["measure"] > 5)
    # Its two groups, at each sweep and at the start.
    assert said["claim"] <= 2 * (said["measure"] + 2)
