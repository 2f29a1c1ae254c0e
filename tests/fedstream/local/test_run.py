"""What `fedstream run` decides before anything starts."""

from __future__ import annotations

import asyncio
import errno
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from torch import nn

from fedstream.broker.client import RedisSettings
from fedstream.broker.errors import BrokerError, ConfigError, DataError, FedstreamError, Unavailable
from fedstream.broker.messages import Event
from fedstream.journal import JournalError, RoundClosed
from fedstream.local import own_redis
from fedstream.local import run as local
from fedstream.observe import report
from fedstream.observe.display import Quiet
from fedstream.runtime.config import load
from fedstream.runtime.signals import Stop
from fedstream.settings.config import Settings, options, read
from fedstream.settings.recording import CONFIG
from tests.fedstream.views import event, view
from tests.journals import Scribe
from tests.support import Hand

OWN = "unix://:secret@/tmp/fedstream-redis-0/redis.sock"  # as a run that is killed leaves it


@pytest.fixture
def plan(tmp_path: Path) -> local.Plan:
    return local.Plan(Settings(), out=tmp_path / "out")


def test_options_are_configuration_keys() -> None:
    given = options(versions=60, task="a.py:t", redis=None, data_root="007")
    settings = read(None, ["task.devices=4", "run.versions=2"], given)
    assert (settings.run.versions, settings.task.name) == (60, "a.py:t")
    assert (settings.task.devices, settings.task.data_root) == (4, "007")
    assert not settings.redis.is_named


def test_a_run_brings_its_own_redis_unless_one_is_named(plan: local.Plan) -> None:
    assert plan.own_redis
    assert replace(plan, settings=read(None, ["redis.timeout_s=3"])).own_redis
    named = read(None, options=options(redis="redis://127.0.0.1:6379/0"))
    assert not replace(plan, settings=named).own_redis


def test_the_folder_is_named_by_run_and_time() -> None:
    at = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)
    assert local.default_out("demo", at) == Path("runs/demo-20261121-010203")


def test_services_inherit_no_override_twice() -> None:
    environ = {
        "PATH": "/bin", "FEDSTREAM_DATA": "/data", "FEDSTREAM_RUN__VERSIONS": "7",
        "FEDSTREAM_CONFIG": "other.toml", "FEDSTREAM_NAME": "me",
    }  # fmt: skip
    assert local.environment(environ, RedisSettings(), "redis://h:1/0", 42) == {
        "PATH": "/bin", "FEDSTREAM_DATA": "/data", "FEDSTREAM_REDIS__URL": "redis://h:1/0",
        "FEDSTREAM_PARENT": "42",
    }  # fmt: skip


@pytest.mark.parametrize("secret", ["geheim", "12345", '"quoted"', "a'b\\c\"d", "{a=1}"])
def test_a_password_is_passed_on_by_the_environment_and_is_in_no_file(
    tmp_path: Path, secret: str
) -> None:
    file = tmp_path / "given.toml"
    sentinel = {"nodes": ["127.0.0.1:1"], "password": f"{secret}-2"}
    file.write_text(tomli_w.dumps({"redis": {"password": secret, "sentinel": sentinel}}))
    plan = local.Plan(read(file), tmp_path)
    assert not plan.own_redis
    local._write_config(plan, plan.settings.redis.url)
    written = tmp_path / CONFIG
    assert secret not in written.read_text()
    redis = plan.settings.redis
    settings = load(Settings, path=written, environ=local.environment({}, redis, redis.url, 42))
    assert settings.redis == redis
    assert secret not in repr(settings)


def test_every_service_is_a_program_and_the_coordinator_has_its_port() -> None:
    programs = {one.name: one for one in local.programs(Settings(), 2, Path("run.toml"), 8080)}
    assert sorted(programs) == [
        "coordinator", "evaluator", "scheduler", "trainer-1", "trainer-2", "updater",
    ]  # fmt: skip
    assert "http.port=8080" in programs["coordinator"].arguments
    assert programs["trainer-2"].role == "trainer"
    assert programs["trainer-2"].drain_s == Settings().trainer.drain_s


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("interrupted", 130), ("failed", 1)])
def test_the_exit_code_says_how_it_ended(state: str, code: int) -> None:
    assert local.Ending(state, "").code == code  # type: ignore[arg-type]


def test_a_folder_with_a_run_is_refused(plan: local.Plan) -> None:
    plan.out.mkdir()
    (plan.out / "summary.json").write_text("{}")
    with pytest.raises(FedstreamError, match="holds a run already"):
        local.run(plan, Quiet())


def test_a_port_that_is_taken_is_named_by_who_chose_it(plan: local.Plan) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FedstreamError, match=f"^--port {port}: cannot listen there on"):
            local.run(replace(plan, port=port), Quiet())
        configured = replace(plan, settings=read(None, [f"http.port={port}"]))
        with pytest.raises(FedstreamError, match=f"^http.port = {port}: cannot listen there on"):
            local.run(configured, Quiet())
        with local._port(replace(configured, port=0)) as held:
            assert held.number != port


def test_the_configuration_is_for_nobody_else(plan: local.Plan) -> None:
    plan.out.mkdir()
    file = plan.out / "run.toml"
    file.write_text("left by an earlier run")
    file.chmod(0o644)
    with file.open() as earlier:  # whoever has the old file open reads the old file
        local._write_config(plan, "redis://:secret@127.0.0.1:1/0")
        assert earlier.read() == "left by an earlier run"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read(file).redis.url == "redis://:secret@127.0.0.1:1/0"


def test_the_configuration_that_is_left_names_no_redis(plan: local.Plan) -> None:
    plan.out.mkdir()
    local._write_config(plan, None)
    left = read(plan.out / "run.toml")
    assert "url" not in left.redis.model_fields_set
    json_logs = plan.settings.log.model_copy(update={"format": "json"})
    assert left == plan.settings.model_copy(update={"log": json_logs})


def test_resuming_needs_a_journal_of_a_run_that_goes_on(plan: local.Plan) -> None:
    resumed = replace(plan, resume=True)
    with pytest.raises(JournalError, match="--resume: there is no journal in"):
        local.run(resumed, Quiet())
    scribe = Scribe(plan.out / "journal")
    scribe.update()
    scribe.update()
    scribe.writer.append(
        RoundClosed(
            entry="9-0", round=2, version=2, time=9.0, received=9.0, finished="version 2 reached"
        )
    )  # fmt: skip
    scribe.close()
    with pytest.raises(JournalError, match=r"is finished \(version 2 reached\)"):
        local.run(resumed, Quiet())


def test_no_redis_is_said_once_and_then_given_up(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_REDIS_WITHIN_S", 0.6)
    there = replace(plan, settings=Settings(redis=RedisSettings(url="redis://127.0.0.1:1/0")))
    with pytest.raises(Unavailable, match=r"no Redis at 127\.0\.0\.1:1 within"):
        local.run(there, Quiet())
    assert capsys.readouterr().err.count("\n") == 1
    assert not plan.out.exists()


def task_file(folder: Path, name: str, *methods: str) -> Settings:
    """A configuration with a user's task in a file of its own."""
    lines = ["import torch", "from fedstream import Task", "class Mine(Task):"]
    lines += [f"    {method}" for method in methods]
    (folder / f"{name}.py").write_text("\n".join(lines))
    return read(None, [f"task.name={folder / name}.py:Mine"])


def test_a_task_is_tried_before_anything_starts(tmp_path: Path) -> None:
    model = "def model(self): return torch.nn.Linear(2, 2)"
    data = "def device_data(self, device): return [device]"
    fine = local.examine(task_file(tmp_path, "fs_fine", model, data))
    assert (fine.devices, fine.tested) == (10, False)
    broken = task_file(tmp_path, "fs_broken", "def model(self): return 1 / 0", data)
    with pytest.raises(ConfigError, match=r"model\(\) raised ZeroDivisionError.*fs_broken.py:4"):
        local.examine(broken)
    test = "def test_data(self): return open('/not/there')"
    with pytest.raises(DataError, match=r"test_data\(\) raised FileNotFoundError"):
        local.examine(task_file(tmp_path, "fs_no_data", model, data, test))


async def test_a_run_that_is_there_is_not_run_over(
    plan: local.Plan, redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    settings = read(None, [f"run.name={hand.keys.name}", f"redis.url={redis.url}"])
    there = replace(plan, settings=settings)
    with pytest.raises(FedstreamError, match="go on with it by --resume"):
        await local._check_redis(there, Quiet())
    with pytest.raises(FedstreamError, match="served by scheduler, updater"):
        await local._check_redis(replace(there, resume=True), Quiet())
    await hand.scheduler.release()
    await hand.updater.release()
    await local._check_redis(replace(there, resume=True), Quiet())
    await hand.ledger.finish("version 100 reached")
    with pytest.raises(FedstreamError, match="is finished"):
        await local._check_redis(replace(there, resume=True), Quiet())


async def test_what_is_served_is_not_purged(hand: Hand) -> None:
    from fedstream.operate.presence import purge

    await hand.create()
    await hand.announce("t")
    with pytest.raises(FedstreamError, match="served by scheduler, updater, t: stop them"):
        await purge(hand.client, hand.keys, force=False)
    await hand.scheduler.release()
    await hand.updater.release()
    await hand.ledger.leave(b"t")
    there = len(await hand.ledger.stored())
    assert there > 3
    assert await purge(hand.client, hand.keys, force=False) == there


class Running(local.LocalRun):
    """A run in a Redis that is not there, and whose services are none."""

    def __init__(self, plan: local.Plan) -> None:
        plan.out.mkdir()
        subject = local.Subject(nn.Linear(1, 1), devices=2, tested=True, torch="2")
        super().__init__(plan, subject, Quiet(), "redis://127.0.0.1:1/0", None, 1)
        self._supervisor.children = []


@pytest.mark.parametrize(
    "last",
    [
        event("evaluation", version=3, metrics={"accuracy": 0.5}),
        event("evaluation", version=3, metrics={}),
    ],
)
async def test_a_run_is_over_when_its_last_version_was_measured(
    plan: local.Plan, last: Event
) -> None:
    running = Running(plan)
    seen = view(run=replace(view().run, state="finished", why="version 3 reached"))
    running._observer.view = seen
    running._observer.history.tell(event("evaluation", version=2, metrics={"accuracy": 0.4}))
    running._observer.history.tell(event("error", version=3, device=0))  # of a task
    running._judge()
    assert running._ending is None
    running._observer.history.tell(last)
    running._judge()
    assert running._ending == local.Ending("finished", "version 3 reached")


def tasks_that_raise(site: str) -> list[Event]:
    return [event("error", reason="ValueError", device=0, site=site, text="at\nno")] * 10


def refusals(site: str) -> list[Event]:
    return [event("outcome", outcome="refused", reason="digest", site=site)] * 100


@pytest.mark.parametrize("wrong", [tasks_that_raise, refusals])
async def test_what_the_pool_does_wrong_ends_the_run_and_what_a_site_does_not(
    wrong: Callable[[str], list[Event]], plan: local.Plan
) -> None:
    running = Running(plan)
    running._observer.view = view()
    for site, state in (("north", None), ("pool", "failed")):
        for one in wrong(site):
            running._observer.history.tell(one)
        running._judge()
        assert (running._ending and running._ending.state) == state


async def test_an_updater_that_waits_for_room_is_no_riddle(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running, room = Running(plan), [16]  # bytes: a model of them is 16
    monkeypatch.setattr(local, "disk_usage", lambda _: SimpleNamespace(free=room[0]))
    for room[0], queue in ((16, 3), (15, 0), (15, 3), (15, 4)):
        running._observer.view = view(queue=queue)
        running._judge()
    assert capsys.readouterr().err == f"{plan.out}: its disk is full: the updater waits for room\n"


async def test_files_that_cannot_be_written_do_not_hide_the_result(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(plan)
    shown: list[Sequence[str]] = []
    monkeypatch.setattr(running._display, "result", lambda _, files: shown.append(files))
    monkeypatch.setattr(running._observer, "view", view())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "write_table", full)
    running._end(local.Ending("finished", "version 3 reached"))
    code, numbers = await asyncio.wait_for(running.live(Stop()), 30)
    assert (code, numbers["state"]) == (1, "finished")
    assert shown == [[str(plan.out / "summary.json")]]
    assert f"{plan.out}: cannot be written: No space left on device" in capsys.readouterr().err


def test_a_configuration_is_written_whole_or_not_at_all(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.out.mkdir()
    local._write_config(plan, None)
    before = (plan.out / CONFIG).read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        local._write_config(plan, OWN)
    assert [path.name for path in plan.out.iterdir()] == [CONFIG]
    assert (plan.out / CONFIG).read_text() == before


async def test_a_redis_that_refuses_ends_the_run_with_a_report(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(plan)

    async def refused(**_: object) -> bool:
        raise BrokerError("Redis at h:1 refuses: NOAUTH Authentication required.")

    monkeypatch.setattr(running._observer, "step", refused)
    code, numbers = await asyncio.wait_for(running.live(Stop()), 30)
    assert (code, numbers["state"]) == (1, "failed")
    assert numbers["why"] == "Redis at h:1 refuses: NOAUTH Authentication required."
    assert (plan.out / "summary.json").exists()


async def test_the_services_are_stopped_though_the_screen_fails(
    plan: local.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(plan)
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


def test_paths_hold_wherever_the_configuration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read(None, ["task.name=mine.py:task", "task.data_root=data"])
    task = local._with_paths(local.Plan(settings, Path("out"))).settings.task
    assert (task.name, task.data_root) == (f"{tmp_path}/mine.py:task", f"{tmp_path}/data")
    for name in ("digits", "package.module:task"):
        plan = local.Plan(read(None, [f"task.name={name}"]), Path("out"))
        assert local._with_paths(plan).settings.task.name == name


def test_an_own_redis_that_is_gone_is_not_asked_for(tmp_path: Path) -> None:
    plan = local.Plan(Settings(), tmp_path)
    local._write_config(plan, OWN)  # as a run that is killed leaves it
    file = tmp_path / CONFIG
    settings = read(file)
    assert settings.redis.url == OWN  # for those who look at the run
    assert local.Plan(own_redis.without_lost(settings, file), tmp_path).own_redis
    named = read(file, ["redis.url=redis://127.0.0.1:8/0"])
    assert own_redis.without_lost(named, file) is named
    assert own_redis.without_lost(named, None) is named


def test_a_trainer_that_joins_a_run_ends_with_it_or_when_its_redis_is_gone(tmp_path: Path) -> None:
    plan = local.Plan(Settings(), tmp_path)
    local._write_config(plan, OWN)
    file = tmp_path / CONFIG
    assert (read(file).trainer.redis_away_s, read(file).trainer.ends_with_run) == (None, None)
    joined = own_redis.joining(read(file), file).trainer
    assert (joined.redis_away_s, joined.ends_with_run) == (30.0, True)
    patient = read(file, ["trainer.redis_away_s=600", "trainer.ends_with_run=false"])
    assert own_redis.joining(patient, file) == patient
    served = read(file, ["redis.url=redis://127.0.0.1:8/0"])  # which outlives the run
    assert own_redis.joining(served, file) is served
