"""A reader of pages, and a run for them, with refusals and a device that stands out."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.layout import Payload
from fedstream.core.messages import Upload
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.jobs import PageJobs, Workplace
from fedstream.history.ui.server import PageServer
from fedstream.history.ui.work import TaskAccess
from fedstream.journal import Taken
from fedstream.settings.config import read
from fedstream.simulation.run import run
from fedstream.strategies import FedAsyncSettings
from tests.fedstream.history.browsing import Tab
from tests.journals import GOLDEN, Scribe

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

VERSIONS = 60
CHANGED = 25  # updates by the same rule in both runs


def pages_of(run: RecordedRun) -> PageServer:
    """The pages of a run that is open."""
    return PageServer(lambda: run, PageJobs(Workplace(run.path, TaskAccess())))


class Page(HTMLParser):
    """Tags and their attributes, and the text of cells and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.inline: list[str] = []  # what a strict policy would refuse to run
        self.cells: list[str] = []
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self._in.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")
        if tag == "a":
            self.links.append(about.get("href") or "")
        if tag == "script" and "src" not in about and about.get("type") != "application/json":
            self.inline.append(tag)
        self.inline += [name for name in about if name == "style" or name.startswith("on")]
        if tag != "a":
            self.loaded += [value for name in ("src", "href") if (value := about.get(name))]

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self._in) and self.cells:
            self.cells[-1] += data


class _Measuring(Scribe):
    """Notes how far each update alone would move the model: device 3's by far the most."""

    def _taken(self, upload: Upload, sent: Payload, **about: Any) -> Taken:
        if about["outcome"] == "applied":
            size = 50.0 if upload.device == 3 else 1.0 + self.version / 100
            about["sizes"] = (size, 0.0, 0.0)
        return super()._taken(upload, sent, **about)


def _written(folder: Path, alpha: float) -> Path:
    scribe = _Measuring(folder / "journal", FedAsyncSettings(alpha=0.5), versions=VERSIONS)
    for n in range(VERSIONS):
        if n in (20, 40):
            scribe.segment()
        if n == CHANGED:
            scribe.segment(FedAsyncSettings(alpha=alpha))
        scribe.update(n % 10, late=min(n, n % 4))
        if n % 12 == 11:
            scribe.refuse(3)
    scribe.refuse(7, "too stale")
    scribe.close()
    lines = ["version,seconds,updates,total_updates,accuracy,test_loss"]
    lines += [f"{v},{v * 1.5},10,{v},{v / 100},{2 - v / 50}" for v in range(0, VERSIONS + 1, 10)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 versions by fedasync from 10 devices; device 3 was refused five times, device 7 once."""
    return _written(tmp_path_factory.mktemp("recorded") / "run", 0.5)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with another weight from version 26 on."""
    return _written(tmp_path_factory.mktemp("recorded") / "other", 0.25)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded journals, one folder for each strategy."""
    folder = tmp_path_factory.mktemp("golden")
    for packed in GOLDEN.glob("*/*.gz"):
        into = folder / packed.parent.name
        into.mkdir(exist_ok=True)
        (into / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of 30 versions by fedasync, measured every 10; its devices at the end."""
    out = tmp_path_factory.mktemp("simulated") / "fedasync"
    keys = ["run.versions=30", "simulation.threads=1", "solver.lr=0.05"]
    settings = read(None, [*keys, "evaluator.per_device=last"])
    run(settings, out, journal=True, quiet=True)
    return out


def _missing(what: str) -> None:
    assert os.environ.get("FEDSTREAM_CI") != "1", f"{what} is missing; in CI it has to be there"
    pytest.skip(f"{what} is missing")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        import axe_playwright_python  # noqa: F401
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright, or axe for it,")
    if _CHROMIUM is None:
        _missing("chromium")
    with sync_playwright() as driver:
        # Containers have no user namespaces; the pages are our own.
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    """A tab at the module's ``address``: nothing goes wrong in it, and it asks nobody else."""
    tab = Tab(browser, address)
    yield tab
    assert tab.wrong == []
    assert all(url.startswith(address) for url in tab.asked)
    tab.context.close()
