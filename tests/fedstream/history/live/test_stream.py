"""The stream of changes: nothing missing, nothing doubled, and said plainly if that can't be."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from fedstream.broker.ledger.live_page import LivePageLedger
from fedstream.core.errors import Unavailable
from fedstream.core.messages import GiveUp
from fedstream.history.live import rendering
from tests.fedstream.history.live.conftest import Serve, Stream
from tests.support import Hand, wait_until


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


async def told(hand: Hand) -> list[str]:
    """The ids of all events."""
    rows = await hand.client.call("XRANGE", hand.keys.events, "-", "+")
    return [id_.decode() for id_, _ in rows]


async def ids(stream: Stream, until: str) -> list[str]:
    """The ids of the lines up to this one."""
    found: list[str] = []
    while until not in found:
        found += [row[0] for row in await stream.until("rows")]
    return found


async def test_who_connects_again_misses_nothing_and_gets_nothing_twice(
    serve: Serve, hand: Hand
) -> None:
    """Cut twenty times, whatever was under way then."""
    await hand.create()
    await given_up(hand, 3)
    async with serve() as page:
        async with page.stream() as stream:
            await stream.until("parts")
        first = (await told(hand))[-1]
        found, last = list[str](), first
        for n in itertools.count():
            await given_up(hand, 1 + n % 3)
            headers = {"Last-Event-ID": last} if n % 2 else {}
            async with page.stream(last, **headers) as stream:
                rows = await stream.until("rows")
                found += [row[0] for row in rows]
                last = stream.last_id
                assert last == found[-1]
            if n == 20:
                break
        wanted = [one for one in await told(hand) if later(one, first)]
        if found[-1] != wanted[-1]:
            async with page.stream(last) as stream:
                found += await ids(stream, wanted[-1])
        assert found == wanted


def later(one: str, other: str) -> bool:
    a, b = (tuple(map(int, id_.split("-"))) for id_ in (one, other))
    return a > b


async def test_header_of_a_browser_that_reconnects_counts_more_than_its_address(
    serve: Serve, hand: Hand
) -> None:
    await hand.create()
    await given_up(hand, 4)
    events = await told(hand)
    async with serve() as page, page.stream(events[0], **{"Last-Event-ID": events[-2]}) as stream:
        assert [row[0] for row in await stream.until("rows")] == [events[-1]]


async def test_who_was_away_for_too_long_is_told_and_begins_anew(serve: Serve, hand: Hand) -> None:
    await hand.create()
    await given_up(hand, 2)
    async with serve() as page:
        for unknown in ("1-1", "99999999999999-0", "nonsense"):
            async with page.stream(unknown) as stream:
                assert await stream.next() == ("anew", None)
                assert stream.last_id == (await told(hand))[-1]
                assert (await stream.next())[0] == "parts"
                await given_up(hand)
                assert [row[0] for row in await stream.until("rows")] == (await told(hand))[-1:]


async def test_log_of_redis_that_fell_back_is_begun_anew(serve: Serve, hand: Hand) -> None:
    """To nothing, which the page sees before the next event; or with an event at once."""
    await hand.create()
    await given_up(hand, 2)
    async with serve() as page, page.stream() as stream:
        await stream.until("parts")
        trim = ("XTRIM", hand.keys.events, "MAXLEN", 0)
        await hand.client.call(*trim)
        await stream.until("anew")
        assert stream.last_id == "0-0"
        await given_up(hand)
        events = await told(hand)
        assert await ids(stream, events[-1]) == events
        [[_, event]] = await hand.client.call("XREVRANGE", hand.keys.events, "+", "-", "COUNT", 1)
        transaction = (("MULTI",), trim, ("XADD", hand.keys.events, "*", *event), ("EXEC",))
        await hand.client.pipeline(transaction)
        await stream.until("anew")
        assert stream.last_id == (await told(hand))[-1]


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
        assert await one.until("rows") == await other.until("rows")
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
        page.stop.set()
        seen = {name for name, _ in [await stream.next(), await stream.next()]}
        while "over" not in seen:
            name, data = await stream.next()
            seen.add(name)
        assert {"parts", "rows", "over"} <= seen
        assert data == "finished"
        assert await stream.next() == ("end", None)


async def test_fault_of_the_page_ends_neither_it_nor_its_coordinator(
    serve: Serve, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, as is that something is missing; what happens later is told again."""
    await hand.create()
    async with serve() as page, page.stream() as stream:
        await stream.until("parts")
        with monkeypatch.context() as broken:
            broken.setattr(rendering, "headline_html", lambda _scene: 1 / 0)
            await given_up(hand)
            await stream.until("anew")
            assert "ZeroDivisionError" in await stream.until("trouble")
            assert (await page.http.get("/")).status == 200  # with what was known before
        await stream.until("parts")
        await given_up(hand)
        amid, later = (await told(hand))[-2:]
        # The fault may have come before what happened amid it: then nothing of that is missing.
        assert await ids(stream, later) in ([later], [amid, later])


async def test_viewer_who_comes_back_before_redis_does_misses_nothing(
    serve: Serve, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    await given_up(hand, 3)
    events = await told(hand)
    async with serve() as page:
        with monkeypatch.context() as away:

            async def fails(*_args: object) -> None:
                raise Unavailable("Redis is away")

            away.setattr(LivePageLedger, "opened", fails)
            stream = await page.http.get(f"/live/stream?after={events[-3]}")
            followed = Stream(stream)
            await followed.until("trouble")
        seen: list[str] = []
        while "rows" not in seen:
            name, data = await followed.next()
            seen.append(name)
        assert "anew" not in seen
        assert [row[0] for row in data] == events[-2:]
        stream.close()
