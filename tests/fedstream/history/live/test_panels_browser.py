"""The panels of the live page in a real browser: charts, sorting, phone, keyboard, axe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fedstream.history.live.panels import PANELS
from fedstream.history.live.snapshot import Snapshot
from tests.fedstream.history.browsing import Tab, flaws, suits_phones_and_dark_mode
from tests.fedstream.history.live.showing import Moments, showing
from tests.fedstream.history.live.snapshots import busy, gauged, idle, measurement, snapshot, tasks
from tests.integration.command import TEST_GUARD_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

STALLED = idle(
    42,
    trainers=0,
    workers=(),
    **tasks({"waiting": 3}),
    gauged=gauged(open=3, training=0, trainers=0, dead=2),
    dead=2,
)
MOMENTS: dict[str, Snapshot] = {
    "busy": busy(),
    "crowded": busy(devices=300, trainers=100),
    "stalled": STALLED,
    "new": snapshot(),
}


def at_version(version: int) -> Snapshot:
    """The busy run later on."""
    found = busy(seed=2)
    head = replace(found.tally.head, version=version)
    return replace(found, tally=replace(found.tally, head=head))


@pytest.fixture
def moments() -> Iterator[Moments]:
    with showing(busy()) as shown:
        yield shown


@pytest.fixture
def tab(browser: Any, moments: Moments) -> Iterator[Tab]:
    """A tab in which nothing goes wrong and which asks nobody else."""
    tab = Tab(browser, moments.address)
    yield tab
    assert tab.wrong == []
    assert all(url.startswith(moments.address) for url in tab.asked)
    tab.context.close()


def test_charts_are_drawn_and_keep_their_canvas_when_they_change(
    tab: Tab, moments: Moments
) -> None:
    page = tab.go("/")
    page.locator("figure.chart canvas").nth(6).wait_for(state="attached")
    assert page.locator("figure.chart canvas").count() == 7
    first = page.locator('[data-chart="metric-0"] canvas')
    first.evaluate("(canvas) => { canvas.dataset.kept = 'yes'; }")
    moments.show(at_version(600))
    page.locator("#part-headline", has_text="version 600 of 1,000").wait_for()
    assert page.locator('[data-chart="metric-0"] [data-kept="yes"]').count() == 1


def test_charts_go_on_to_the_newest_value_and_keep_to_their_place(browser: Any) -> None:
    """Over a time that did not begin at 0, and beside charts that came later."""
    seen = busy().measured
    alone = tuple(
        measurement(one.version, one.seconds, accuracy=one.metrics["accuracy"]) for one in seen
    )
    with showing(replace(busy(), measured=alone[:2], ended=busy().ended[:0])) as moments:
        tab = Tab(browser, moments.address)
        page = tab.go("/")
        chart = page.locator('[data-chart="metric-0-time"]')
        chart.locator("canvas").wait_for(state="attached")
        for version, last in ((600, 10), (601, 20), (602, 29)):
            moments.show(replace(at_version(version), measured=seen[5:last]))
            page.locator("#part-headline", has_text=f"version {version} of").wait_for()
            over = chart.locator(".u-over")
            over.scroll_into_view_if_needed()
            place = over.bounding_box()
            page.mouse.move(place["x"] + place["width"] - 1, place["y"] + 9)
            seconds = chart.locator(".u-legend .u-value").first
            seconds.get_by_text(f"{(last - 1) * 20 / 6:.5g}", exact=True).wait_for()
            page.mouse.move(0, 0)
        tab.context.close()


def test_a_column_sorts_and_stays_sorted(tab: Tab, moments: Moments) -> None:
    page = tab.go("/")
    head = page.locator('.devices [data-key="loss"]')
    firsts = page.locator(".devices tbody tr:first-child th")
    page.locator("canvas").first.wait_for(state="attached")
    head.locator("a").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert firsts.inner_text() == "3"
    head.locator("a").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert firsts.inner_text() != "3"
    moments.show(at_version(600))
    page.locator("#part-headline", has_text="version 600 of 1,000").wait_for()
    assert head.get_attribute("aria-sort") == "ascending"
    assert firsts.inner_text() != "3"
    page.locator('.devices [data-key="used"] a').focus()
    page.keyboard.press("Enter")
    assert page.locator('[data-key="used"]').get_attribute("aria-sort") == "descending"


def test_a_stall_is_told_when_it_begins(tab: Tab, moments: Moments) -> None:
    page = tab.go("/")
    assert page.locator(".standstill").count() == 0
    moments.show(STALLED)
    told = page.locator(".standstill")
    told.wait_for()
    assert (
        "Stalled for 0:42 because no trainer is alive, and 3 tasks are open." in told.inner_text()
    )


def test_what_was_unfolded_stays_so(tab: Tab, moments: Moments) -> None:
    page = tab.go("/")
    page.locator("canvas").first.wait_for(state="attached")
    page.locator("#panel-alarms summary").click()
    moments.show(at_version(600))
    page.locator("#part-headline", has_text="version 600 of 1,000").wait_for()
    page.locator("#panel-alarms details[open] table").first.wait_for()


@pytest.mark.parametrize("how", ["Escape", "button", "Tab"])
def test_a_part_with_the_focus_says_that_it_is_paused_and_goes_on(
    tab: Tab, moments: Moments, how: str
) -> None:
    page = tab.go("/")
    page.locator("canvas").first.wait_for(state="attached")
    panel, sign = page.locator("#panel-devices"), page.locator(".paused")
    before = panel.locator("tbody").inner_text()
    page.locator(".devices tbody a").last.focus()
    assert sign.count() == 0  # nothing new came yet
    for version in (600, 601):
        moments.show(at_version(version))
        page.locator("#part-headline", has_text=f"version {version} of 1,000").wait_for()
    assert panel.locator("tbody").inner_text() == before
    assert (sign.count(), panel.locator(".paused").inner_text()) == (1, "Paused Go on (Esc)")
    assert flaws(page) == []
    if how == "button":
        sign.get_by_role("button").click(delay=100)  # a hand holds it that long
    else:
        page.keyboard.press(how)
    sign.wait_for(state="detached")
    assert panel.locator("tbody").inner_text() != before  # what came meanwhile
    inside = "document.querySelector('#part-devices') === document.activeElement"
    assert page.evaluate(inside) == (how != "Tab")


def test_a_part_with_selected_text_is_paused_too(tab: Tab, moments: Moments) -> None:
    page = tab.go("/")
    page.locator("canvas").first.wait_for(state="attached")
    page.locator("#panel-flow p").first.select_text()
    moments.show(STALLED)
    page.locator("#panel-flow .paused").wait_for()
    page.evaluate("getSelection().removeAllRanges()")
    page.locator(".paused").wait_for(state="detached")


@pytest.mark.parametrize("name", MOMENTS)
def test_all_panels_suit_phones_dark_mode_and_readers_without_javascript(
    browser: Any, name: str
) -> None:
    """In every shade of the heat maps."""
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
    with showing(MOMENTS[name]) as moments:
        tab = Tab(browser, moments.address, **phone)
        page = tab.go("/")
        page.locator("#connection", has_text="Live").wait_for()
        suits_phones_and_dark_mode(page, 360)
        assert tab.wrong == []
        tab.context.close()
        tab = Tab(browser, moments.address, java_script_enabled=False)
        page = tab.go("/")
        assert page.locator("canvas").count() == 0
        for panel in PANELS:
            assert page.locator(f"#panel-{panel.name} .body").inner_text().strip()
        tab.context.close()
