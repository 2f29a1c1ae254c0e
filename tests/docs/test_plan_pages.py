"""The page on planning, as a reader would follow it; its table is what the commands print."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.docs.pages import ROOT
from tests.docs.reader import Reader
from tests.integration.command import TEST_GUARD_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

PAGE = "docs/how-to/plan-devices.md"
FLEETS = (10_000, 1_000_000, 100_000_000)


def table() -> dict[str, list[str]]:
    """The page's table: values by what they are of."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    return {what: values.split(" | ") for what, values in rows}


def printed(said: str) -> dict[str, str]:
    """What a plan printed, up to what it assumes."""
    results = said.partition("\nAssumed:")[0]
    return dict(re.findall(r"^(\S.*?)  +(\S.*)$", results, re.MULTILINE))


def test_plan_devices(reader: Callable[..., Reader]) -> None:
    with reader(PAGE) as page:
        page.follow()
        plans = [printed(page.said[f"fedstream plan --devices {fleet}"]) for fleet in FLEETS]
        rows = table()
        assert rows.pop("devices") == [f"{fleet:,}" for fleet in FLEETS]
        assert {what: [plan[what] for plan in plans] for what in plans[0]} == rows
        fits = {command: "One run takes this" in said for command, said in page.said.items()}
        assert [*fits.values()] == [True, True, False, True, True, True, True]
        refused = ["raise gateway.address_arrivals" in said for said in page.said.values()]
        assert refused == [False] * 6 + [True]
