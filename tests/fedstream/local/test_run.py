"""A run of services: its end, whatever fails around it."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn
from torch.utils.data import Dataset

from fedstream.broker.ledger.sinks import Cursor, SinksLedger
from fedstream.coordinator.settings import PageSettings
from fedstream.core.errors import BrokerError
from fedstream.history import observer, report
from fedstream.history.display import Quiet, doing
from fedstream.history.timeline import SeenVersion
from fedstream.local.ending import Ending
from fedstream.local.launcher import Interpreters
from fedstream.local.picture import Drawn
from fedstream.local.preflight import Subject
from fedstream.local.request import RunRequest
from fedstream.local.run import LocalRun
from fedstream.runtime.config import Option
from fedstream.runtime.process import Stop
from fedstream.settings.config import RunSettings, Settings, read
from fedstream.sinks.settings import added
from fedstream.trainer.task import Task
from tests.fedstream.views import view


class Untested(Task):
    """A task that nobody asks."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def device_data(self, device: int) -> Dataset[object]:
        raise NotImplementedError


class Running(LocalRun):
    """A run in a Redis that is not there, and whose services are none."""

    def __init__(self, asked: RunRequest, port: int = 1) -> None:
        asked.out.mkdir()
        subject = Subject(Untested(), nn.Linear(1, 1), devices=2, tested=True, torch="2")
        super().__init__(
            asked, subject, Quiet(), "redis://127.0.0.1:1/0", None, port, Interpreters()
        )
        self._supervisor.children = []


async def test_notices_are_shown_once(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running, needed = Running(asked), 16 + 2 * 4096  # bytes: of a model, and of a record's pages
    room, full = [needed], []
    monkeypatch.setattr(observer, "disk_usage", lambda _: SimpleNamespace(free=room[0]))
    steps = ((needed, 3), (needed - 1, 0), (needed - 1, 3), (needed - 1, 4), (needed, 4))
    for room[0], queue in steps:
        running._observer.view = view(queue=queue)
        running._judge()
        shown = doing(running._observer.view, running._observer.history, stopping=False)
        full.append(shown == "waiting for space: the disk is full")
    assert full == [False, False, True, True, False], "as long as it lasts"
    assert (
        capsys.readouterr().err
        == f"{asked.out}: the disk is full: the updater is waiting for space\n"
    )
    assert not running._over.is_set()


async def test_addresses_are_shown_once_when_there_is_a_run_to_see(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(Quiet, "add", lambda _, *row: shown.append(row))
    with socket.socket() as coordinator:
        coordinator.bind(("127.0.0.1", 0))
        port = coordinator.getsockname()[1]
        running = Running(asked, port)
        running._observer.view = view()
        running._show_addresses()
        assert not shown  # the port is held, and nobody listens there
        coordinator.listen()
        running._observer.view = None  # the run does not exist yet
        running._show_addresses()
        assert not shown
        running._observer.view = view()
        running._show_addresses()
        running._show_addresses()
        status = ("status", f"http://127.0.0.1:{port}/v1/runs/{asked.settings.run.name}")
        assert shown == [status, ("page", f"http://127.0.0.1:{port}/")]
        asked = replace(asked, settings=Settings(page=PageSettings(enabled=False)))
        asked.out.rmdir()
        running = Running(asked, port)
        running._observer.view = view()
        running._show_addresses()
    assert shown[2:] == [status]


async def test_measuring_the_last_version_has_a_time_limit(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running, now = Running(asked), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    running._observer.view = view(
        run=replace(view().run, state="finished", why="version 3 reached")
    )
    for now[0], over in ((1000.0, False), (1120.0, False), (1120.1, True)):
        running._judge()
        assert running._over.is_set() == over
    assert capsys.readouterr().err == "the last version was not measured within 120 s\n"


async def test_end_of_a_run_that_is_being_extended_does_not_count(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis says that it is finished until the updater has told it that the run goes on."""
    asked = replace(asked, resume=True, settings=Settings(run=RunSettings(versions=4)))
    running, finished = Running(asked), replace(view().run, state="finished", why="so it is")
    monkeypatch.setattr(running._observer.history, "tried", view().head.version)
    for versions, over in ((3, False), (4, True)):
        running._observer.view = view(run=replace(finished, versions=versions))
        running._judge()
        assert running._over.is_set() == over


async def test_unwritable_files_do_not_hide_the_result(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(asked)
    shown: list[Sequence[str]] = []
    monkeypatch.setattr(running._display, "result", lambda _, files: shown.append(files))
    monkeypatch.setattr(running._observer, "view", view())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report.Table, "write", full)
    running._end(Ending("finished", "version 3 reached"))
    code, numbers = await asyncio.wait_for(running.live(Stop()), 30)
    assert (code, numbers["state"]) == (1, "finished")
    assert shown == [[str(asked.out / "summary.json")]]
    assert f"{asked.out}: cannot be written: No space left on device" in capsys.readouterr().err


async def test_picture_that_cannot_be_drawn_costs_no_other_file(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(asked)
    shown: list[Sequence[str]] = []
    monkeypatch.setattr(running._display, "result", lambda _, files: shown.append(files))
    monkeypatch.setattr(running._observer, "view", view())

    def broken(_: object) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr(Drawn, "png", broken)
    running._end(Ending("finished", "version 3 reached"))
    code, numbers = await asyncio.wait_for(running.live(Stop()), 30)
    assert (code, numbers["state"]) == (1, "finished")
    written = ("summary.json", "metrics.csv", "journal", "run.toml", "logs")
    assert shown == [[str(asked.out / name) for name in written]]
    assert (asked.out / "summary.json").is_file()
    said = f"{asked.out / 'curves.png'}: cannot be drawn: RuntimeError: no font at "
    assert said in capsys.readouterr().err


async def test_measurements_are_in_the_table_while_the_run_goes_on(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(asked)
    observer = running._observer
    monkeypatch.setattr(observer, "view", view())

    async def measured(**_: object) -> bool:
        number = observer.history.newest + 1
        observer.history.recall(number, SeenVersion(1.0 + number, ()))
        observer.history.measure(number, {"accuracy": 0.5})
        return True

    monkeypatch.setattr(observer, "step", measured)
    await running._step(asyncio.Event())
    await running._step(asyncio.Event())
    table = asked.out / report.METRICS
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["version", "0", "1"]
    table.unlink()
    table.mkdir()
    await running._step(asyncio.Event())
    await running._step(asyncio.Event())  # the run goes on, and this is said once
    assert capsys.readouterr().err == f"{table}: cannot be written: Is a directory\n"


def half(d: int) -> float:
    """s(0) is not 1."""
    return 0.5


async def test_refusing_redis_ends_the_run_with_a_report(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before that it was told what was probably not meant."""
    name = f"strategy.staleness.kind={__name__}:half"
    running = Running(replace(asked, settings=read(None, [name])))

    async def refused(**_: object) -> bool:
        raise BrokerError("Redis at h:1 refuses: NOAUTH Authentication required.")

    monkeypatch.setattr(running._observer, "step", refused)
    code, numbers = await asyncio.wait_for(running.live(Stop()), 30)
    assert (code, numbers["state"]) == (1, "failed")
    assert numbers["why"] == "Redis at h:1 refuses: NOAUTH Authentication required."
    assert (asked.out / "summary.json").exists()
    assert capsys.readouterr().err.count("half': s(0) is 0.5, but an update that is not stale") == 1


async def test_services_are_stopped_even_if_the_display_fails(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(asked)
    stopped: list[str] = []

    async def stop() -> None:
        await asyncio.sleep(0.1)
        stopped.append("in order")

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError("nobody looks")

    monkeypatch.setattr(running._supervisor, "stop", stop)
    monkeypatch.setattr(running._display, "show", broken)
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(running.live(Stop()), 30)
    assert stopped == ["in order"]


async def test_a_tracker_that_is_away_is_told_once_meanwhile_and_at_the_end(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow gets nothing, TensorBoard everything but the end, and a third one everything."""
    kinds = ("mlflow", "tensorboard", "wandb")
    asked = replace(
        asked, settings=read(None, options=[Option("--track", "sinks", added((), kinds))])
    )
    running, now = Running(asked), [1000.0]
    seen = view(run=replace(view().run, state="finished", lineage="one"))

    async def cursor(_ledger: object, sink: str, run: str) -> Cursor:
        return {
            "mlflow": Cursor(run),
            "tensorboard": Cursor(run, version=3),
            "wandb": Cursor(run, version=3, ended=True),
        }[sink]

    async def nothing_new(**_: object) -> bool:
        await asyncio.sleep(0)
        return False

    monkeypatch.setattr(SinksLedger, "cursor", cursor)
    monkeypatch.setattr(running._observer, "view", seen)
    monkeypatch.setattr(running._observer, "step", nothing_new)
    log = asked.out / "logs" / "sinks.log"
    with monkeypatch.context() as clock:
        clock.setattr(time, "monotonic", lambda: now[0])
        for now[0] in (1000.0, 1015.0, 1016.0, 1017.0):
            await running._step(asyncio.Event())
            running._judge()
    meanwhile = f"mlflow: nothing written for 16 s, and tried again and again: see {log}\n"
    assert capsys.readouterr().err == meanwhile  # once

    running._end(Ending("finished", "version 3 reached"))
    await asyncio.wait_for(running.live(Stop()), 30)
    writes = f"see {log}; `fedstream track {asked.out}` writes what is missing"
    told = capsys.readouterr().err
    assert f"mlflow: 4 of 4 versions were not written: {writes}\n" in told
    assert f"tensorboard: the summary and the model were not written: {writes}\n" in told
    assert "wandb" not in told
