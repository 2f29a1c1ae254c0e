"""The devices' pages of a coordinator that has no journal to read."""

from __future__ import annotations

import pytest

from fedstream.broker.messages import GiveUp
from tests.fedstream.page.live.conftest import Serve
from tests.support import Hand


async def dropped(hand: Hand) -> int:
    """A task is given up; returns its device."""
    (trigger,) = await hand.open()
    await hand.admit(
        GiveUp(
            task=trigger.task, attempt="1", device=trigger.device, trainer="trainer-1",
            reason="dropped out",
        )
    )  # fmt: skip
    return trigger.device


async def test_devices_are_shown_without_a_journal(serve: Serve, hand: Hand) -> None:
    await hand.create()
    await dropped(hand)
    async with serve("journal.dir=nowhere") as page:
        async with page.http.get("/devices?sort=-lost") as answer:
            text = await answer.text()
            assert (answer.status, "in the newest 1 ended task" in text) == (200, True)
            assert 'aria-sort="descending" data-key="lost"' in text
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
    async with (
        serve("journal.dir=nowhere") as page, page.http.get(f"/devices/{number}") as answer
    ):  # fmt: skip
        assert answer.status == status
        assert (f"<h1>Device {number}</h1>" in await answer.text()) == (status == 200)
