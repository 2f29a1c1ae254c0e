"""Uploads at once, too slow or too many; and Redis full or away."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from typing import Any

import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.coordinator.gateway.upload_locks import TakenOver, UploadLock, UploadLocks
from fedstream.core.messages import GiveUp
from tests.coordinator.gateway.places import ends, serving
from tests.coordinator.gateway.uploading import (
    DEVICE,
    FORTY_FOUR_MB,
    SEVERAL,
    Scene,
    connected,
    queued,
    received,
)
from tests.support import Hand, Proxy, counted, full, wait_until

# two at once, slow senders, too many


async def test_two_connections_do_not_mix_their_bytes(make: Any, scene: Scene) -> None:
    """One hangs in the middle of a chunk; the later one takes over."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        older = await scene.sending(at, phone, 2 * CHUNK + 9)
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(2 * CHUNK)
        assert await older.status() == 409
        older.writer.write(b"\0" * CHUNK)  # it does not know yet
        async with scene.deciding():
            assert (await phone.patches(at, 2 * CHUNK)).receipt == (200, "admitted", None)
        older.close()
    assert (await queued(hand))[1] == phone.data


async def test_two_replicas_may_receive_the_same_upload(make: Any, scene: Scene) -> None:
    """Nothing is locked between them: both write the same, and the update counts once."""
    hand = await make(SEVERAL)
    async with scene.replica() as at, scene.replica(name="gw-1") as another:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        assert (await phone.looks(another)).headers["Upload-Offset"] == str(CHUNK)
        async with scene.deciding():
            told = await asyncio.gather(
                *(phone.patches(one, CHUNK) for one in (at, another) for _ in range(2))
            )
            assert {one.status for one in told} <= {200, 404, 409}
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}
    await hand.balanced()


async def test_replicas_do_not_mix_two_updates(make: Any, scene: Scene) -> None:
    """A device trained anew after a restart; its old connection hangs at the other replica."""
    hand = await make(SEVERAL)
    async with scene.replica() as at, scene.replica(name="gw-1") as another:
        phone = await scene.phone(at)
        old = await scene.sending(at, phone, 2 * CHUNK + CHUNK // 2)
        model = phone.data
        phone.data = bytes(reversed(model))
        phone.report["digest"] = hashlib.sha256(phone.data).hexdigest()
        assert (await phone.posts(another, phone.data[:CHUNK], complete=False)).status == 201
        old.writer.write(model[2 * CHUNK + CHUNK // 2 :])
        assert await old.status() in (404, 409)
        old.close()
        assert (await phone.looks(another)).headers["Upload-Offset"] == str(CHUNK)
        async with scene.deciding():
            told = await phone.patches(another, CHUNK)
            assert told.receipt[0] == 200, told
    assert (await queued(hand))[1] == phone.data


@pytest.mark.parametrize("drips", [False, True])
async def test_a_slow_sender_is_cut_off_and_may_go_on(make: Any, scene: Scene, drips: bool) -> None:
    """Whether it hangs or sends byte after byte: a chunk has its time."""
    await make(SEVERAL)
    async with scene.replica(chunk_s=0.3) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, CHUNK + 9)

        async def drip() -> None:
            while drips:
                slow.writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await slow.status() == 408
        dripping.cancel()
        slow.close()
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(CHUNK)
        async with scene.deciding():
            assert (await phone.patches(at, CHUNK)).receipt == (200, "admitted", None)


async def test_each_chunk_has_its_time(make: Any, scene: Scene) -> None:
    """A device that is slow but not too slow may take as long as it needs."""
    hand = await make(SEVERAL)
    async with scene.replica(chunk_s=2.0) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, CHUNK)
        for begin in range(CHUNK, len(phone.data), CHUNK):
            await asyncio.sleep(0.6)
            slow.writer.write(phone.data[begin : begin + CHUNK])
        async with scene.deciding():
            assert await slow.status() == 200
        slow.close()
    assert (await queued(hand))[1] == phone.data


async def test_more_uploads_than_there_is_room_for(make: Any, scene: Scene) -> None:
    """Whoever is too many is told when to come again; who only asks needs no room."""
    hand = await make(SEVERAL)
    async with scene.replica(uploads=1) as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        first = await scene.sending(at, phone, CHUNK)
        told = await other.posts(at, other.data)
        assert told.refusal == (503, "busy")
        assert int(told.headers["Retry-After"]) >= 1
        assert (await other.posts(at, complete=False)).status == 201
        assert (await other.patches(at, 0)).refusal == (503, "busy")
        assert (await other.looks(at)).headers["Upload-Offset"] == "0"
        first.close()
        await wait_until(lambda: not counted(at.context, "fedstream_gateway_uploads"))
        async with scene.deciding():
            assert (await other.patches(at, 0)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == other.data


async def test_who_sends_is_present(make: Any, scene: Scene) -> None:
    """However long it takes, a task is not given up while its update arrives; then it is."""
    hand = await make(SEVERAL)
    async with scene.replica(lease_s=1.0, away_s=60.0) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, 9)
        for _ in range(8):
            await asyncio.sleep(0.25)
            slow.writer.write(b"x")
        assert phone.offer.task.id in at.gateway.replica.sessions
        async with scene.deciding():
            await ends(hand, "given_up", "dropped out")
        slow.close()


async def test_a_stop_lets_uploads_finish(make: Any, scene: Scene) -> None:
    """Those that are being sent; others go on after it."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        assert (await other.posts(at, complete=False)).status == 201
        under_way = await scene.sending(at, phone, CHUNK + 9)
        at.context.stop.set()
        refused = await other.patches(at, 0)
        assert (refused.status, refused.headers["Connection"]) == (503, "close")
        assert (await other.looks(at)).headers["Upload-Offset"] == "0"
        await asyncio.sleep(0.05)
        assert not at.work.done()
        async with scene.deciding():
            under_way.writer.write(phone.data[CHUNK + 9 :])
            assert await under_way.status() == 200
            await asyncio.wait_for(at.work, 60)
        under_way.close()
    assert (await queued(hand))[1] == phone.data


# tasks that end before their update is there


async def kept_of(hand: Hand) -> list[bytes]:
    """The keys of updates that arrive, and of their notes."""
    found: list[bytes] = await hand.client.call("KEYS", hand.keys.prefix + "*")
    return [key for key in found if b"update:" in key or b":upload:" in key]


async def test_nothing_is_left_of_a_task_given_up(make: Any, scene: Scene) -> None:
    """However often a device begins, Redis does not fill up."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        under_way = await scene.sending(at, phone, CHUNK + 9)
        assert len(await kept_of(hand)) == 2
        assert (await at.give_up(DEVICE, phone.offer)).status == 200
        assert await kept_of(hand) == []
        under_way.writer.write(phone.data[CHUNK + 9 :])
        assert await under_way.status() == 404
        under_way.close()
        assert await kept_of(hand) == []


async def test_an_upload_can_not_begin_while_its_task_is_given_up(
    make: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once: whichever comes first to Redis, nothing is left."""
    hand = await make(SEVERAL)
    begin = PartialBlob.begin
    async with scene.replica() as at:
        phone = await scene.phone(at)

        async def late(blob: PartialBlob, size: int, note: bytes) -> None:
            assert (await at.give_up(DEVICE, phone.offer)).status == 200
            await begin(blob, size, note)

        monkeypatch.setattr(PartialBlob, "begin", late)
        told = await phone.posts(at, phone.data[:CHUNK], complete=False)
        assert told.refusal == (404, "unknown task")
        assert await kept_of(hand) == []


@pytest.mark.parametrize("is_decided", [True, False])
async def test_a_lost_lease_costs_an_update_only_once_its_task_has_ended(
    make: Any, scene: Scene, is_decided: bool
) -> None:
    """Another replica may have answered the task with it, and no coordinator read that yet."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        [held] = at.gateway.replica.sessions
        if is_decided:
            given_up = GiveUp(
                task=held.task.task,
                attempt=held.attempt,
                device=DEVICE,
                trainer="gw-0",
                reason="dropped out",
            )
            await at.gateway.replica.outbox.answer(held.stream, held.entry, given_up)
            async with scene.deciding():
                await ends(hand, "given_up", "dropped out")
        else:
            await hand.client.call("XACK", held.stream, TRAINERS, held.entry.id)
        opened = at.gateway._app.running
        await opened.tasks.renew()
        assert held.task.task not in at.gateway.replica.sessions
        assert len(await kept_of(hand)) == (0 if is_decided else 2)


# Redis


async def test_redis_full_costs_nothing_but_time(make: Any, scene: Scene, client: Client) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        async with full(client):
            told = await phone.patches(at, 2 * CHUNK)
            assert told.status == 503
            assert int(told.headers["Retry-After"]) >= 1
            assert (await phone.looks(at)).headers["Upload-Offset"] == str(2 * CHUNK)
        async with scene.deciding():
            assert (await phone.patches(at, 2 * CHUNK)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


@pytest.mark.parametrize("parameters", [64, SEVERAL])
async def test_the_reply_to_the_answer_is_lost(
    make: Any, scene: Scene, redis: RedisSettings, parameters: int
) -> None:
    """Redis has it, the gateway doesn't know: the device sends the end again."""
    hand = await make(parameters)
    async with Proxy(redis, hand.keys) as proxy, serving(hand, proxy.settings) as at:
        phone = await scene.phone(at)
        proxy.cut_reply_to = lambda data: b"EVALSHA" in data
        assert (await phone.posts(at, phone.data)).status == 503
        assert proxy.cut_replies == 1
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}


async def test_an_upload_takes_little_memory(make: Any, scene: Scene) -> None:
    """Of 44 MB that come as fast as they can, a chunk is held, and what was just received."""
    await make(FORTY_FOUR_MB)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        _, writer = await connected(at)
        writer.transport.set_write_buffer_limits(0)
        whole = memoryview(phone.data)
        tracemalloc.start()
        try:
            writer.write(phone.head("POST", phone.creating(complete=False), len(whole)))
            for begin in range(0, len(whole), CHUNK // 4):
                writer.write(whole[begin : begin + CHUNK // 4])
                await writer.drain()
            await wait_until(lambda: received(at) == len(whole))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 6 << 20, f"{peak / (1 << 20):.1f} MiB"
        writer.close()


# two requests for one upload, without a gateway

LONG_S = 60.0


def soon(seconds: float = LONG_S) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_request_that_waits_is_taken_over() -> None:
    turns, never, log = UploadLocks(), asyncio.Event(), []

    async def first() -> None:
        async with turns.taken("a") as turn:
            log.append("first")
            try:
                await turn.within(soon(), never.wait)
            finally:
                log.append("first left")

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with turns.taken("a"):
        log.append("second")
    with pytest.raises(TakenOver):
        await older
    assert log == ["first", "first left", "second"]  # never both at once
    async with asyncio.timeout(60):
        await turns.end()


async def test_of_several_only_the_newest_gets_its_turn() -> None:
    """Those between were taken over before they began."""
    turns, got, hold = UploadLocks(), [], asyncio.Event()

    async def ask(name: str) -> None:
        async with turns.taken("a"):
            got.append(name)
            await hold.wait()

    asked = [asyncio.create_task(ask(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    hold.set()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert got == ["first", "third"]
    assert [type(end) for end in ends] == [type(None), TakenOver, type(None)]


async def test_what_has_arrived_is_still_taken() -> None:
    """The older request ends when it has to wait, not before."""
    turns, pieces, taken = UploadLocks(), asyncio.Queue[int](), []
    for piece in range(5):
        pieces.put_nowait(piece)

    async def first() -> None:
        async with turns.taken("a") as turn:
            await asyncio.sleep(0)  # the newer one comes now
            while True:
                taken.append(await turn.within(soon(), pieces.get))

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with asyncio.timeout(60), turns.taken("a"):
        assert taken == [0, 1, 2, 3, 4]
    with pytest.raises(TakenOver):
        await older


async def test_who_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.coordinator.gateway.upload_locks._LONGEST_S", 0.05)
    turns = UploadLocks()

    async def drips() -> None:
        await asyncio.sleep(0.001)

    async def first() -> None:
        async with turns.taken("a") as turn:
            while True:
                await turn.within(soon(), drips)

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with asyncio.timeout(60), turns.taken("a"):
        pass
    with pytest.raises(TakenOver):
        await older


async def test_other_uploads_do_not_wait() -> None:
    turns = UploadLocks()
    async with turns.taken("a"), asyncio.timeout(60), turns.taken("b"):
        pass


async def test_the_end_is_when_nobody_asks_any_more() -> None:
    turns = UploadLocks()
    async with turns.taken("a"):
        async with turns.taken("b"):
            ended = asyncio.create_task(turns.end())
        await asyncio.sleep(0.01)
        assert not ended.done()
    async with asyncio.timeout(60):
        await ended


async def test_time_runs_out_without_anybody_else() -> None:
    turn, never = UploadLock(), asyncio.Event()
    with pytest.raises(TimeoutError):
        await turn.within(soon(0.001), never.wait)
