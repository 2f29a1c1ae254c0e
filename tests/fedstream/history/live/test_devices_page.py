"""The devices' pages of a coordinator, with a journal to read and without."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest

from fedstream.core.messages import GiveUp
from fedstream.history.live.journal_follower import JournalFollower
from tests.fedstream.history.live.conftest import Serve
from tests.support import Hand, wait_until


async def dropped(hand: Hand) -> int:
    """A task is given up; returns its device."""
    (trigger,) = await hand.open()
    await hand.admit(
        GiveUp(
            task=trigger.task,
            attempt="1",
            device=trigger.device,
            trainer="trainer-1",
            reason="dropped out",
        )
    )
    return trigger.device


async def test_devices_are_shown_without_a_journal(serve: Serve, hand: Hand) -> None:
    await hand.create()
    await dropped(hand)
    async with serve("journal.dir=nowhere") as page:
        async with page.http.get("/devices?sort=-lost") as answer:
            text = await answer.text()
            assert (answer.status, "in the newest 1 ended task" in text) == (200, True)
            assert 'data-key="lost" aria-sort="descending"' in text
        async with page.http.get("/overview") as answer:
            assert answer.status == 500  # needs the journal, and says so


@pytest.mark.parametrize(
    ("number", "status"), [("3", 200), ("77", 200), ("x", 404), ("1" * 30, 404)]
)
async def test_a_device_has_a_page_without_a_journal(
    serve: Serve, hand: Hand, number: str, status: int
) -> None:
    await hand.create()
    await dropped(hand)
    async with serve("journal.dir=nowhere") as page, page.http.get(f"/devices/{number}") as answer:
        assert answer.status == status
        text = await answer.text()
        assert (f"<h1>Device {number}</h1>" in text) == (status == 200)


async def test_a_devices_page_says_why_it_has_no_norms(serve: Serve, hand: Hand) -> None:
    await hand.create()
    device = await dropped(hand)
    async with serve("journal.dir=nowhere") as page, page.http.get(f"/devices/{device}") as answer:
        text = unescape(await answer.text())
    assert "No norms, distances and cosines over time: the journal can't be read from here." in text


async def test_a_device_has_curves_of_what_was_read_along(
    serve: Serve, hand: Hand, poisoned: Path
) -> None:
    await hand.create()
    await dropped(hand)
    async with serve(f"journal.dir={poisoned / 'journal'}") as page:

        async def read() -> str:
            async with page.http.get("/devices/7") as answer:
                text = await answer.text()
            return text if "up to version 30." in text else ""

        text = str(await wait_until(read, 60, "the end of the journal"))
        async with page.http.get("/") as answer:
            assert "in the journal, up to version 30" in await answer.text()
        assert "Norm, distance over its newest update: as far as" in text
        for name in ("norm", "distance"):  # the cosine takes ten versions more than there are
            assert f'data-chart="newest-{name}"' in text
        first = page.service._pushes().rows["device"][0]
        async with page.http.get(f"/devices/{first}?over=time") as answer:
            text = await answer.text()
        assert 'data-chart="newest-norm"' in text
        assert "seconds since the beginning" in text


async def test_a_fault_of_reading_along_ends_that_alone(
    serve: Serve, hand: Hand, poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def failing(*_: object) -> None:
        nonlocal reads
        reads += 1
        raise OverflowError("int too big to convert")

    monkeypatch.setattr(JournalFollower, "_read", failing)
    await hand.create()
    await dropped(hand)
    async with serve(f"journal.dir={poisoned / 'journal'}") as page, page.stream() as stream:
        parts = await stream.until("parts")
        assert "cosines: a fault of this page (OverflowError;" in parts["devices"]
        await hand.open()
        assert await stream.until("parts")  # it goes on
        context = page.service._context
        assert context is not None
        sample = context.registry.get_sample_value
        assert sample("fedstream_page_faults_total", {"part": "journal"}) == 1
        assert sample("fedstream_page_faults_total", {"part": "page"}) == 0
        assert page.service._broadcast.trouble is None
    assert reads == 1
