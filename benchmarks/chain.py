"""What the pipeline's hops cost by themselves: a chain of processes that only pass updates on.

    python -m benchmarks.chain [--runs 3] [--in-flight 4,16]

A scheduler, a coordinator, an updater and two trainers, each a process with a plain blocking
redis-py client, hop over the same streams as the pipeline, with as many exchanges for each update,
shared by what waits together. They carry out commands, but decide nothing: no scripts, checks, ids,
leases, journal, counts or event loop. So the pipeline can be compared with what its architecture
costs on this machine, and not only with the bare loop, which has two processes less. With digests,
bytes are hashed where the pipeline hashes them, four times for each update.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks import bare
from benchmarks.end_to_end import Pipeline, processor_s
from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.local.redis_server import RedisServer
from fedstream.strategies.mixing import mix

PARAMETERS = 61_706  # a model is one chunk
UPDATES = 1500
BATCH = 16  # queue entries that are read together
KEPT = 32  # versions: more than are made while one is read
TASKS, INBOX, QUEUE, MODELS, NEWEST = (
    f"chain:{name}" for name in ("tasks", "inbox", "queue", "models", "newest")
)
_BLOCK_MS = 1000
_ALL = "all"  # the only group of a stream

Figures = dict[str, float]


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, protocol=2)


def _model() -> Model:
    return Model(Layout((Tensor("x", (PARAMETERS,), "float32", "parameter"),)))


def _send(client: redis.Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands in one write; return their replies."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
    return pipeline.execute()


def _rows(reply: Any) -> list[tuple[bytes, bytes]]:
    """The entries of the one stream that was read: id and value."""
    return [(id_, fields[b"m"]) for _, rows in reply or () for id_, fields in rows]


def _reading(stream: str, name: str, count: int) -> tuple[Any, ...]:
    return (
        "XREADGROUP",
        "GROUP",
        _ALL,
        name,
        "COUNT",
        count,
        "BLOCK",
        _BLOCK_MS,
        "STREAMS",
        stream,
        ">",
    )


def _scheduler(url: str, in_flight: int) -> None:
    """Hand out as many tasks as versions were made."""
    client, after, due, n = _client(url), b"0", in_flight, 0
    while True:
        tasks = [("XADD", TASKS, "*", "m", n + i) for i in range(due)]
        n += due
        news = ("XREAD", "COUNT", 100, "BLOCK", _BLOCK_MS, "STREAMS", MODELS, after)
        rows = _rows(_send(client, [*tasks, news])[-1])
        after, due = rows[-1][0] if rows else after, len(rows)


def _coordinator(url: str) -> None:
    """Pass answers on to the queue, under names that trainers can't write to."""
    client, rows = _client(url), list[tuple[bytes, bytes]]()
    while True:
        moves: list[Sequence[Any]] = []
        for entry, task in rows:
            name = task.decode()
            moves += (
                ("RENAME", f"chain:update:{name}", f"chain:queued:{name}"),
                ("XADD", QUEUE, "*", "m", task),
                ("XACK", INBOX, _ALL, entry),
                ("XDEL", INBOX, entry),
            )
        rows = _rows(_send(client, [*moves, _reading(INBOX, "coordinator", 64)])[-1])


def _trainer(url: str, name: str, digests: bool) -> None:
    """Read the newest model, and send it back as an update."""
    client, model = _client(url), _model()
    along: list[Sequence[Any]] = []  # what goes with the look for a task
    while True:
        *_, reply, newest = _send(client, [*along, _reading(TASKS, name, 1), ("GET", NEWEST)])
        along = []
        for entry, task in _rows(reply):
            (sent,) = _send(client, [("HGET", f"chain:model:{newest.decode()}", "0")])
            model.buffer[:] = np.frombuffer(sent, dtype=np.uint8)
            if digests:
                model.digest("blake3")  # of what it trains from
                model.digest("blake3")  # of what it sends
            along = [
                ("HSET", f"chain:update:{task.decode()}", "0", model.buffer.data),
                ("XADD", INBOX, "*", "m", task),
                ("XACK", TASKS, _ALL, entry),
                ("XDEL", TASKS, entry),
            ]


class _Updater:
    """Mixes what is in the queue, and publishes each version."""

    def __init__(self, client: redis.Redis, digests: bool) -> None:
        self._client = client
        self._digests = digests
        self._x, self._update, self._spare = _model(), _model(), _model()
        self._x.floats[:] = 0.01
        self._after = b"0"
        self._rows: list[tuple[bytes, bytes]] = []
        self.version = 0
        _send(client, self._publishing())

    def _publishing(self) -> list[Sequence[Any]]:
        if self._digests:
            self._x.digest("blake3")
        return [
            ("HSET", f"chain:model:{self.version}", "0", bytes(self._x.buffer.data)),
            ("SET", NEWEST, self.version),
            ("UNLINK", f"chain:model:{self.version - KEPT}"),
        ]

    def step(self) -> None:
        """Fetch the updates that wait together, mix each in, publish, and wait for more."""
        commands: list[Sequence[Any]] = []
        if self._rows:
            keys = [f"chain:queued:{task.decode()}" for _, task in self._rows]
            updates = _send(self._client, [("HGET", key, "0") for key in keys])
            for (entry, _), key, update in zip(self._rows, keys, updates, strict=True):
                commands += self._mixed(update)
                commands += (("XDEL", QUEUE, entry), ("UNLINK", key))
        look = ("XREAD", "COUNT", BATCH, "BLOCK", _BLOCK_MS, "STREAMS", QUEUE, self._after)
        self._rows = _rows(_send(self._client, [*commands, look])[-1])
        if self._rows:
            self._after = self._rows[-1][0]

    def _mixed(self, update: bytes) -> list[Sequence[Any]]:
        self._update.buffer[:] = np.frombuffer(update, dtype=np.uint8)
        if self._digests:
            self._update.digest("blake3")
        mix(self._x, self._update, 0.4, into=self._spare)
        self._x, self._spare = self._spare, self._x
        self.version += 1
        return [*self._publishing(), ("XADD", MODELS, "MAXLEN", "~", 1000, "*", "m", self.version)]


def chain(url: str, in_flight: int, *, digests: bool = False) -> Figures:
    """Updates per second of the chain, and the processor time of all its processes for one.

    This process is the updater.
    """
    client = _client(url)
    for stream in (TASKS, INBOX):
        client.xgroup_create(stream, _ALL, "0", mkstream=True)
    updater = _Updater(client, digests)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_scheduler, args=(url, in_flight), daemon=True),
        context.Process(target=_coordinator, args=(url,), daemon=True),
        *(
            context.Process(target=_trainer, args=(url, f"trainer-{n}", digests), daemon=True)
            for n in (1, 2)
        ),
    ]
    for other in others:
        other.start()
    server = int(client.info("server")["process_id"])
    pids = [server, os.getpid(), *(other.pid for other in others if other.pid is not None)]
    try:
        while updater.version < UPDATES // 10:
            updater.step()
        begin, began, busy = updater.version, time.perf_counter(), sum(map(processor_s, pids))
        while updater.version < UPDATES:
            updater.step()
        done, took = updater.version - begin, time.perf_counter() - began
        busy = sum(map(processor_s, pids)) - busy
        return {"updates_per_s": done / took, "cpu_ms": 1000 * busy / done}
    finally:
        for other in others:
            other.terminate()
        for other in others:
            other.join(10)
        client.close()


def _pipeline(url: str, in_flight: int) -> Figures:
    with tempfile.TemporaryDirectory() as journal:
        settings = {"TASK__DEVICES": "100"}
        found = Pipeline(
            url, PARAMETERS, UPDATES, Path(journal), in_flight=in_flight, settings=settings
        ).measure()
    return {"updates_per_s": found["updates_per_s"], "cpu_ms": found["cpu_ms_per_update"]["all"]}


def _bare(url: str, in_flight: int) -> Figures:
    return {"updates_per_s": bare.updates_per_second(url, PARAMETERS, UPDATES, in_flight)}


MEASURED: dict[str, Callable[[str, int], Figures]] = {
    "bare loop": _bare,
    "chain": chain,
    "chain with digests": lambda url, in_flight: chain(url, in_flight, digests=True),
    "fedstream": _pipeline,
}


def main() -> None:
    """Measure all in turn, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="rounds, each of which measures all")
    parser.add_argument("--in-flight", default="4,16", help="numbers of tasks in flight")
    add_out(parser)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for number, in_flight in product(range(options.runs), map(int, options.in_flight.split(","))):
        for name, measure in MEASURED.items():
            with RedisServer() as server:
                run = measure(server.url, in_flight)
            found.append({"in_flight": in_flight, "round": number, "what": name} | run)
            print(found[-1], flush=True)
    results = {"machine": machine.described(), "runs": found}
    keep("chain", results, page(results), options.out)


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# A chain of processes without logic",
        "",
        "`python -m benchmarks.chain`: what the pipeline's hops cost by themselves, next to the",
        f"bare loop and the pipeline, with {PARAMETERS:,} parameters. All take turns, each with a",
        "new Redis. Medians; a ratio is one round's, to the bare loop's updates/s.",
        "",
        conditions(results["machine"]),
        "",
        "| in flight | | updates/s | ratio | every round's | processor, ms an update |",
        "|---|---|---|---|---|---|",
    ]
    runs = results["runs"]
    for in_flight in dict.fromkeys(run["in_flight"] for run in runs):
        of = {
            name: [r for r in runs if r["in_flight"] == in_flight and r["what"] == name]
            for name in MEASURED
        }
        for name, some in of.items():
            pairs = zip(some, of["bare loop"], strict=True)
            ratios = [one["updates_per_s"] / yard["updates_per_s"] for one, yard in pairs]
            rate = statistics.median(one["updates_per_s"] for one in some)
            cost = [one["cpu_ms"] for one in some if "cpu_ms" in one]
            lines.append(
                f"| {in_flight} | {name} | {rate:.0f} | {statistics.median(ratios):.2f} "
                f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} "
                f"| {f'{statistics.median(cost):.2f}' if cost else ''} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
