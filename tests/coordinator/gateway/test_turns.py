"""Two requests for one upload: the newest takes over, whatever the older one waits for."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.coordinator.gateway.upload_locks import TakenOver, UploadLock, UploadLocks

LONG_S = 60.0


def soon(seconds: float = LONG_S) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_request_that_waits_is_taken_over() -> None:
    turns, never, log = UploadLocks(), asyncio.Event(), []

    async def first() -> None:
        async with turns.taken("a") as lock:
            log.append("first")
            try:
                await lock.within(soon(), never.wait)
            finally:
                log.append("first left")

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with turns.taken("a"):
        log.append("second")
    with pytest.raises(TakenOver):
        await older
    assert log == ["first", "first left", "second"]  # never both at once
    async with asyncio.timeout(10):
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
        async with turns.taken("a") as lock:
            await asyncio.sleep(0)  # the newer one comes now
            while True:
                taken.append(await lock.within(soon(), pieces.get))

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with asyncio.timeout(10), turns.taken("a"):
        assert taken == [0, 1, 2, 3, 4]
    with pytest.raises(TakenOver):
        await older


async def test_who_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.coordinator.gateway.upload_locks._LONGEST_S", 0.05)
    turns = UploadLocks()

    async def drips() -> None:
        await asyncio.sleep(0.001)

    async def first() -> None:
        async with turns.taken("a") as lock:
            while True:
                await lock.within(soon(), drips)

    older = asyncio.create_task(first())
    await asyncio.sleep(0)
    async with asyncio.timeout(10), turns.taken("a"):
        pass
    with pytest.raises(TakenOver):
        await older


async def test_other_uploads_do_not_wait() -> None:
    turns = UploadLocks()
    async with turns.taken("a"), asyncio.timeout(10), turns.taken("b"):
        pass


async def test_the_end_is_when_nobody_asks_any_more() -> None:
    turns = UploadLocks()
    async with turns.taken("a"):
        async with turns.taken("b"):
            ended = asyncio.create_task(turns.end())
        await asyncio.sleep(0.01)
        assert not ended.done()
    async with asyncio.timeout(10):
        await ended


async def test_time_runs_out_without_anybody_else() -> None:
    lock, never = UploadLock(), asyncio.Event()
    with pytest.raises(TimeoutError):
        await lock.within(soon(0.001), never.wait)
