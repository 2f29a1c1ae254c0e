"""`fedstream ui` as a process, and a tab of a real browser that looks at it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.command import TEST_GUARD_S


@contextmanager
def served(*runs: Path | str) -> Iterator[tuple[str, Callable[[], None]]]:
    """`fedstream ui`: the link that it prints, and a function to end it with Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedstream", "ui", *runs],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    link = re.match(r"(http://127\.0\.0\.1:\d+)/ ", process.stdout.readline())

    def end() -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            assert process.communicate() == ("", "")  # it says nothing more
            assert process.returncode == 0

    try:
        assert link
        yield link[1], end
    finally:
        end()


class Tab:
    """A page that is open, and whatever went wrong in it."""

    def __init__(self, browser: Any, address: str, **about: Any) -> None:
        self.context = browser.new_context(base_url=address, **about)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * TEST_GUARD_S / 2)  # on a machine that others slow down
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", lambda asked: self.asked.append(asked.url))

    def _said(self, what: Any) -> None:
        if what.type == "error":
            self.wrong.append(f"{what.text} ({what.location['url']})")

    def go(self, path: str) -> Any:
        self.page.goto(path)
        return self.page


def waiting_task(folder: Path) -> str:
    """The digits, but nothing is measured before there is a file ``go`` in the folder."""
    (folder / "waiting.py").write_text(f"""
from pathlib import Path
from time import sleep

from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings

task = load_task("digits", TaskSettings())
metrics = task.metrics


def later(model, data):
    while not Path({str(folder / "go")!r}).exists():
        sleep(0.02)
    return metrics(model, data)


task.metrics = later
""")
    return f"{folder}/waiting.py:task"


def flaws(page: Any) -> list[str]:
    """What axe-core finds wrong: WCAG 2, and the good practice that it knows."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


def suits_phones_and_dark_mode(page: Any, width: int) -> None:
    """Check that a page isn't wider than its screen, and that axe finds nothing, light or dark."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert flaws(page) == [], scheme
