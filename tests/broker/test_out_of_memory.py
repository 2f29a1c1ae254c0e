"""Out of memory, every script does nothing at all rather than half of what it should.

Redis decides when a script starts whether memory is short, and then fails the first write that
takes any; what was written before that stays. So a state is made in which the script would do all
it can, memory runs out, and nothing may have changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fedstream.broker import blobs, scripts
from fedstream.broker.cleanup import mend, some_keys
from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.ledger.evaluator import OpenEvaluation
from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.core.errors import OutOfMemory
from fedstream.core.messages import (
    CloseRound,
    DevicesEvaluated,
    Event,
    GiveUp,
    Heartbeat,
    Measured,
    Presence,
    SetQuarantine,
    Trigger,
    Withdraw,
    task_id,
)
from fedstream.core.records import Commit, End
from tests.support import SIZE_LIMIT, Hand, full, model_of, snapshot

Step = Callable[[], Awaitable[Any]]
Scene = Callable[[Hand], Awaitable[Step]]


async def trigger(hand: Hand) -> Step:
    await hand.create()
    return lambda: hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()])


async def dispatch(hand: Hand) -> Step:
    await hand.create()
    await hand.request()
    return await dispatching(hand)


async def dispatch_own(hand: Hand) -> Step:
    await hand.create()
    await hand.announce("owner", 3)
    return await taking_up(hand, hand.trigger(origin="owner", device=3))


async def dispatch_over_the_limit(hand: Hand) -> Step:
    await hand.create()
    return await taking_up(hand, hand.trigger(origin="ann"), limit=0)


async def taking_up(hand: Hand, trigger: Trigger, limit: int = 9) -> Step:
    await hand.outbox.say(trigger)
    [entry] = await hand.heard()
    return lambda: hand.ledger.take_up("pool", entry, trigger, anarchic=True, rate=9, limit=limit)


async def dispatching(hand: Hand) -> Step:
    await hand.triggers.ensure()
    [entry] = await hand.triggers.read()
    asked = Trigger.decode(entry.data)
    return lambda: hand.ledger.dispatch(entry, asked)


async def close_round(hand: Hand) -> Step:
    await hand.create()
    tasks = await hand.open(2)
    closing = CloseRound(version=0, tasks=tuple(t.task for t in tasks), why="time is up")
    await hand.triggers.ensure()
    await hand.ledger.ask(closing)
    [entry] = await hand.triggers.read()
    return lambda: hand.ledger.close_round(entry, closing)


async def withdraw(hand: Hand) -> Step:
    await hand.create()
    tasks = await hand.open(2)
    await hand.triggers.ensure()
    wish = Withdraw(tasks=tuple(t.task for t in tasks), why="timed out")
    await hand.ledger.ask(wish)
    [entry] = await hand.triggers.read()
    return lambda: hand.ledger.withdraw(entry, wish)


async def answer(hand: Hand) -> Step:
    await hand.create()
    await hand.open()
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task)
    return lambda: hand.outbox.answer(hand.keys.tasks, entry, upload)


def admit(**changes: Any) -> Scene:
    async def scene(hand: Hand) -> Step:
        await hand.create()
        [trigger] = await hand.open()
        upload = await hand.trained(trigger, **changes)
        [entry] = await hand.said(upload)
        return lambda: hand.ledger.admit(entry, upload, size_limit=SIZE_LIMIT)

    return scene


async def admit_a_stray(hand: Hand) -> Step:
    await hand.create()
    upload = await hand.trained(hand.trigger())
    [entry] = await hand.said(upload)
    return lambda: hand.ledger.admit(entry, upload, size_limit=SIZE_LIMIT)


async def admit_a_giving_up(hand: Hand) -> Step:
    await hand.create()
    [trigger] = await hand.open()
    tired = GiveUp(task=trigger.task, attempt="1", device=1, trainer="t", reason="tired")
    [entry] = await hand.said(tired)
    return lambda: hand.ledger.admit(entry, tired, size_limit=SIZE_LIMIT)


async def set_quarantine(hand: Hand) -> Step:
    await hand.create()
    return lambda: hand.ledger.set_quarantine(SetQuarantine(devices=(3,)))


async def create(hand: Hand) -> Step:
    await hand.updater.acquire()
    version = await hand.publish(0)
    return lambda: hand.ledger.create(hand.updater.token, hand.run(), version)


async def commit_a_version(hand: Hand) -> Step:
    await hand.create()
    upload = await hand.admitted()
    [(entry, _)] = await hand.queue()
    commit = Commit(
        versions=[await hand.publish(1)],
        held=(),
        mean_staleness=0.0,
        ends=[End(upload.task, "a1", "applied")],
        entries=[entry],
        updates=[upload.blob],
        retired=["0.1"],
        finish="version 1 reached",
    )
    return lambda: hand.ledger.commit(hand.updater.token, commit)


async def commit_a_refusal(hand: Hand) -> Step:
    await hand.create()
    upload = await hand.admitted()
    return lambda: hand.commit(None, upload)


async def hand_out(hand: Hand) -> Step:
    await hand.create()
    model = model_of(hand.layout, 1.0)
    digest, token = model.digest(), hand.updater.token
    await blobs.write(hand.client, hand.keys.staged(1, digest), model, expire_s=60)
    return lambda: hand.ledger.hand_out(token, 1, digest, model.layout.nbytes)


async def bury(hand: Hand) -> Step:
    await hand.create()
    await hand.open()
    [(entry, task)] = await hand.take()
    return lambda: hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "poison", task=task)


async def retry(hand: Hand) -> Step:
    await hand.create()
    [trigger] = await hand.open()
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "poison", task=task)
    [(letter, _)] = await hand.client.call("XRANGE", hand.keys.dead, "-", "+")
    again = hand.trigger(device=task.device)
    return lambda: hand.ledger.retry(letter.decode(), trigger.task, again)


async def announce(hand: Hand) -> Step:
    await hand.create()
    await hand.outbox.announce("ann", (1, 2))
    [entry] = await hand.heard()
    return lambda: hand.ledger.hear("pool", entry, Presence.decode(entry.data), most=9, rate=1000)


async def relay(hand: Hand) -> Step:
    await hand.create()
    event = Event(what="error", service="t", time=1.0)
    await hand.outbox.say(event)
    [entry] = await hand.heard()
    return lambda: hand.ledger.relay("pool", entry, event, most=9, why="event over the limit")


async def find_lost(hand: Hand) -> Step:
    await hand.create()
    await hand.open()
    await hand.client.call("DEL", hand.keys.tasks)
    _, seen, _ = await hand.ledger.find_lost({})
    return lambda: hand.ledger.find_lost(seen)


async def beat(hand: Hand) -> Step:
    await hand.create()
    await hand.announce("ann", 1)
    [entry] = await hand.said(Heartbeat(trainer="ann", owns="of a list"))
    said = Heartbeat.decode(entry.data)
    return lambda: hand.ledger.beat("pool", entry, said, rate=1000)


async def leave(hand: Hand) -> Step:
    await hand.create()
    await hand.announce("ann", 1)
    await hand.open(device=1)
    return lambda: hand.ledger.leave(b"ann")


async def settle(hand: Hand) -> Step:
    await hand.create()
    await hand.open(device=1)
    await hand.announce("ann", 2)
    return lambda: hand.ledger.settle_unserved(0)


async def finish(hand: Hand) -> Step:
    await hand.create()
    return lambda: hand.ledger.finish("enough")


async def tell(hand: Hand) -> Step:
    await hand.create()
    return lambda: hand.ledger.tell(Event(what="error", service="t", time=1.0))


async def invite(hand: Hand) -> Step:
    await hand.create()
    return lambda: hand.ledger.invite("gateway", {3: "ab"}, seconds=60)


async def enrol(hand: Hand) -> Step:
    await hand.create()
    await hand.ledger.invite("gateway", {3: "ab"}, seconds=60)
    gateway = GatewayLedger(hand.client, hand.keys, "g", "gateway")
    return lambda: gateway.enrol(3, "ab", "a key", "n", nonce_s=60)


async def put_part(hand: Hand) -> Step:
    await hand.create()
    key, note = hand.keys.update("gateway/t.a"), hand.keys.upload_note("gateway", "t.a")
    blob = PartialBlob(hand.client, key, note, expire_s=60)
    await blob.begin(9, b"note")
    return lambda: blob.put(0, memoryview(bytes(9)), b"note", b"complete")


async def evaluating(hand: Hand) -> OpenEvaluation:
    """An evaluation whose tasks are not open yet."""
    await hand.create()
    await hand.announce("t")
    await (await open_evaluation(hand, created=True))()
    found = await hand.ledger.evaluation()
    assert found is not None
    return found


async def open_evaluation(hand: Hand, *, created: bool = False) -> Step:
    if not created:
        await hand.create()
    head = await hand.ledger.head()
    assert head is not None
    id_ = task_id(1, bytes(10))
    return lambda: hand.ledger.open_evaluation(id_, head, [3], 4e9, nbytes=16)


async def ask_devices(hand: Hand) -> Step:
    evaluation = await evaluating(hand)
    task = evaluation.task(task_id(2, bytes(10)), 3)
    return lambda: hand.ledger.ask_devices(evaluation, 1.0, [task])


async def admit_measured(hand: Hand) -> Step:
    evaluation = await evaluating(hand)
    task = evaluation.task(task_id(2, bytes(10)), 3)
    await hand.ledger.ask_devices(evaluation, 1.0, [task])
    answer = Measured(task=task.task, attempt="a", device=3, trainer="t", version=0, base=task.base)
    await hand.client.call("XADD", hand.keys.inbox("pool"), "*", "m", answer.encode())
    [entry] = await hand.heard()
    return lambda: hand.ledger.admit_measured("pool", entry, answer, trusted=True)


async def end_evaluation(hand: Hand) -> Step:
    evaluation = await evaluating(hand)
    task = evaluation.task(task_id(2, bytes(10)), 3)
    await hand.ledger.ask_devices(evaluation, 1.0, [task])
    ended = DevicesEvaluated(
        evaluation=evaluation.id,
        version=0,
        blob=task.blob,
        base=task.base,
        devices=1,
        outcomes={"no answer in time": 1},
    )
    return lambda: hand.ledger.end_evaluation(0, ended)


SCENES = {
    "open_evaluation": open_evaluation,
    "ask_devices": ask_devices,
    "admit_measured": admit_measured,
    "end_evaluation": end_evaluation,
    "trigger": trigger,
    "dispatch": dispatch,
    "dispatch, own initiative": dispatch_own,
    "dispatch, over the limit": dispatch_over_the_limit,
    "close_round": close_round,
    "withdraw": withdraw,
    "finish_task": answer,
    "admit": admit(),
    "admit, refused": admit(layout="another"),
    "admit, blob missing": admit(write=False),
    "admit, stray": admit_a_stray,
    "admit, given up": admit_a_giving_up,
    "create": create,
    "commit": commit_a_version,
    "commit, refusal": commit_a_refusal,
    "hand_out": hand_out,
    "bury": bury,
    "retry": retry,
    "set_quarantine": set_quarantine,
    "invite": invite,
    "enrol": enrol,
    "put_part": put_part,
    "announce": announce,
    "beat": beat,
    "relay": relay,
    "find_lost": find_lost,
    "leave": leave,
    "settle_unserved": settle,
    "finish_run": finish,
    "tell": tell,
}
# Scripts that take no memory: they work when there is none, because they free it or only read.
NEEDS_NONE = {
    "acquire",
    "age_letters",
    "claim",
    "drop_copies",
    "hold",
    "look",
    "may",
    "measure",
    "mend",
    "reap",
    "release",
    "renew",
    "trim_registers",
    "renew_all",
    "retire",
    "scan",
    "set_access",
    "yield",
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
async def test_scripts_that_need_memory_do_nothing_without_it(
    hand: Hand, client: Client, keys: Keys, scene: Scene
) -> None:
    step = await scene(hand)
    before = await snapshot(client, keys)
    async with full(client):
        with pytest.raises(OutOfMemory):
            await step()
        assert await snapshot(client, keys) == before
    await step()
    assert await snapshot(client, keys) != before  # it would have done something


def test_every_script_is_tested() -> None:
    names = {script.name.removesuffix(".lua") for script in scripts._LUA.iterdir()} - {"prelude"}
    tried = {name.partition(",")[0] for name in SCENES}
    assert names - NEEDS_NONE == tried


async def test_freeing_memory_works_when_redis_is_full(hand: Hand, client: Client) -> None:
    await hand.create()
    await hand.open(2)
    (entry, _), _ = await hand.take()
    await hand.commit(1)
    await client.call("XADD", hand.keys.dead, "1-1", "m", "old")
    async with full(client):
        assert await hand.ledger.retire(hand.updater.token, ["0.1"]) == "done"
        assert await hand.ledger.kept() == {"1.1": 1}
        assert (await hand.ledger.look()).issued == 2
        assert await hand.tasks.renew(entry)
        assert await hand.tasks.renew_all([entry.id]) == {entry.id}
        taken, _ = await hand.tasks.claim(idle_ms=0, most=9, own=True)
        assert len(taken) == 2
        await hand.tasks.release(entry)
        await hand.scheduler.release()
        assert await hand.scheduler.acquire()
        keys = hand.keys
        await client.call("RENAME", keys.changes, keys.alive)
        mended = await mend(client, keys, inboxes=(), owners=(), most=9)
        assert mended == [(keys.alive, "it held a stream, not a zset")]
        assert await hand.ledger.age_letters(30) == 1
        assert (await hand.ledger.look()).counts["dead_letters_lost"] == 1
        _, names = await some_keys(client, keys, b"0")
        assert names
        await client.call("DEL", hand.keys.leader("updater"))  # it ran out: nobody was quicker
        assert await hand.updater.hold()
        assert await hand.ledger.set_access("gateway", [3], admit=False) == ("set", [3])
    await hand.balanced()
