"""The pages in a real browser: what JavaScript adds, keyboard, phone, no JavaScript at all.

Chromium is driven by playwright. Without one of them the tests are skipped; in CI they have to be
there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_run
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import single
from tests.fedstream.history.browsing import Tab, flaws, served, suits_phones_and_dark_mode
from tests.integration.command import TEST_GUARD_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

MANY = 100_000  # versions
PAGES = (
    "/",
    "/versions/30?models=1",
    "/updates",
    "/devices",
    "/devices/3",
    "/beside?over=time",
    "/bisect",
    "/what-if",
    "/what-if?alpha=7&without=99",
)


@pytest.fixture(scope="module")
def address(recorded: Path, other: Path) -> Iterator[str]:
    """Where a run is served, beside another one, for all tests of this module."""
    with served(recorded, other) as (link, _):
        yield link


SIZES = "all => all.map((one) => one.getBoundingClientRect().toJSON())"


def shown(page: Any, version: int) -> None:
    """Wait until a version is shown with what its model says."""
    page.locator(f'#moment[data-version="{version}"][data-models="yes"]').wait_for()


def test_charts_are_drawn_and_lead_to_a_version(tab: Tab) -> None:
    page = tab.go("/")
    assert page.locator("figure.chart").count() == 5
    assert page.locator("figure.chart canvas").count() == 2
    page.get_by_text("More curves").click()
    page.locator("figure.chart canvas").nth(4).wait_for()
    # Something is drawn: not all of a canvas has one colour.
    drawn = page.evaluate(
        "[...document.querySelectorAll('canvas')].map((one) => new Set(one.getContext('2d')"
        ".getImageData(0, 0, one.width, one.height).data).size > 20)"
    )
    assert all(drawn)
    page.locator('figure[data-chart="metric-0"] .u-over').click(position={"x": 200, "y": 60})
    page.wait_for_url(re.compile(r"/versions/\d+0$"))  # a version that was measured


# Notes what is written on a chart's canvas.
_WRITTEN = """
window.written = {};
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
  const name = this.canvas.closest("figure").dataset.chart;
  (window.written[name] ??= []).push(text);
  return write.call(this, text, ...where);
};
"""


def test_an_axis_of_whole_numbers_has_no_ticks_between_them(tab: Tab) -> None:
    tab.page.add_init_script(_WRITTEN)
    page = tab.go("/")
    page.get_by_text("More curves").click()
    page.locator("figure.chart canvas").nth(4).wait_for()
    written = page.evaluate("window.written")
    assert {"0", "1", "2", "3"} <= {*written["lateness"]}
    assert {"-0.5", "1.5", "2.5"} & {*written["lateness"]} == set()  # 0.5 is a weight
    assert "0.2" in written["metric-0"]  # accuracy has them


def test_the_column_that_sorts_the_devices_is_marked(tab: Tab) -> None:
    page = tab.go("/devices")
    link = page.get_by_role("link", name="loss", exact=True)
    mark = "(one) => getComputedStyle(one, '::after').content"
    assert link.evaluate(mark) == "none"
    for sign in ("↓", "↑"):
        link.click()
        page.locator("th[aria-sort]").wait_for()
        assert sign in link.evaluate(mark)
        assert page.get_by_role("link", name="loss", exact=True).count() == 1  # read out as ever


def test_updates_of_a_version_fit_on_a_screen(browser: Any, address: str) -> None:
    tab = Tab(browser, address, viewport={"width": 1280, "height": 900})
    page = tab.go("/versions/34?models=1")
    table = page.get_by_role("group", name="Updates that made it")
    assert table.get_by_role("columnheader", name="cosine").count() == 1
    assert table.evaluate("(one) => one.scrollWidth - one.clientWidth") == 0
    tab.context.close()


def test_from_a_version_to_its_device_and_on_to_another_version(tab: Tab) -> None:
    page = tab.go("/versions/34")
    page.get_by_role("table", name="Updates that made it").locator("tbody th a").click()
    page.wait_for_url("**/devices/3")
    page.get_by_role("link", name="Those that were refused").click()
    assert page.locator("tbody tr").count() == 5
    page.get_by_label("outcome").select_option("applied")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/updates?device=3&outcome=applied**")
    assert page.locator("tbody tr").count() == 6
    page.locator("tbody tr").nth(1).locator("td a").first.click()
    page.wait_for_url("**/versions/14")


def test_slider_follows_the_keyboard_and_the_address_follows_it(tab: Tab) -> None:
    page = tab.go("/versions/30?to=10")
    shown(page, 30)
    page.keyboard.press("ArrowRight")
    shown(page, 31)
    assert page.locator("#moment h1").inner_text() == "Version 31"
    assert page.url.endswith("/versions/31?to=10")
    assert page.locator("#moment").get_by_text("distance to version 10").count() == 1
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    shown(page, 29)
    page.keyboard.press("PageUp")
    shown(page, 35)
    page.keyboard.press("End")
    shown(page, 60)
    page.keyboard.press("Home")
    shown(page, 0)
    page.reload()
    shown(page, 0)


def test_slider_has_its_own_keys_while_it_has_the_focus(tab: Tab) -> None:
    page = tab.go("/versions/30")
    shown(page, 30)
    page.locator("#version").focus()
    page.keyboard.press("ArrowRight")
    shown(page, 31)  # one step, not two
    page.locator("input[name=number]").fill("42")
    page.keyboard.press("Enter")
    shown(page, 42)


def test_what_is_no_version_is_told_in_the_form(tab: Tab) -> None:
    """And leaves the slider where it is."""
    page = tab.go("/versions/30")
    shown(page, 30)
    page.locator("input[name=number]").fill("abc")
    page.keyboard.press("Enter")
    page.get_by_text("'abc' is not a version").wait_for()
    shown(page, 30)
    to, alert = page.locator("input[name=to]"), page.get_by_role("alert")
    to.fill("x")
    page.keyboard.press("Enter")
    page.get_by_text("'x' is not a version to compare with").wait_for()
    page.evaluate("window.isTheSame = true")
    page.locator("input[name=number]").fill("31")
    to.fill("99")
    page.keyboard.press("Enter")
    page.get_by_text("version 99 is not in the").wait_for()
    shown(page, 31)
    page.locator("#version").focus()  # each step is told so, in the page as it is
    page.keyboard.press("ArrowRight")
    shown(page, 32)
    assert page.evaluate("document.activeElement.id") == "version"
    assert (alert.count(), to.input_value()) == (1, "99")
    assert flaws(page) == []
    assert page.url.endswith("/versions/32?to=99")
    to.fill("10")
    page.keyboard.press("Enter")
    page.get_by_text("distance to version 10").wait_for()
    assert (alert.count(), to.get_attribute("aria-invalid")) == (0, "false")
    assert page.evaluate("window.isTheSame")  # it was never loaded again
    del tab.asked[:]
    page.reload()
    shown(page, 32)
    page.goto(f"{page.url.partition('?')[0]}?to=abc")
    shown(page, 32)
    assert [url for url in tab.asked if "abc" in url] == [page.url]  # its model was known
    page.goto(f"{page.url.partition('/versions')[0]}/versions/31")
    with page.expect_navigation():
        page.locator("input[name=number]").fill("")
        page.keyboard.press("Enter")
    shown(page, 31)  # not the slider's middle
    assert all("422" in one for one in tab.wrong)  # which browsers note
    tab.wrong.clear()


def test_slider_only_shows_where_it_came_to_rest(tab: Tab) -> None:
    page = tab.go("/versions/5")
    shown(page, 5)
    page.locator("#version").evaluate(
        "(range) => { for (let at = 6; at <= 50; at++) { range.value = at;"
        "range.dispatchEvent(new Event('input')); } }"
    )
    shown(page, 50)
    assert page.locator("#moment h1").inner_text() == "Version 50"
    rebuilt = [url for url in tab.asked if "models=1" in url]
    assert len(rebuilt) <= 2  # for 5, and for 50


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 100,000 versions; only the updates of the newest 4,000 have their weights."""
    folder = tmp_path_factory.mktemp("long")
    yield long_run.write(folder / "run", MANY, weights=long_run.SEGMENT)
    shutil.rmtree(folder)  # 0.4 GB


def test_a_hundred_thousand_versions(browser: Any, long: Path) -> None:
    """Opened without an index; keyboard, mouse and charts go anywhere in them."""
    with served(long) as (link, _):
        tab = Tab(browser, link)
        page = tab.go("/")
        assert page.locator("figure.chart canvas").count() == 2
        assert "0 to 100,000" in page.locator(".facts").inner_text()
        # The one version that was far worse is drawn, among some 1,000 of 10,001 measured.
        about = page.locator('figure[data-chart="metric-0"] script').evaluate(
            "(one) => JSON.parse(one.textContent)"
        )
        worst = about["x"].index(33_330)
        assert about["series"][0]["values"][worst] == 0.1
        assert len(about["x"]) < 1100
        # A part of a curve has more points: the figures of single versions.
        over = page.locator('figure[data-chart="metric-0"] .u-over')
        place = over.bounding_box()
        page.mouse.move(place["x"] + 100, place["y"] + 50)
        page.mouse.down()
        page.mouse.move(place["x"] + 104, place["y"] + 50)
        with page.expect_response(re.compile(r"/\?from=\d+&until=\d+$")):
            page.mouse.up()
        over.dblclick()  # shows all of it again, and goes nowhere
        page.get_by_text("More curves").click()
        page.locator('figure[data-chart="loss"] .u-over').click(position={"x": 200, "y": 60})
        page.wait_for_url(re.compile(r"/versions/\d+$"))
        assert len([url for url in tab.asked if re.search(r"/versions/\d+$", url)]) == 1
        tab.go(f"/versions/{MANY // 2}")
        for key, version in (
            ("ArrowRight", 50_001),
            ("PageUp", 60_001),
            ("PageDown", 50_001),
            ("ArrowLeft", 50_000),
            ("Home", 0),
            ("End", MANY),
            ("ArrowLeft", MANY - 1),
        ):
            page.keyboard.press(key)
            page.locator(f'#moment[data-version="{version}"]').wait_for()
            assert page.locator("#moment h1").inner_text() == f"Version {version}"
        shown(page, MANY - 1)
        page.locator("#version").focus()
        page.keyboard.press("ArrowLeft")
        shown(page, MANY - 2)
        page.locator("input[name=number]").fill("97531")
        page.keyboard.press("Enter")
        shown(page, 97_531)
        assert page.locator("#moment table tbody tr").count() == 3  # its update, two tensors
        tab.go("/versions/1")  # its weights were not recorded: all else is shown
        page.get_by_text("No models:").wait_for()
        tab.go("/devices?sort=-largest")
        assert page.locator("tbody th").first.inner_text() == str(long_run.POISONED)
        assert tab.wrong == []
        tab.context.close()


def test_who_ends_the_server_is_told(browser: Any, recorded: Path) -> None:
    with served(recorded) as (link, end):
        tab = Tab(browser, link)
        page = tab.go("/versions/5")
        shown(page, 5)
        end()
        page.keyboard.press("ArrowRight")
        page.get_by_text("is fedstream ui still running?").wait_for()
        tab.context.close()


def test_all_of_it_can_be_read_without_javascript(browser: Any, recorded: Path) -> None:
    with served(recorded) as (link, _):
        tab = Tab(browser, link, java_script_enabled=False)
        page = tab.go("/")
        assert page.locator("canvas").count() == 0
        page.locator("figure summary").first.click()
        assert page.locator("details[open] table tbody tr").count() == 7  # as often as measured
        page.get_by_role("link", name="Versions", exact=True).click()
        assert page.locator("h1").inner_text() == "Version 60"
        page.locator("input[name=number]").fill("31")
        page.locator("input[name=to]").fill("10")
        page.get_by_role("button", name="Go").click()
        assert page.url.endswith("/versions/31?to=10")
        page.get_by_role("link", name="Norms, cosines and layers").click()
        assert page.get_by_text("distance to version 10").count() == 1
        page.get_by_role("link", name="Devices").click()
        page.get_by_role("link", name="distance", exact=True).first.click()
        assert page.locator("tbody th").first.inner_text() == "3"
        tab.context.close()


def test_a_filter_that_cant_be_read_can_be_mended(browser: Any, address: str) -> None:
    tab = Tab(browser, address, viewport={"width": 360, "height": 740})
    page = tab.go("/updates")
    field = page.get_by_label("device")
    field.fill("abc")
    field.press("Enter")
    told = page.get_by_role("alert")
    assert told.inner_text() == ("'abc' is not a device's number: give a whole number, such as 12")
    assert field.evaluate("one => one.getAttribute('aria-describedby')") == "device-problem"
    assert field.input_value() == "abc"
    assert flaws(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert ["422" in one for one in tab.wrong] == [True]
    field.fill("3")
    field.press("Enter")
    told.wait_for(state="detached")
    assert set(page.locator("tbody th").all_inner_texts()) == {"3"}
    tab.context.close()


def test_two_runs_side_by_side_over_time(tab: Tab) -> None:
    page = tab.go("/beside")
    page.get_by_role("link", name="time", exact=True).click()
    page.locator("figure.chart canvas").first.wait_for(state="attached")
    assert page.get_by_text("seconds since the beginning").count()
    page.locator('figure[data-chart="metric-accuracy"] .u-over').click(position={"x": 200, "y": 60})
    page.wait_for_url("**/versions/*")  # what A had by then
    tab.go("/beside?over=time")
    page.get_by_role("link", name="versions", exact=True).click()
    assert page.url.endswith("/beside")


def test_report_in_one_file(browser: Any, recorded: Path, tmp_path: Path) -> None:
    """Its policy lets its own scripts and styles run; a link to a version opens it."""
    file = single.write(RecordedRun(recorded), tmp_path)
    tab = Tab(browser, f"file://{tmp_path}/")
    page = tab.go(f"{file.name}#version-31")
    figures = page.locator("figure.chart:visible")
    assert page.locator("figure.chart canvas").count() == 9
    assert figures.count() == 5
    page.get_by_label("time").check()
    seconds = page.locator('figure[data-chart="metric-0-time"]')
    assert (figures.count(), seconds.is_visible()) == (5, True)
    wide = [one["width"] for one in seconds.locator("canvas, .plot").evaluate_all(SIZES)]
    assert wide[0] == wide[1]  # drawn anew, now that it has a width
    seconds.locator(".u-over").click(position={"x": 200, "y": 60})
    page.wait_for_function("location.hash.match(/^#version-[1-5]0$/)")
    page.get_by_label("versions").check()
    page.goto(f"{file.as_uri()}#version-31")
    assert page.locator("header").evaluate("(one) => getComputedStyle(one).display") == "flex"
    assert page.locator("#version-31").is_visible()
    assert not page.locator("#version-30").is_visible()
    page.get_by_label("Version", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    page.locator("#version-30").wait_for()
    assert page.url.endswith("#version-30")
    assert not page.locator("#version-31").is_visible()
    page.keyboard.press("End")
    page.locator("#version-60").wait_for()
    page.locator('figure[data-chart="metric-0"] .u-over').click(position={"x": 200, "y": 60})
    page.wait_for_function("location.hash.match(/^#version-[1-5]0$/)")  # one that was measured
    page.locator(page.evaluate("location.hash")).wait_for()
    devices = page.locator("table.devices")
    for wanted in ("3", "7"):  # the most refused first, then least: all others have none
        devices.get_by_role("button", name="refused").first.press("Enter")
        assert devices.locator("tbody th").nth(0 if wanted == "3" else 8).inner_text() == wanted
    assert devices.locator("th[aria-sort=ascending]").inner_text().startswith("refused")
    assert flaws(page) == []
    assert tab.wrong == []
    assert {url.partition("#")[0] for url in tab.asked} == {f"file://{file}"}
    tab.context.close()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_suits_phones_and_dark_mode_and_axe_finds_nothing(
    browser: Any, address: str, path: str
) -> None:
    """Names, roles, headings, contrast: WCAG 2 and the good practice that axe-core knows."""
    tab = Tab(browser, address, viewport={"width": 360, "height": 740}, has_touch=True)
    suits_phones_and_dark_mode(tab.go(path), 360)
    assert all("422" in one for one in tab.wrong)
    tab.context.close()
