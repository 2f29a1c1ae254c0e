"""What viewers of the live page cost: updates per second with 20 of them, and without.

    python -m benchmarks.viewers [--viewers 20] [--pairs 10] [--seconds 5]

One pipeline with 61,706 parameters, four tasks in flight and no training (as in
`benchmarks.end_to_end`) goes on all the time. Its pace is measured in turn with nobody looking and
with viewers who read everything that is sent, so that the machine's moods hit both alike. The
viewers are on the same machine: what they need to read counts against the pace, too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import ROLES, Pipeline, processor_s
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import HeldPort

PARAMETERS = 61_706
VERSIONS = 10_000_000  # it never gets there
LEAST = 0.98  # of the pace without viewers
SETTLE_S = 2.0  # for the first look, and for rest after the last viewer
BEGUN = 200  # versions, before anything is measured


class Watched(Pipeline):
    """The pipeline, with a page at a port that is known."""

    def __init__(self, url: str, journal: Path) -> None:
        super().__init__(url, PARAMETERS, VERSIONS, journal)
        self._page = HeldPort()

    @property
    def port(self) -> int:
        """The coordinator's."""
        return self._page.number

    def begin(self) -> None:
        """Start the services, and wait until they are in the swing of it."""
        for name in ROLES:
            self._start(name)
        self._at(BEGUN)

    def end(self) -> None:
        """Stop them."""
        self._stop()
        self._page.close()

    def _start(self, name: str) -> None:
        before = self._env
        if name == "coordinator":
            self._env = before | {"FEDSTREAM_HTTP__PORT": str(self.port)}
        super()._start(name)
        self._env = before

    def mark(self) -> tuple[float, int, float]:
        """The time, the newest version, and the coordinator's processor seconds."""
        version = int(self._client.hget(self._head, "version") or 0)
        return time.perf_counter(), version, processor_s(self._processes["coordinator"].pid)


class Viewers:
    """Readers of the stream, in a process of their own, told by lines when to come and go."""

    def __init__(self, port: int, viewers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.viewers", "--read", f"{port} {viewers}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def change(self) -> int:
        """Come, or go: the bytes that were read since the last change."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


async def read(port: int, viewers: int) -> None:
    """Be viewers: come at the first line of standard input, go at the next, and so on."""
    got = 0

    @asynccontextmanager
    async def looking() -> AsyncIterator[None]:
        tasks = [asyncio.create_task(look()) for _ in range(viewers)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look() -> None:
        nonlocal got
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            while some := await reader.read(1 << 16):
                got += len(some)
        finally:
            writer.close()

    while await asyncio.to_thread(sys.stdin.readline):
        print(0, flush=True)
        async with looking():
            await asyncio.to_thread(sys.stdin.readline)
        print(got, flush=True)
        got = 0


def measured(pipeline: Watched, seconds: float) -> dict[str, float]:
    """The pace for so long, and what the coordinator needed."""
    began, first, used = pipeline.mark()
    time.sleep(seconds)
    ended, last, used_then = pipeline.mark()
    passed = ended - began
    return {
        "updates_per_s": (last - first) / passed,
        "coordinator_ms_per_s": 1000 * (used_then - used) / passed,
    }


def compared(pipeline: Watched, viewers: int, pairs: int, seconds: float) -> list[dict[str, Any]]:
    """Pairs of measurements, one without and one with viewers, in turn first."""
    readers, found = Viewers(pipeline.port, viewers), []
    try:
        for n in range(pairs):
            pair: dict[str, Any] = {}
            for is_watched in (n % 2 == 0, n % 2 == 1):
                if is_watched:
                    readers.change()
                time.sleep(SETTLE_S)
                some: dict[str, Any] = measured(pipeline, seconds)
                if is_watched:
                    some["kib_per_s"] = readers.change() / (seconds + SETTLE_S) / 1024
                pair["with" if is_watched else "without"] = some
            pair["ratio"] = pair["with"]["updates_per_s"] / pair["without"]["updates_per_s"]
            print(
                f"without {pair['without']['updates_per_s']:7.1f}/s  "
                f"with {viewers} {pair['with']['updates_per_s']:7.1f}/s  "
                f"ratio {pair['ratio']:.3f}",
                flush=True,
            )
            found.append(pair)
    finally:
        readers.end()
    return found


def table(viewers: int, seconds: float, pairs: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The results as Markdown."""

    def median(which: str, what: str) -> float:
        return float(statistics.median(pair[which][what] for pair in pairs))

    ratio = statistics.median(pair["ratio"] for pair in pairs)
    verdict = "held" if ratio >= LEAST else "MISSED"
    rows = [
        ("updates/s", "updates_per_s", True),
        ("coordinator, ms of processor a second", "coordinator_ms_per_s", True),
        (f"sent to all {viewers}, KiB/s", "kib_per_s", False),
    ]
    lines = [
        "# Viewers of the live page",
        "",
        f"`python -m benchmarks.viewers`: {viewers} viewers on the same machine,",
        f"{len(pairs)} pairs of {seconds:g} s, {PARAMETERS:,} parameters, no training. Medians.",
        "",
        conditions(about),
        "",
        "| | nobody looks | viewers |",
        "|---|---|---|",
    ]
    for name, what, both in rows:
        without = f"{median('without', what):.1f}" if both else ""
        lines.append(f"| {name} | {without} | {median('with', what):.1f} |")
    each = ", ".join(f"{pair['ratio']:.3f}" for pair in pairs)
    lines += ["", f"Ratio: {ratio:.3f}, at least {LEAST}: {verdict}. Of each pair: {each}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        port, viewers = map(int, options.read.split())
        asyncio.run(read(port, viewers))
        return
    about = machine.described()
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        pipeline = Watched(server.url, Path(journal))
        try:
            pipeline.begin()
            pairs = compared(pipeline, options.viewers, options.pairs, options.seconds)
        finally:
            pipeline.end()
    text = table(options.viewers, options.seconds, pairs, about)
    print(text)
    keep("viewers", {"machine": about, "viewers": options.viewers, "pairs": pairs}, text)


if __name__ == "__main__":
    main()
