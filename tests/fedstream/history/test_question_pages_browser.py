"""Bisection and 'what if' in a real browser: by click and key, cancelled, without JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fedstream.history.browsing import Tab, flaws, served, waiting_task
from tests.integration.command import TEST_GUARD_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


@pytest.fixture(scope="module")
def address(poisoned: Path) -> Iterator[str]:
    with served(poisoned) as (link, _):
        yield link


def test_from_the_poison_to_its_device_and_a_run_without_it(tab: Tab) -> None:
    page = tab.go("/")
    page.get_by_role("link", name="Bisect").click()
    page.get_by_label("this value").fill("0.9")
    page.keyboard.press("Enter")
    page.wait_for_url("**/bisect?metric=accuracy&side=below&bound=0.9")
    page.locator("#found").wait_for()
    assert "accuracy went below 0.9 with version 23" in page.locator("#found").inner_text()
    assert page.locator("#told").inner_text().startswith("Answered in")
    assert page.locator("figure.chart canvas").count() == 1
    assert flaws(page) == []
    page.reload()
    assert page.locator("#found").count() == 1  # it is not asked again
    page.get_by_role("link", name="What if device 7 were left out?").click()
    assert page.get_by_label("without devices").input_value() == "7"
    page.get_by_role("button", name="Try it").click()
    page.locator("#found").wait_for()
    assert "used 29 of 30 updates, 1 left out" in page.locator("#work").inner_text()
    assert page.locator("figure.chart canvas").count() == 3
    assert flaws(page) == []


def test_by_keyboard_and_cancelled_on_the_way(browser: Any, poisoned: Path, tmp_path: Path) -> None:
    with served(poisoned, "--task", waiting_task(tmp_path)) as (link, _):
        tab = Tab(browser, link)
        page = tab.go("/bisect")
        page.get_by_label("this value").focus()
        page.keyboard.type("0.9")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Cancel").wait_for()
        assert page.get_by_role("button", name="Find it").is_disabled()
        assert flaws(page) == []
        page.reload()
        page.get_by_role("button", name="Cancel").focus()
        page.keyboard.press("Enter")
        page.get_by_text("No answer: cancelled").wait_for()
        (tmp_path / "go").touch()
        page.get_by_role("button", name="Find it again").click()
        page.locator("#found").wait_for()
        assert tab.wrong == []
        tab.context.close()


def test_its_page_follows_and_keeps_the_focus(browser: Any, poisoned: Path, tmp_path: Path) -> None:
    """Who has tabbed to Cancel still has it; afterwards, the answer has the focus."""
    with served(poisoned, "--task", waiting_task(tmp_path)) as (link, _):
        tab = Tab(browser, link)
        page = tab.go("/bisect?metric=accuracy&side=below&bound=0.9")
        page.get_by_role("button", name="Find it").click()
        page.get_by_role("button", name="Cancel").focus()
        with page.expect_response("**/bisect?*"):
            pass  # it looked at least once
        assert page.get_by_role("button", name="Cancel").evaluate("(b) => b.matches(':focus')")
        (tmp_path / "go").touch()
        page.locator("#found:focus").wait_for()
        tab.context.close()


def test_bad_input_is_told_beside_the_field(tab: Tab) -> None:
    page = tab.go("/what-if")
    page.get_by_label("alpha").fill("7")
    page.get_by_label("without devices").fill("99")
    page.get_by_role("button", name="Try it").click()
    page.locator("#alpha-problem").wait_for()
    assert "strategy.alpha" in page.locator("#alpha-problem").inner_text()
    assert "device 99 never took part" in page.locator("#without-problem").inner_text()
    assert page.get_by_label("alpha").get_attribute("aria-invalid") == "true"
    assert page.get_by_label("alpha").input_value() == "7"
    assert flaws(page) == []
    assert len(tab.wrong) == 1  # chromium notes the status: 422
    tab.wrong.clear()


def test_all_of_it_works_without_javascript(browser: Any, poisoned: Path, tmp_path: Path) -> None:
    """The page loads itself again until there is an answer."""
    with served(poisoned, "--task", waiting_task(tmp_path)) as (link, _):
        tab = Tab(browser, link, java_script_enabled=False)
        page = tab.go("/bisect")
        page.get_by_label("this value").fill("0.9")
        page.get_by_role("button", name="Find it").click()
        assert "loads itself again" in page.locator(".working").inner_text()
        (tmp_path / "go").touch()
        page.locator("#found").wait_for()
        page.get_by_role("link", name="What if device 7 were left out?").click()
        page.get_by_role("button", name="Try it").click()
        page.locator("#found").wait_for()
        page.locator("summary").nth(1).click()
        assert page.locator("details[open] tbody tr").count() == 30
        assert "other settings" in page.content()
        (tmp_path / "go").unlink()
        page.get_by_label("other settings").fill("strategy.staleness.a=0.3\nstrategy.alpha=0.1")
        page.get_by_role("button", name="Try it").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("No answer: cancelled").wait_for()
        tab.context.close()
