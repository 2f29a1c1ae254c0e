"""The result files of a local run: summary, table, curves and model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from fedstream.broker.client import Client
from fedstream.broker.published import as_given, read_newest, with_unshared
from fedstream.core.errors import DataError, FedstreamError, NoRun
from fedstream.core.layout import Model
from fedstream.core.records import Tally
from fedstream.history import report
from fedstream.history.observer import Observer
from fedstream.history.timeline import History
from fedstream.journal import FOLDER
from fedstream.local import private
from fedstream.local.ending import Ending
from fedstream.local.preflight import Subject
from fedstream.local.request import RunRequest
from fedstream.runtime.plugins import words
from fedstream.settings.recording import CONFIG, SUMMARY

LOGS = "logs"


async def last_state(
    client: Client, observer: Observer, say: Callable[[str], None]
) -> tuple[Tally | None, Model | None]:
    """Read the final state and the newest model; None for an unreadable part."""
    view: Tally | None = None
    try:
        await observer.catch_up()
        view = await observer.look()
        model = Model(await with_unshared(client, observer.keys, view.run.layout))
        await read_newest(client, observer.keys, view.head, model)
    except NoRun:
        return view, None
    except FedstreamError as error:
        say(f"some results could not be read: {error}")
        return view or observer.view, None
    else:
        return view, model


def facts(
    request: RunRequest,
    subject: Subject,
    view: Tally | None,
    ending: Ending,
    *,
    seconds: float,
    ended: float,
    restarts: Mapping[str, int],
) -> report.Facts:
    """The summary's facts that are not in the run's streams. ``ended``: seconds since 1970."""
    settings = request.settings
    return report.Facts(
        run=settings.run.name,
        task=settings.task.name,
        strategy=settings.strategy.name,
        devices=view.run.devices if view else subject.devices,
        trainers=request.trainers,
        seed=settings.run.seed,
        target=settings.run.versions,
        started=ended - seconds,
        ended=ended,
        state=ending.state,
        why=ending.why,
        restarts=restarts,
        torch=subject.torch,
        privacy=private.facts(settings),
    )


def write(
    request: RunRequest,
    subject: Subject,
    numbers: dict[str, Any],
    history: History,
    view: Tally | None,
    model: Model | None,
    picture: bytes | None,
) -> Iterator[str]:
    """Write the files, yielding each one's name once complete. Raises OSError."""
    out, settings = request.out, request.settings
    report.write_summary(out, numbers)
    yield SUMMARY
    if view is not None:
        report.Table(out, view.run.created).write(history)
        yield report.METRICS
    if picture is not None:
        (out / report.CURVES).write_bytes(picture)
        yield report.CURVES
    if view is not None and model is not None and view.head.version > 0:  # else untrained
        about = {
            "version": str(view.head.version),
            "digest": view.head.digest,
            "run": settings.run.name,
            "task": settings.task.name,
        } | as_given(view.head)
        if report.write_best(out, numbers, subject.module):
            yield report.BEST
        report.write_model(out, model, subject.module, about)
        yield report.MODEL
        if settings.evaluator.per_device != "never":
            report.write_devices(out, _per_device(subject, view.run.devices))
            yield report.DEVICES
    yield from (FOLDER, CONFIG, LOGS)


def _per_device(subject: Subject, devices: int) -> dict[int, dict[str, float]]:
    """Metrics of the last model, which the module has, on each device's own test data.

    The evaluator reports only summaries over the devices. Raises DataError for errors of the task.
    """
    from fedstream.trainer.on_devices import device_metrics

    try:
        with redirect_stdout(sys.stderr):
            return device_metrics(subject.task, subject.module, devices)
    except FedstreamError:
        raise
    except Exception as error:
        raise DataError(f"the devices' test data: {words(error)}") from error
