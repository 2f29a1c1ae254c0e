"""The stream of changes of the live page."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.core.messages import GiveUp
from fedstream.history.live import panels
from tests.fedstream.history.live.conftest import Serve
from tests.support import Hand, counted, wait_until


async def given_up(hand: Hand, n: int = 1) -> None:
    """So many tasks end, each with an event."""
    triggers = await hand.open(n)
    for trigger in triggers:
        await hand.admit(
            GiveUp(
                task=trigger.task,
                attempt="1",
                device=trigger.device,
                trainer="t",
                reason="dropped out",
            )
        )


async def test_nobody_looks_and_nothing_is_asked(serve: Serve, hand: Hand) -> None:
    """Not one command, before the first viewer and after the last."""
    await hand.create()
    async with serve() as page:
        await asyncio.sleep(0.1)  # as many looks as five
        assert page.service._broadcast._number == 0
        async with page.stream() as stream:
            await stream.until("parts")
        await wait_until(lambda: page.service._broadcast.viewers == 0)
        await wait_until(lambda: page.service._broadcast.picture is None)
        before = page.service._broadcast._number
        await given_up(hand, 2)
        await asyncio.sleep(0.2)  # ten looks
        assert page.service._broadcast._number == before


async def test_all_viewers_share_one_look(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve() as page, page.stream() as one, page.stream() as other:
        for stream in (one, other):
            await stream.until("parts")
        broadcast = page.service._broadcast
        before = broadcast._number
        await given_up(hand)
        parts = await one.until("parts")
        assert parts == await other.until("parts")
        assert "given up" in parts["events"]
        assert broadcast.viewers == 2
        assert broadcast._number > before
        assert len(broadcast._encoded) <= 2


async def test_only_what_changed_is_sent(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve() as page, page.stream() as stream:
        whole = await stream.until("parts")
        assert {"headline", "devices", "flow"} <= whole.keys()
        await given_up(hand)
        changed = await stream.until("parts")
        assert changed.keys() < whole.keys()


async def test_one_viewer_too_many_is_told(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve("page.viewers=1") as page, page.stream() as stream:
        await stream.until("parts")
        answer = await page.http.get("/live/stream")
        assert answer.status == 503
        assert "Retry-After" in answer.headers
        assert "page.viewers" in await answer.text()


async def test_the_end_is_told_with_the_last_look(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve() as page, page.stream() as stream:
        await stream.until("parts")
        await given_up(hand)
        await hand.ledger.finish("for a test")
        page.context.stop.set()
        names: list[str] = []
        while "over" not in names:
            name, data = await stream.next()
            names.append(name)
        assert "parts" in names
        assert data == "finished"
        assert await stream.next() == ("end", None)


async def test_fault_of_the_page_ends_neither_it_nor_its_coordinator(
    serve: Serve, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said; what happened meanwhile is shown afterwards."""
    await hand.create()
    async with serve() as page, page.stream() as stream:
        await stream.until("parts")
        with monkeypatch.context() as broken:
            broken.setattr(panels, "headline_html", lambda _scene: 1 / 0)
            await given_up(hand)
            assert "ZeroDivisionError" in await stream.until("trouble")
            assert (await page.http.get("/")).status == 200  # with what was known before
        assert "given up" in (await stream.until("parts"))["events"]
        assert counted(page.context, "fedstream_page_faults_total") == 1
