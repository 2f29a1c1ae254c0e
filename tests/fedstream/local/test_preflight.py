"""What is wrong is said before anything starts."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.errors import ConfigError, DataError, FedstreamError, Unavailable
from fedstream.history.display import Quiet
from fedstream.journal import JournalError, RoundClosed
from fedstream.local import preflight
from fedstream.local.request import RunRequest
from fedstream.local.run import run
from fedstream.settings.config import Settings, options, read
from tests.journals import Scribe
from tests.support import Hand


def test_run_starts_its_own_redis_unless_one_is_configured(asked: RunRequest) -> None:
    assert asked.own_redis
    assert replace(asked, settings=read(None, ["redis.timeout_s=3"])).own_redis
    named = read(None, options=options(redis="redis://127.0.0.1:6379/0"))
    assert not replace(asked, settings=named).own_redis


def test_folder_with_a_run_is_rejected(asked: RunRequest) -> None:
    asked.out.mkdir()
    (asked.out / "summary.json").write_text("{}")
    with pytest.raises(FedstreamError, match="already contains a run"):
        run(asked, Quiet())


def test_taken_port_is_named_by_its_source(asked: RunRequest) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FedstreamError, match=f"^--port {port}: cannot listen there on"):
            run(replace(asked, port=port), Quiet())
        configured = replace(asked, settings=read(None, [f"http.port={port}"]))
        with pytest.raises(FedstreamError, match=f"^http.port = {port}: cannot listen there on"):
            run(configured, Quiet())
        with preflight.reserve_port(replace(configured, port=0)) as held:
            assert held.number != port


def test_resuming_needs_the_journal_of_an_unfinished_run(asked: RunRequest) -> None:
    resumed = replace(asked, resume=True)
    with pytest.raises(JournalError, match="--resume: no journal in"):
        run(resumed, Quiet())
    scribe = Scribe(asked.out / "journal")
    scribe.update()
    scribe.update()
    scribe.writer.append(
        RoundClosed(
            entry="9-0", round=2, version=2, time=9.0, received=9.0, finished="version 2 reached"
        )
    )
    scribe.close()
    said = r"is finished \(version 2 reached\): to extend it, give --versions above 1000"
    with pytest.raises(JournalError, match=said):
        run(resumed, Quiet())
    more = replace(resumed, settings=read(None, ["run.versions=1001"])).resolved()
    assert preflight.resumed(more).settings.run.versions == 1001


@pytest.mark.parametrize(("sets", "versions"), [([], 1000), (["run.versions=30"], 1000)])
def test_resumed_run_has_no_fewer_versions_than_before(
    asked: RunRequest, sets: list[str], versions: int
) -> None:
    """Whatever the default is, and however few are asked for."""
    Scribe(asked.out / "journal").close()
    request = replace(asked, resume=True, settings=read(None, sets)).resolved()
    assert preflight.resumed(request).settings.run.versions == versions


def test_unreachable_redis_is_reported_once_before_giving_up(
    asked: RunRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Settings(redis=RedisSettings(url="redis://127.0.0.1:1/0"))
    there = replace(asked, settings=nowhere, redis_within_s=0.6)
    with pytest.raises(Unavailable, match=r"no Redis at 127\.0\.0\.1:1 within"):
        run(there, Quiet())
    assert capsys.readouterr().err.count("\n") == 1
    assert not asked.out.exists()


def task_file(folder: Path, name: str, *methods: str) -> Settings:
    """A configuration with a user's task in a file of its own."""
    lines = ["import torch", "from fedstream import Task", "class Mine(Task):"]
    lines += [f"    {method}" for method in methods]
    (folder / f"{name}.py").write_text("\n".join(lines))
    return read(None, [f"task.name={folder / name}.py:Mine"])


def test_task_is_tried_before_anything_starts(tmp_path: Path) -> None:
    model = "def model(self): return torch.nn.Linear(2, 2)"
    data = "def device_data(self, device): return [(torch.zeros(2), 0)]"
    fine = preflight.examine(task_file(tmp_path, "fs_fine", model, data))
    assert (fine.devices, fine.tested) == (10, False)
    broken = task_file(tmp_path, "fs_broken", "def model(self): return 1 / 0", data)
    with pytest.raises(ConfigError, match=r"model\(\) raised ZeroDivisionError.*fs_broken.py:4"):
        preflight.examine(broken)
    test = "def test_data(self): return open('/not/there')"
    with pytest.raises(DataError, match=r"test_data\(\) raised FileNotFoundError"):
        preflight.examine(task_file(tmp_path, "fs_no_data", model, data, test))


async def test_existing_run_is_not_overwritten(
    asked: RunRequest, redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    settings = read(None, [f"run.name={hand.keys.name}", f"redis.url={redis.url}"])
    there = replace(asked, settings=settings)
    with pytest.raises(FedstreamError, match="continue it with --resume"):
        await preflight.check_redis(there, Quiet())
    with pytest.raises(FedstreamError, match="served by scheduler, updater"):
        await preflight.check_redis(replace(there, resume=True), Quiet())
    await hand.scheduler.release()
    await hand.updater.release()
    await preflight.check_redis(replace(there, resume=True), Quiet())
    await hand.ledger.finish("version 100 reached")
    for resume, versions, refused in ((True, 100, True), (False, 101, True), (True, 101, False)):
        wanted = read(None, [f"run.name={hand.keys.name}", f"run.versions={versions}"])
        wanted = wanted.model_copy(update={"redis": settings.redis})
        request = replace(asked, resume=resume, settings=wanted)
        said = r"is finished \(version 100 reached\): extend it with --resume and --versions above"
        with pytest.raises(FedstreamError, match=said) if refused else nullcontext():
            await preflight.check_redis(request, Quiet())
