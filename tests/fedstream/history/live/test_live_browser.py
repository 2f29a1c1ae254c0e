"""The live page in a real browser."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from fedstream.broker.client import RedisSettings
from tests.fedstream.history.browsing import Tab, flaws, suits_phones_and_dark_mode
from tests.fedstream.history.live.stage import Cable, Stage, every
from tests.integration.command import BLOBS, TEST_GUARD_S, Command, held, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

TOKEN = "a-token-of-sixteen-or-more"  # noqa: S105
OPERATOR = "another-of-the-operator"
_numbers = itertools.count()


@pytest.fixture
def stage(any_redis: RedisSettings) -> Iterator[Callable[..., Stage]]:
    """Begins a run and its page, with these settings."""
    stages: list[Stage] = []

    def begin(*sets: str) -> Stage:
        stages.append(Stage(any_redis, f"staged-{next(_numbers)}", *sets).__enter__())
        return stages[-1]

    with every(0.05):
        yield begin
        for one in stages:
            one.__exit__()


def shows_events(page: Any, count: int) -> None:
    """Wait until the page shows so many events."""
    wait_until(lambda: page.locator(".events li").count() == count, f"{count} events")


def says(page: Any, text: str) -> None:
    """Wait until the page says how it is connected."""
    page.locator("#connection", has_text=re.compile(text)).wait_for()


def going_on(stage: Callable[..., Stage]) -> Stage:
    """A run in which two tasks have ended."""
    here = stage()
    here.do(here.create())
    here.do(here.drop(2))
    return here


def connected(browser: Any, address: str) -> Tab:
    """A tab in which the page of a run is live."""
    tab = Tab(browser, address)
    says(tab.go("/"), "^Live$")
    return tab


def answers(address: str) -> bool:
    """Whether there is a page yet."""
    try:
        with urlopen(address, timeout=10):  # noqa: S310  (our own)
            return True
    except OSError:
        return False


def test_a_run_from_its_start_to_its_end(
    browser: Any, tmp_path: Path, quick_programs: Path
) -> None:
    """By the link that `fedstream run` prints; what is journalled already is a click away."""
    (tmp_path / "blobs.py").write_text(held(BLOBS, 5))
    command = Command(
        tmp_path,
        "--task",
        "blobs.py:task",
        "--versions",
        "12",
        "--set",
        "evaluator.every=1",
        programs=quick_programs,
    )
    try:
        link = wait_until(
            lambda: re.search(r"^page +(http://127\.0\.0\.1:\d+)/$", command.stdout, re.MULTILINE),
            "the link",
        )
        assert isinstance(link, re.Match), command.stderr
        wait_until(lambda: answers(link[1]), "the page")
        tab = connected(browser, link[1])
        page = tab.page
        page.locator("#part-headline", has_text=re.compile("version [5-8] of 12")).wait_for()
        page.locator("#part-flow", has_text="updater").wait_for()
        page.get_by_role("link", name="Versions").click()
        page.wait_for_url(re.compile(r"/versions/\d+$"))
        page.get_by_role("link", name="Live").click()
        says(page, "^Live$")
        command.go()
        page.locator('body[data-over="finished"]').wait_for()
        says(page, "The run is finished")
        page.locator("#part-state", has_text="finished: version 12 reached").wait_for()
        assert page.locator("#part-headline", has_text="version 12 of 12").count() == 1
        assert command.ended() == 0, command.stdout + command.stderr
        suits_phones_and_dark_mode(page, 1280)
        assert tab.wrong == []
        assert all(url.startswith(link[1]) for url in tab.asked)
        tab.context.close()
    finally:
        command.clean_up()


def test_cut_and_connected_again(browser: Any, stage: Callable[..., Stage]) -> None:
    """Even if the coordinator is away for a while; the page then shows the events of that time."""
    here = going_on(stage)
    with Cable(here.address) as cable:
        tab = connected(browser, cable.address)
        page = tab.page
        for is_out in (False, True):
            cable.is_out = is_out
            cable.cut()
            here.do(here.drop(2))
            if is_out:
                says(page, "^Not connected since")
                here.do(here.drop())
                cable.is_out = False
            shows_events(page, len(here.do(here.told())))
            says(page, "^Live$")
        tab.context.close()


def test_another_coordinator_goes_on_where_one_stopped(
    browser: Any, stage: Callable[..., Stage]
) -> None:
    here = going_on(stage)
    there = stage(f"run.name={here.run}")
    with Cable(here.address) as cable:
        tab = connected(browser, cable.address)
        page = tab.page
        cable.lead_to(there.address)
        here.do(here.stop())
        here.do(here.drop(3))
        shows_events(page, len(here.do(here.told())))
        says(page, "^Live$")
        tab.context.close()


def test_login_and_what_an_operator_does(browser: Any, stage: Callable[..., Stage]) -> None:
    here = stage(f"http.token={TOKEN}", f"page.operator_token={OPERATOR}")
    here.do(here.create())
    tab = Tab(browser, here.address)
    page = tab.go("/")
    page.get_by_label("Token (http.token)").fill("not the token, but long")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("This is not the token.").wait_for()
    assert flaws(page) == []
    page.get_by_label("Token (http.token)").fill(TOKEN)
    page.keyboard.press("Enter")
    says(page, "^Live$")
    page.get_by_role("link", name="Operate").click()
    page.get_by_label("Operator's token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_text("There are none.").wait_for()
    assert flaws(page) == []
    assert "by" not in page.locator("header .run").inner_text().split()  # not known here
    page.get_by_label("Yes, end the run").check()
    page.get_by_role("button", name="Stop the run").click()
    page.get_by_text("The run ends with its newest version.").wait_for()
    page.get_by_text("It goes on no more: finished: stopped by an operator.").wait_for()
    assert page.get_by_role("button", name="Stop the run").count() == 0
    assert flaws(page) == []
    page.get_by_role("link", name="Live").click()
    page.locator("#part-state", has_text="finished: stopped by an operator").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("heading", name="Log in").wait_for()
    # The browser says so of each answer of 401.
    assert all("401" in one for one in tab.wrong)
    tab.context.close()


def test_an_operator_retries_a_dead_letter(browser: Any, stage: Callable[..., Stage]) -> None:
    here = stage(f"page.operator_token={OPERATOR}")
    here.do(here.create())
    here.do(here.bury())
    tab = Tab(browser, here.address)
    page = tab.go("/operate")
    page.get_by_label("Operator's token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_role("cell", name="crashed its trainers").wait_for()
    assert flaws(page) == []
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("is being retried as task").wait_for()
    page.get_by_text("There are none.").wait_for()
    assert len(here.do(here.hand.ledger.look()).open) == 1
    page.get_by_role("link", name="Live").click()
    says(page, "^Live$")
    tab.context.close()


def test_page_waits_for_its_run_and_says_when_redis_is_lost(
    browser: Any, stage: Callable[..., Stage]
) -> None:
    here = stage()
    tab = Tab(browser, here.address)
    page = tab.go("/")
    page.get_by_text("is being set up").wait_for()
    here.do(here.create())
    says(page, "^Live$")  # it was loaded again by itself
    here.do(here.hand.ledger.purge())
    says(page, "there is no run")
    here.do(here.hand.client.call("DEL", here.hand.keys.leader("updater")))
    tab.context.close()


def test_all_of_it_can_be_read_without_javascript(
    browser: Any, stage: Callable[..., Stage]
) -> None:
    here = going_on(stage)
    here.do(here.update(1))
    here.do(here.measure(1, 0.75))
    tab = Tab(browser, here.address, java_script_enabled=False)
    page = tab.go("/")
    assert page.locator("noscript").count() == 0 or "every 5 seconds" in page.content()
    # Until Redis has answered, the page is loaded again by itself.
    page.locator("main", has_text="version 1 of 100").wait_for()
    for text in ("0.75", "given up", "dropped out"):
        assert text in page.inner_text("main"), text
    tab.context.close()
