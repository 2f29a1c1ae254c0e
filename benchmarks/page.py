"""Time travel: how soon `fedstream ui` opens a run of 100,000 versions, and follows the slider.

    python -m benchmarks.page [--versions 100000] [--models 8000] [--runs 5]

The run has a tiny model, so what is measured is what its records take; a second run has one of
61,706 parameters and usual checkpoints, for what models take. Both are written first, to a
temporary folder: 0.8 GB and 2 GB, then in the page cache. The server is the command, in a process
of its own. In the browser (Debian's chromium, without a window) time counts from the key that was
pressed to the frame after the page had changed. Without chromium or playwright, that is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.long_run import write
from experiments import machine
from fedstream.history.index import columns_of, index_of
from fedstream.history.recorded_run import RecordedRun

RESULTS = Path(__file__).parent / "results"
PARAMETERS = 61_706
LOOKS = 100  # for a median
FILLING_S = 60.0  # at most, for copies everywhere
READING_S = 2.0  # for which somebody looks at the overview
BOUNDS = {
    "command to first page, first time": 1.0,
    "command to first page, again": 1.0,
    "link to drawn overview": 1.0,
    "a version, far": 0.1,
    "a version, next": 0.1,
    "models, first look at once": 0.1,
    "models, first look, overview just drawn": 0.1,
    "models, first look, 2 s after the overview": 0.1,
    "models, next": 0.1,
    "models, far, later": 0.1,
    "key to version, next": 0.1,
    "key to version, a tenth on": 0.1,
    "key to models, next": 0.1,
    "key to models, a tenth on": 0.1,
}
"""What the project aims for, in seconds."""

_WATCH = """() => {
  window.seen = [];
  addEventListener("keydown", () => { window.pressed = performance.now(); }, true);
  const moment = document.querySelector("#moment");
  const note = () => {
    const about = { version: Number(moment.dataset.version), models: moment.dataset.models };
    requestAnimationFrame(() => {
      window.seen.push({ ...about, after: performance.now() - window.pressed });
    });
  };
  new MutationObserver(note).observe(moment, { attributes: true });
}"""
_SHOWN = """(wanted) => window.seen.find(
  (one) => one.version === wanted.version && (one.models === "yes" || !wanted.models)
)"""
_DRAWN = """() => {
  const charts = document.querySelectorAll("figure.chart").length;
  return charts > 0 && charts === document.querySelectorAll("canvas").length;
}"""


class Serving:
    """`fedstream ui` of a run, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("fedstream"), "ui", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        link = re.match(r"(http://\S+)/ ", self._process.stdout.readline())
        assert link, "fedstream ui printed no link"
        self.link_s = time.perf_counter() - self.began
        self.address = link[1]

    def took(self, path: str) -> float:
        """Seconds for an answer."""
        began = time.perf_counter()
        with urlopen(self.address + path) as answer:  # noqa: S310  (the server's own link)
            answer.read()
        return time.perf_counter() - began

    @property
    def cpu_s(self) -> float:
        """Its processor time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak_bytes(self) -> int:
        """Its peak memory."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def rest(self) -> float:
        """Wait until it does nothing any more; return the seconds that took."""
        began, last = time.perf_counter(), -1.0
        while self.cpu_s - last > 0.02 and time.perf_counter() - began < FILLING_S:
            last = self.cpu_s
            time.sleep(0.5)
        return time.perf_counter() - began

    def end(self) -> None:
        """End it as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """A server for as long as it is needed."""
    server = Serving(folder)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def browser() -> Iterator[Any | None]:
    """Chromium; None if that, or playwright, is not there."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        yield None
        return
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Found = dict[str, list[float]]  # of each figure, seconds


def opening(folder: Path, runs: int, chromium: Any | None) -> Found:
    """Reading the records with and without an index, and the whole command."""
    found: Found = {}
    index = index_of(folder / "journal")
    for how in ("first time", "again"):
        for _ in range(runs):
            for measure in (_read, _opened, partial(_drawn, chromium)):
                if how == "first time":
                    index.unlink(missing_ok=True)
                for name, value in measure(folder).items():
                    found.setdefault(f"{name}, {how}", []).append(value)
    return found


def _read(folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    columns_of(folder / "journal")
    return {"records read": time.perf_counter() - began}


def _opened(folder: Path) -> dict[str, float]:
    with serving(folder) as server:
        server.took("/")
        page_s = time.perf_counter() - server.began
        return {"command to link": server.link_s, "command to first page": page_s}


def _drawn(chromium: Any | None, folder: Path) -> dict[str, float]:
    if chromium is None:
        return {}
    page = chromium.new_page()
    with serving(folder) as server:
        page.goto(server.address, wait_until="commit")
        page.wait_for_function(_DRAWN)
        drawn_s = time.perf_counter() - server.began
        page.close()
    return {"command to first page drawn": drawn_s}


def answers(server: Serving, versions: int) -> Found:
    """What the server takes for a version anywhere, and for its neighbours."""
    rng = random.Random(0)
    server.took(f"/versions/{versions}")  # what is made once
    far = [server.took(f"/versions/{rng.randrange(versions)}") for _ in range(LOOKS)]
    begin = versions // 3
    near = [server.took(f"/versions/{begin + n}") for n in range(LOOKS)]
    return {"a version, far": far, "a version, next": near}


def first_looks(chromium: Any | None, folder: Path, versions: int) -> Found:
    """Models of a version anywhere, each time as if nobody had looked at any before.

    At once, without the server; as soon as somebody sees the overview; and a while later.
    """
    rng = random.Random(0)
    found: Found = {"models, first look at once": []}
    for _ in range(LOOKS // 4):
        run = RecordedRun(folder)
        began = time.perf_counter()
        run.version_stats.of(rng.randrange(versions))
        found["models, first look at once"].append(time.perf_counter() - began)
        run.close()
    drawn = [0.0] if chromium is not None else []
    for wait_s in [*drawn, READING_S]:
        when = f"{wait_s:.0f} s after the overview" if wait_s else "overview just drawn"
        looks = found[f"models, first look, {when}"] = []
        for _ in range(LOOKS // 10):
            with serving(folder) as server, _seen(chromium, server):
                time.sleep(wait_s)
                looks.append(server.took(f"/versions/{rng.randrange(versions)}?models=1"))
    return found


@contextmanager
def _seen(chromium: Any | None, server: Serving) -> Iterator[None]:
    """The overview, drawn in a browser if there is one, for as long as somebody has it open."""
    if chromium is None:
        server.took("/")
        yield
        return
    page = chromium.new_page()
    page.goto(server.address, wait_until="commit")
    page.wait_for_function(_DRAWN)
    yield
    page.close()


def models(server: Serving, versions: int) -> tuple[Found, float]:
    """Answers with models made again; and the seconds for copies everywhere."""
    rng = random.Random(0)

    def look(version: int) -> float:
        return server.took(f"/versions/{version}?models=1")

    begin = versions // 3
    look(begin)
    near = [look(begin + n) for n in range(1, LOOKS)]
    rested = server.rest()
    later = [look(rng.randrange(versions)) for _ in range(LOOKS)]
    return {"models, next": near, "models, far, later": later}, rested


def overview(chromium: Any, server: Serving, runs: int) -> Found:
    """From the link to a drawn overview."""
    found = []
    for _ in range(runs):
        page = chromium.new_page()
        began = time.perf_counter()
        page.goto(server.address, wait_until="commit")
        page.wait_for_function(_DRAWN)
        found.append(time.perf_counter() - began)
        page.close()
    return {"link to drawn overview": found}


def keys(chromium: Any, server: Serving, versions: int, *, models: bool) -> Found:
    """From a key to what it shows."""
    page = chromium.new_page()
    page.goto(f"{server.address}/versions/{versions // 3}")
    page.evaluate(_WATCH)
    tenth = round(versions / 10)

    def press(key: str, by: int) -> float:
        wanted = int(page.locator("#moment").get_attribute("data-version")) + by
        page.evaluate("() => { window.seen.length = 0; }")
        page.keyboard.press(key)
        asked = {"version": wanted, "models": models}
        page.wait_for_function(f"(wanted) => ({_SHOWN})(wanted) !== undefined", arg=asked)
        return float(page.evaluate(_SHOWN, asked).get("after")) / 1000

    what = "models" if models else "version"
    near = [press("ArrowRight", 1) for _ in range(LOOKS // 2)]
    far = [press(*way) for way in [("PageUp", tenth)] * 5 + [("PageDown", -tenth)] * 5]
    page.close()
    return {f"key to {what}, next": near, f"key to {what}, a tenth on": far}


def told(found: Found, about: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for name, values in found.items():
        most, bound = _high(values), BOUNDS.get(name)
        verdict = (
            "" if bound is None else "held" if statistics.median(values) <= bound else "MISSED"
        )
        middle = statistics.median(values)
        rows.append(
            f"| {name} | {1000 * middle:.1f} | {1000 * most:.1f} | {len(values)} | "
            f"{'' if bound is None else f'{1000 * bound:g}'} | {verdict} |"
        )
    where = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    return (
        f"# Time travel through {about['versions']:,} versions\n\n"
        "`python -m benchmarks.page`: milliseconds. What is about models is from a run of\n"
        f"{about['models']:,} versions of {PARAMETERS:,} parameters, a checkpoint every 4,000; all "
        "else from one\n"
        f"of {about['versions']:,} versions of a tiny model, a version an update. Journals are in "
        "the page cache.\n"
        "First time: without the index beside the journal. First page: until its HTML is here;\n"
        "drawn: until the browser, which was running, has drawn its charts. Later: once copies of\n"
        f"models were left everywhere, {about['filled_s']:.0f} s after the last look. Bounds are\n"
        "for the median.\n\n"
        f"{where}\n\n"
        "| | median, ms | 95th percentile, ms | looks | bound | |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n- peak memory of the server, {about['versions']:,} versions: "
        f"{about['peak_bytes'] / 1e6:.0f} MB\n"
        f"- with models of {PARAMETERS:,} parameters: {about['models_peak_bytes'] / 1e6:.0f} MB\n"
    )


def _high(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def main() -> None:
    """Measure, print the table, and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--models", type=int, default=8000, help="versions of the second run")
    parser.add_argument("--runs", type=int, default=5, help="times that a run is opened")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    about: dict[str, Any] = {
        "machine": machine.described() | {"load when it began": f"{os.getloadavg()[0]:.1f}"},
        "versions": asked.versions,
        "models": asked.models,
    }
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="fedstream-page-") as name, browser() as chromium:
        many = write(Path(name) / "many", asked.versions)
        found |= _shown(opening, many, asked.runs, chromium)
        with serving(many) as server:
            found |= _shown(answers, server, asked.versions)
            if chromium is not None:
                found |= _shown(overview, chromium, server, asked.runs)
                found |= _shown(lambda: keys(chromium, server, asked.versions, models=False))
            about["peak_bytes"] = server.peak_bytes
        shutil.rmtree(many)
        large = write(Path(name) / "large", asked.models, PARAMETERS)
        found |= _shown(first_looks, chromium, large, asked.models)
        with serving(large) as server:
            shown, about["filled_s"] = models(server, asked.models)
            found |= _shown(lambda: shown)
            if chromium is not None:
                found |= _shown(lambda: keys(chromium, server, asked.models, models=True))
            about["models_peak_bytes"] = server.peak_bytes
    text = told(found, about)
    print(text)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "page.md").write_text(text)
    (asked.out / "page.json").write_text(json.dumps(about | {"seconds": found}, indent=1) + "\n")
    with (asked.out / "page.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("what", "median_ms", "p95_ms", "looks", "bound_ms"))
        for what, values in found.items():
            bound = BOUNDS.get(what)
            table.writerow(
                (
                    what,
                    round(1000 * statistics.median(values), 2),
                    round(1000 * _high(values), 2),
                    len(values),
                    "" if bound is None else 1000 * bound,
                )
            )


def _shown(measure: Callable[..., Found], *about: Any) -> Found:
    found = measure(*about)
    print({name: round(statistics.median(of), 4) for name, of in found.items()}, flush=True)
    return found


if __name__ == "__main__":
    main()
