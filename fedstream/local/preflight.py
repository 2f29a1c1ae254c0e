"""Checks before a local run starts anything: folder, journal, port, Redis and task.

Each raises a FedstreamError that says what to change, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError, FedstreamError, NoRun, Unavailable
from fedstream.history import report
from fedstream.history.display import Display
from fedstream.history.observer import Observer
from fedstream.journal import JournalError, entries, segments
from fedstream.local.request import RunRequest
from fedstream.local.supervisor import HeldPort
from fedstream.operate.presence import serving
from fedstream.settings.config import Settings
from fedstream.settings.dry_step import try_task
from fedstream.settings.services import check_private, check_used, devices_of, task_of
from fedstream.settings.start import first_model
from fedstream.sinks.settings import named

if TYPE_CHECKING:
    from torch import nn

    from fedstream.trainer.task import Task


@dataclass(frozen=True)
class Subject:
    """Facts about the task, from loading it once in the parent."""

    task: Task
    module: nn.Module
    devices: int
    tested: bool  # the task has test data, or its devices have
    torch: str


def check_folder(request: RunRequest) -> None:
    """Check that the output folder holds no run, unless that run is to be resumed."""
    taken = report.taken(request.out)
    if taken is not None and not request.resume:
        raise FedstreamError(
            f"{request.out} already contains a run ({taken}): choose another folder, or "
            "continue it with `fedstream run --resume`"
        )


def resumed(request: RunRequest) -> RunRequest:
    """The request with the resumed run's number of versions.

    The journal's number counts, unless a higher one was configured. Raises JournalError if there is
    no journal, or if its run is finished and not extended.
    """
    folder, run = Path(request.settings.journal.dir), request.settings.run
    chain = segments(folder)
    try:
        if not chain:
            raise JournalError(f"--resume: no journal in {folder}: give the run's folder as --out")
        last = chain[-1]
        ends = [last.standing.finished, *(entry.finished for _, entry in entries(last, None))]
        why, had = next(filter(None, ends), None), last.head.versions
    finally:
        for segment in chain:
            segment.close()
    extended = "versions" in run.model_fields_set and run.versions > had  # not by a mere default
    if why is not None and not extended:
        raise JournalError(
            f"--resume: the run in {request.out} is finished ({why}): to extend it, give "
            f"--versions above {had}"
        )
    if not extended:
        run = run.model_copy(update={"versions": had})
    return replace(request, settings=request.settings.model_copy(update={"run": run}))


def reserve_port(request: RunRequest) -> HeldPort:
    """Reserve the coordinator's port, so that the coordinator keeps it across restarts."""
    http = request.settings.http
    wanted = http.port if request.port is None else request.port
    try:
        found = socket.getaddrinfo(http.host or None, wanted, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"http.host = {http.host!r}: no such host: {why}") from error
    family, _, _, _, address = found[0]
    try:
        return HeldPort(address, family)
    except OSError as error:
        key = f"http.port = {wanted}" if request.port is None else f"--port {wanted}"
        raise FedstreamError(
            f"{key}: cannot listen there on http.host = {http.host!r}: {error.strerror} "
            "(port 0 picks any free one)"
        ) from error


async def check_redis(request: RunRequest, display: Display) -> None:
    """Wait briefly for the configured Redis, and check that the run can start or resume there."""
    client = Client(request.settings.redis, "run")
    keys = Keys(request.settings.run.name)
    try:
        await _reached(client, request.redis_within_s, display)
        try:
            view = await Observer(client, keys).look()
        except NoRun:
            return  # a resumed run continues from its journal
        extended = request.resume and view.run.versions < request.settings.run.versions
        if view.run.state == "finished" and not extended:
            raise FedstreamError(
                f"run {keys.name!r} is finished ({view.run.why}): extend it with --resume and "
                f"--versions above {view.run.versions}, choose another name with --set "
                "run.name=..., or delete it with `fedstream purge`"
            )
        if not request.resume:
            raise FedstreamError(
                f"run {keys.name!r} is in Redis at {client.address}, at version "
                f"{view.head.version} of {view.run.versions}: continue it with --resume, choose "
                "another name with --set run.name=..., or delete it with `fedstream purge`"
            )
        if busy := await serving(client, keys):
            raise FedstreamError(
                f"run {keys.name!r} is being served by {', '.join(busy)} (a crashed one still "
                "counts for 10 s)"
            )
    finally:
        await client.close()


async def _reached(client: Client, within_s: float, display: Display) -> None:
    until = time.monotonic() + within_s
    waiting = False
    while True:
        try:
            async with asyncio.timeout(within_s):
                await client.call("PING")
        except (Unavailable, TimeoutError) as error:
            if not waiting:
                waiting = True
                why = str(error).rstrip(".") or "no answer"
                display.say(f"{why}; retrying for {within_s:.0f} s")
            if time.monotonic() > until:
                raise Unavailable(
                    f"no Redis at {client.address} within {within_s:.0f} s: start it, or "
                    "leave out redis.url and --redis to have one started"
                ) from error
            await asyncio.sleep(0.25)
        else:
            return


def examine(settings: Settings, *, begins: bool = True) -> Subject:
    """Load and try the task once, to report its errors before anything starts.

    ``begins``: the run is new, so its start is checked too.

    Raises ConfigError or DataError with the place in the user's program.
    """
    import torch

    from fedstream.trainer.vector import layout_of

    check_used(settings)
    for sink in named(settings.sinks):
        sink.make()  # raises if its package is missing
    with redirect_stdout(sys.stderr):  # stdout may be read by a program
        task = task_of(settings)
        devices = devices_of(settings, task)
        tried = try_task(settings, task, devices, simulated=False)
        check_private(settings, layout_of(tried.module))
        if begins and settings.run.start is not None:
            first_model(task, settings.run.seed, settings.run.start)
    tested = tried.test_data is not None or settings.evaluator.per_device != "never"
    return Subject(task, tried.module, devices, tested, torch.__version__)


def check_devices(request: RunRequest, subject: Subject) -> None:
    """Check that the run has as many devices as processes over HTTPS. Raises ConfigError."""
    wanted = request.devices_over_http
    if wanted > subject.devices:
        raise ConfigError(
            f"--devices-over-http {wanted}: the run has {subject.devices} devices (task.devices): "
            "give at most so many, or --devices"
        )
