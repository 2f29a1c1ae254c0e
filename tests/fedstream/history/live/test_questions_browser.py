"""Bisection and 'what if' from the live page of a run that goes on, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.fedstream.history.browsing import Tab, flaws
from tests.integration.command import BLOBS, TEST_GUARD_S, Command, is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

# From version 5 on, device 3 sends the opposite of what it learned. When it has done so, nobody
# trains before there is a file `go`. Whoever measures for a question waits while there is a `wait`.
_POISONED = f"""{BLOBS}
import multiprocessing, pathlib, time

HERE = pathlib.Path(__file__).parent

class Poisoned(Blobs):
    def train(self, model, data, work):
        sent, go = HERE / "sent", HERE / "go"
        while sent.exists() and not go.exists() and not work.cancelled():
            time.sleep(0.01)
        trained = super().train(model, data, work)
        if work.device == 3 and work.version >= 5:
            sent.touch()
            for parameter in model.parameters():
                parameter.data *= -20
        return trained
    def metrics(self, model, data):
        while multiprocessing.parent_process() is not None and (HERE / "wait").exists():
            time.sleep(0.01)
        return super().metrics(model, data)

task = Poisoned()
"""


class LiveRun:
    """A run that is poisoned, and then held; and its page."""

    def __init__(self, folder: Path) -> None:
        (folder / "poisoned.py").write_text(_POISONED)
        self.wait = folder / "wait"
        self.command = Command(
            folder,
            "--task",
            "poisoned.py:task",
            "--versions",
            "300",
            "--set",
            "evaluator.every=1",
            "--set",
            "updater.norm_factor=0",
        )
        self.address = ""

    def begin(self) -> None:
        """Wait until the poison was measured."""
        link = wait_until(
            lambda: re.search(r"^page +(http://.+)/$", self.command.stdout, re.MULTILINE),
            "the link",
        )
        self.address = link[1]
        wait_until(lambda: "did it go bad?" in self.text("/overview"), "the poison")

    def text(self, path: str) -> str:
        """A page; '' while there is none."""
        try:
            with urlopen(f"{self.address}{path}", timeout=60) as answer:  # noqa: S310  (our own)
                return str(answer.read().decode())
        except OSError:
            return ""

    def ask(self) -> None:
        """Ask for a bisection, as the page's form does."""
        token = re.search(r'name="token" value="(.+?)"', self.text("/bisect"))
        assert token
        sent = {"metric": "accuracy", "bound": "0.5", "token": token[1], "do": "begin"}
        form = Request(f"{self.address}/bisect", urlencode(sent).encode())  # noqa: S310
        with urlopen(form, timeout=60) as answer:  # noqa: S310
            assert "data-going" in answer.read().decode()

    def workers(self) -> list[psutil.Process]:
        """The processes that the coordinator began."""
        coordinator = self.command.pid("coordinator")
        return [] if coordinator is None else psutil.Process(coordinator).children(recursive=True)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path)
    try:
        run.begin()
        yield run
    finally:
        run.command.clean_up()


def test_the_poison_is_found_while_the_run_goes_on(browser: Any, live: LiveRun) -> None:
    """By clicks alone, from the live page on; cancelled once."""
    tab = Tab(browser, live.address)
    page = tab.go("/")
    page.get_by_role("link", name="Overview").click()
    live.wait.touch()
    page.get_by_role("link", name="with which update did it go bad?").click()
    page.get_by_role("button", name="Find it").click()
    page.get_by_role("button", name="Cancel").wait_for()
    assert flaws(page) == []
    (worker,) = [one for one in live.workers() if "spawn_main" in " ".join(one.cmdline())]
    assert worker.nice() == 19
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("No answer: cancelled").wait_for()
    wait_until(lambda: not is_alive(worker), "the end of the work")
    live.wait.unlink()
    page.get_by_role("button", name="Find it again").click()
    page.locator("#found").wait_for()
    assert "accuracy went below" in page.locator("#found").inner_text()
    assert "It is of the versions up to" in page.locator("#work").inner_text()
    until = int(parse_qs(urlsplit(page.url).query)["until"][0])
    assert 5 < until < 300
    assert flaws(page) == []
    page.get_by_role("link", name="What if device 3 were left out?").click()
    assert page.get_by_label("without devices").input_value() == "3"
    page.get_by_role("button", name="Try it").click()
    page.locator("#found").wait_for()
    assert "left out" in page.locator("#work").inner_text()
    assert page.locator("figure.chart canvas").count() == 3
    page.get_by_role("link", name="Live").click()
    page.locator("#part-state", has_text="running").wait_for()
    live.command.go()
    page.locator('body[data-over="finished"]').wait_for()
    assert live.command.ended() == 0, live.command.stderr
    assert tab.wrong == []
    assert all(url.startswith(live.address) for url in tab.asked)
    tab.context.close()


def test_the_work_ends_with_a_killed_coordinator(live: LiveRun) -> None:
    live.wait.touch()
    live.ask()
    workers = live.workers()
    assert workers
    pid = live.command.pid("coordinator")
    assert pid is not None
    psutil.Process(pid).kill()
    wait_until(lambda: not any(map(is_alive, workers)), "the end of the work")
