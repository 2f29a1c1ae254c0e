"""`fedstream doctor`: what is wrong is found, each once, and nothing is touched by looking."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.cli import app as cli
from fedstream.coordinator.policies import InFlight, Poisson
from fedstream.coordinator.rounds import Rounds
from fedstream.core.messages import Dead
from fedstream.doctor import checkup as doctor
from fedstream.doctor import server, task, volume
from fedstream.doctor.findings import Finding
from fedstream.settings.config import Settings, read
from tests.fedstream.doctor.conftest import Change, Look, wrong
from tests.support import Hand, layout_of, snapshot, with_frozen


def the_one(findings: list[Finding], level: str, about: str) -> str:
    """The line of the only finding of that level, which has to be about that."""
    [finding] = [one for one in findings if one.level == level]
    assert finding.about == about
    assert finding.change or level == "not checked" or about == "task"
    return str(finding)


async def test_healthy_deployment_is_all_ok_and_untouched(
    look: Look, change: Change, client: Client, keys: Keys, tmp_path: Path
) -> None:
    findings = await look()
    assert {one.level for one in findings} == {"ok"}, findings
    about = {one.about: one.text for one in findings}
    assert about["redis"].endswith("answers user 'default'")
    assert about["redis maxmemory"] == "200.0 MB, noeviction"
    assert about["run"] == f"{keys.name!r} is not in Redis yet: the updater creates it"
    assert (
        "1 task, 0 in the queue, 17 kept and 2 in the making are 20 models"
        in (about["redis memory"])
    )
    assert "4810 parameters, 19.2 kB, 10 devices" in about["task"]
    assert doctor.exit_code(findings) == 0
    assert await snapshot(client, keys) == {}
    assert not (tmp_path / "journal").exists()


# Redis


@pytest.mark.parametrize(
    ("config", "level", "about", "said"),
    [
        (
            {"maxmemory_policy": "allkeys-lru"},
            "problem",
            "redis maxmemory",
            "200.0 MB; when it is reached, Redis evicts keys (maxmemory-policy allkeys-lru)",
        ),
        ({"maxmemory": 0}, "warning", "redis maxmemory", "neither a limit nor scheduler.memory"),
        (
            {"maxmemory": 0, "maxmemory_policy": "allkeys-lru"},
            "warning",
            "redis maxmemory",
            "no limit, and maxmemory-policy allkeys-lru",
        ),
        ({"appendonly": "yes"}, "warning", "redis persistence", "an append-only file is on"),
        ({"save": "3600 1"}, "warning", "redis persistence", "snapshots are on (save '3600 1')"),
        ({"maxmemory": 1000}, "problem", "redis memory", "full: uses "),
    ],
)
async def test_misconfigured_redis(
    look: Look, change: Change, config: dict[str, Any], level: str, about: str, said: str
) -> None:
    await change(**config)
    findings = await look()
    assert said in the_one(findings, level, about)
    assert doctor.exit_code(findings) == (level == "problem")


async def test_keys_in_another_database_are_found(
    look: Look, change: Change, redis: RedisSettings
) -> None:
    other = Client(redis.model_copy(update={"url": redis.url.replace("/0", "/1")}), "other")
    await other.call("SET", "left", "there")
    try:
        said = the_one(await look(), "warning", "redis databases")
        assert "database 1 of this Redis has 1 key" in said
        assert "redis-cli -n 1 --scan" in said
    finally:
        await other.call("DEL", "left")
        await other.close()


async def test_schedulers_memory_budget_is_enough(look: Look, change: Change) -> None:
    await change(maxmemory=0)
    findings = await look("scheduler.memory_budget=100000000")
    assert wrong(findings, "redis maxmemory") == []


async def test_wrong_password(look: Look, redis: RedisSettings) -> None:
    elsewhere = redis.url.replace("redis://", "redis://nobody:wrong@")
    findings = await look(f"redis.url={elsewhere}")
    said = the_one(findings, "problem", "redis")
    assert "refuses: " in said
    assert said.endswith("-> correct redis.username and redis.password")
    assert "wrong@" not in str(findings)
    assert doctor.exit_code(findings) == 1


async def test_unreachable_redis(look: Look) -> None:
    findings = await look("redis.url=redis://127.0.0.1:1/0")
    assert "127.0.0.1:1 does not answer" in the_one(findings, "problem", "redis")
    assert wrong(findings, "task") == []  # what is here is looked at all the same


async def test_wrong_clock(look: Look, change: Change) -> None:
    findings = await look(now=lambda: time.time() + 5)
    said = the_one(findings, "warning", "clock")
    found = re.search(r"this machine's clock is ([\d.]+) s ahead of Redis's", said)
    assert found, said
    assert float(found[1]) == pytest.approx(5, abs=1)  # it is asked while others work


async def test_more_tasks_in_flight_than_memory_allows(look: Look, change: Change) -> None:
    findings = await look(
        "scheduler.policy.kind=in_flight",
        "scheduler.policy.n=10",
        "scheduler.memory_budget=400000",
    )
    # 400,000 // 19,240 = 20 models, of which 17 are kept and 2 in the making
    assert "keeps 1 task open instead of 10 -> raise scheduler.memory_budget to 558.0 kB" in (
        the_one(findings, "warning", "redis memory")
    )


# the run


async def test_run_made_with_another_configuration(look: Look, change: Change, hand: Hand) -> None:
    await hand.create(strategy="fedbuff", devices=20)  # of 4 parameters, 100 versions
    findings = await look()
    assert [(level, said.split(" -> ")[0][:60]) for level, said in wrong(findings, "run")] == [
        ("problem", "strategy.name = 'fedasync', the run was made with 'fedbuff'"),
        ("problem", "the model of task 'digits' has 4810 parameters in 4 tensors "),
        ("problem", "10 devices (task.devices), but the run was made with 20"),
        ("warning", "run.versions = 400, but the run was made to end at version 1"),
    ]
    assert "fedstream updater --adopt" in wrong(findings, "journal")[0][1]
    [(level, said)] = wrong(findings, "services")
    assert (level, said.split(" -> ")[0]) == (
        "warning",
        "the run is not finished but has no coordinator, no trainer",
    )
    assert said.endswith(
        "start what is missing (Redis before 7.2 hides a coordinator without work)"
    )


async def test_nothing_is_compared_without_a_configuration(
    look: Look, change: Change, hand: Hand
) -> None:
    await hand.create(strategy="fedbuff")
    findings = await look(configured=False)
    assert [one.text for one in findings if one.about == "run"] == [
        "is running; made by strategy 'fedbuff' with task 'digits'"
    ]
    assert {one.about for one in findings if one.level == "not checked"} == {
        "configuration beside the run's",
        "journal",
        "redis memory for the run",
        "task, data, torch",
    }
    assert doctor.exit_code(findings) == 0


async def test_dead_letters_and_a_permanent_lease(
    look: Look, change: Change, hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    dead = Dead(stream="tasks", entry="1-1", reason="junk", time=1.0, deliveries=3, data=b"x")
    await client.call("XADD", keys.dead, "*", "m", dead.encode())
    await client.call("PERSIST", keys.leader("updater"))
    findings = await look()
    assert wrong(findings, "dead letters") == [
        ("warning", "1 -> inspect them: fedstream dead list")
    ]
    [problem, _] = wrong(findings, "services")
    assert problem == (
        "problem",
        "the lease of the updater never expires -> if none is running, delete it: UNLINK "
        + keys.leader("updater"),
    )


# the journal's volume


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """A configuration that is asked about this machine alone."""
    monkeypatch.delenv("FEDSTREAM_DATA", raising=False)
    return lambda *more: read(None, [f"journal.dir={tmp_path / 'journal'}", *more])


Here = Callable[..., Settings]


def test_unwritable_journal(here: Here, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = list(volume.disk(here(f"journal.dir={tmp_path / 'file' / 'journal'}"), None))
    assert the_one(findings, "problem", "journal volume") == (
        f"{tmp_path / 'file'}: Not a directory -> let the updater's user write there, or set "
        "journal.dir to another folder"
    )
    assert len(findings) == 1


def test_checking_a_volume_leaves_nothing_behind(here: Here, tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    before = (tmp_path / "journal").stat().st_blocks
    findings = list(volume.disk(here(), 1000))
    assert "can be written, " in findings[0].text
    assert list(tmp_path.rglob("*")) == [tmp_path / "journal"]
    assert (tmp_path / "journal").stat().st_blocks == before


@pytest.mark.parametrize(
    ("free", "level", "said"),
    [
        (1000, "problem", "1.0 kB free: no room to start a segment with a model of 19.2 kB"),
        (10**9, "warning", "1.0 GB free; the journal has 0 bytes and may grow by 11.8 GB"),
        (10**11, "ok", "100.0 GB free; the journal has 0 bytes and may grow by 11.8 GB"),
    ],
)
def test_volume_that_is_too_small(
    here: Here, monkeypatch: pytest.MonkeyPatch, free: int, level: str, said: str
) -> None:
    monkeypatch.setattr(volume, "_free", lambda _folder: free)
    [_, space] = volume.disk(here(), 19_240)
    assert (space.about, space.level, space.text) == ("journal space", level, said)


def test_disk_slower_than_the_sync_interval(here: Here) -> None:
    [speed, _] = volume.disk(here("journal.sync_s=1e-9"), 1000)
    assert speed.level == "warning"
    assert "more than journal.sync_s = 1e-09 -> use a faster disk" in str(speed)


def test_folder_of_another_run(here: Here, tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000001-000001.journal").write_bytes(b"something else")
    found = volume.journal(here(), None, asked=True)
    assert found.level == "problem"
    assert "is not a journal segment" in found.text


# task and machine


def test_missing_data(here: Here, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    loaded, findings = task.load(here("task.name=mnist", f"task.data_root={nowhere}"))
    assert loaded == task.Loaded()
    assert [(one.level, one.about) for one in findings] == [
        ("problem", "data root"),
        ("problem", "task"),
    ]
    assert str(findings[0]) == (
        f"task.data_root = {nowhere!r} is not a folder -> mount it, or set another"
    )
    assert nowhere in findings[1].text
    _, [_, later] = task.load(
        here("task.name=mnist", f"task.data_root={nowhere}", "task.download=true")
    )
    assert (later.level, later.about) == ("not checked", "task")
    assert not Path(nowhere).exists()  # looking fetches nothing
    _, findings = task.load(here(f"task.data_root={nowhere}"))  # the digits need none
    assert findings[0].level == "warning"


_TASK = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Mine(Task):
    def model(self):
        return torch.nn.Linear(3, 2)
    def device_data(self, device):
        return TensorDataset(torch.ones({samples}, {columns}), torch.ones({samples}).long())

task = Mine()
"""


@pytest.mark.parametrize(
    ("samples", "columns", "said"),
    [
        (5, 4, "device 0: RuntimeError: mat1 and mat2"),
        (0, 3, "device 0 has no data: its data set is empty"),
    ],
)
def test_data_that_does_not_fit_the_model(
    here: Here, tmp_path: Path, samples: int, columns: int, said: str
) -> None:
    file = tmp_path / f"doctors_task_{samples}_{columns}.py"
    file.write_text(_TASK.format(samples=samples, columns=columns))
    loaded, findings = task.load(here(f"task.name={file}:task"))
    assert said in the_one(findings, "problem", "task")
    assert loaded.layout is not None
    assert loaded.layout.parameters == 8  # what was good of it is known


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "none: the run will not be measured"),
        (("evaluator.on_devices.count=1",), "the devices' own"),
        (("evaluator.per_device=last",), "the devices' own"),
    ],
)
def test_test_data_of_the_devices_alone(
    here: Here, tmp_path: Path, keys: tuple[str, ...], said: str
) -> None:
    file = tmp_path / f"{tmp_path.name}.py"  # a module is imported once
    file.write_text(_TASK.format(samples=5, columns=3))
    with file.open("a") as more:
        more.write("Mine.device_test_data = Mine.device_data\n")
    _, findings = task.load(here(f"task.name={file}:task", *keys))
    assert [one.text for one in findings if one.about == "test data"] == [said]


def test_more_threads_than_cores_and_a_missing_gpu(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = here("trainer.threads=1024", "evaluator.device=cuda")
    threads, gpu, _ = task.computing(settings, None)
    assert (threads.level, gpu.level) == ("warning", "problem")
    assert "trainer.threads = 1024 on" in threads.text
    assert gpu.text.startswith("evaluator.device = 'cuda': torch finds no CUDA device here")


# judgements on values


@pytest.mark.parametrize(
    ("info", "level", "text"),
    [
        ({"redis_version": "5.0.14"}, "problem", "Redis 5.0.14"),
        ({"redis_version": "6.2.0"}, "ok", "Redis 6.2.0"),
        ({"redis_version": "8.4.1"}, "ok", "Redis 8.4.1"),
        ({"redis_version": "9.0.0"}, "warning", "Redis 9.0.0"),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.1"}, "ok", "Valkey 9.0.1"),
    ],
)
def test_versions(info: dict[str, str], level: str, text: str) -> None:
    found = server.version(info)
    assert (found.level, found.text) == (level, text)


@pytest.mark.parametrize(
    ("info", "cluster", "sentinel", "level", "said"),
    [
        ({"redis_mode": "sentinel"}, False, False, "problem", "is a sentinel"),
        (
            {"role": "slave", "master_host": "m", "master_port": "1"},
            False,
            False,
            "problem",
            "is a replica of m:1, which takes no writes",
        ),
        (
            {"role": "master", "cluster_enabled": "1"},
            False,
            False,
            "problem",
            "is part of a cluster -> set redis.cluster = true",
        ),
        ({"role": "master"}, True, False, "problem", "set redis.cluster = false"),
        ({"role": "master", "cluster_enabled": "1"}, True, False, "ok", "a master of a cluster"),
        ({"role": "master"}, False, True, "warning", "a master without a replica"),
        ({"role": "master", "connected_slaves": "2"}, False, True, "ok", "a master, 2 replicas"),
    ],
)
def test_parts(info: dict[str, str], cluster: bool, sentinel: bool, level: str, said: str) -> None:
    [found] = server.part(info, cluster=cluster, sentinel=sentinel)
    assert found.level == level
    assert said in str(found)


def test_failing_or_unreadable_persistence() -> None:
    failing = server.persistence({"rdb_last_bgsave_status": "err"}, "60 1")
    assert [one.level for one in failing] == ["problem", "warning"]
    [found] = server.persistence({"aof_enabled": "0"}, None)
    assert (found.level, found.text) == ("not checked", "this user may not CONFIG GET save")
    assert next(iter(server.persistence({"loading": "1"}, ""))).level == "problem"


MEMORY = {"used_memory": "1000000", "maxmemory": "1000000000"}


@pytest.mark.parametrize(
    ("info", "model_bytes", "level", "said"),
    [
        (MEMORY, 1_000_000, "ok", "uses 1.0 MB of 1.0 GB; 4 tasks, 1 in the queue, 3 kept and 2"),
        (
            MEMORY,
            100_000_000,
            "warning",
            "may use 800.0 MB and keeps 2 tasks open instead of 4 -> raise maxmemory to 1.2 GB",
        ),
        (MEMORY, 400_000_000, "problem", "a model 400.0 MB, so no update of it can become"),
        (MEMORY | {"used_memory": "950000000"}, 1_000_000, "warning", "nearly full: uses 950.0 MB"),
        (MEMORY | {"used_memory": "1000000001"}, 1_000_000, "problem", "full: uses 1.0 GB"),
        ({"used_memory": "5", "maxmemory": "0"}, 1_000_000, "ok", "uses 5 bytes; 4 tasks"),
    ],
)
def test_memory(info: dict[str, str], model_bytes: int, level: str, said: str) -> None:
    wants = server.Need(model_bytes, open=4, queue=1, kept=3)
    found = server.room(info, wants, budget=None)
    assert found.level == level
    assert said in str(found)


def test_memory_a_run_needs() -> None:
    layout = layout_of(1000)  # 4,000 bytes

    def models(policy: Any, **more: Any) -> tuple[int, int]:
        about: dict[str, Any] = {"devices": 10, "workers": 3, "queue": 0, "keep": (16, 1 << 30)}
        need = server.need(policy, more.pop("layout", layout), **about | more)
        return need.open, need.kept

    assert models(InFlight()) == (3, 17)
    assert models(InFlight(), workers=0) == (1, 17)
    assert models(InFlight(n=100)) == (10, 17)  # a device trains one task at a time
    assert models(Poisson(n=5)) == (5, 17)
    assert models(Rounds(k=7), keep=(16, 20_000)) == (7, 6)
    assert models(InFlight(), keep=(16, 1)) == (3, 3)  # always the newest two, and the best
    # x and c are 8,000 bytes, and the c_i of 10 devices as much as 5 models: they are there twice
    assert models(InFlight(), layout=layout.with_controls(), keep=(4, 1 << 30)) == (3, 15)
    assert models(InFlight(), layout=with_frozen(layout, *range(2500))) == (3, 20)


def test_distant_redis() -> None:
    assert server.latency([0.001, 0.002, 0.003], timeout_s=10).level == "ok"
    far = server.latency([0.001, 0.002, 1.5], timeout_s=10)
    assert far.level == "warning"
    assert far.text.startswith("round trip 2.00 ms, median of 3; slowest 1500.00 ms")


def test_fastest_exchange_determines_the_clock_skew() -> None:
    asked = [(100.0, 105.0, 110.0), (200.0, 203.01, 200.02)]  # 0 +- 5 s, and 3 s +- 10 ms
    assert "3.0 s behind" in server.clock(asked).text
    assert server.clock(asked[:1]).level == "ok"


# the command


def _run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_command_prints_lines_or_json_and_exits_with_1_or_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSTREAM_JOURNAL__DIR", str(tmp_path / "journal"))
    nobody = ("--redis", "redis://127.0.0.1:1/0")
    code, out, _ = _run(capsys, *nobody)
    assert code == 1
    assert out.splitlines()[0].startswith("problem      redis ")
    code, out, _ = _run(capsys, *nobody, "--json")
    told = json.loads(out)
    assert (code, told["problems"]) == (1, 1)
    assert told["findings"][0].keys() == {"level", "about", "text", "change"}
    monkeypatch.delenv("FEDSTREAM_JOURNAL__DIR")
    _, out, _ = _run(capsys, *nobody)
    assert "task, data, torch        needs the deployment's configuration: --config" in out
    _, out, _ = _run(capsys, *nobody, "--set", f"journal.dir={tmp_path / 'other'}")
    assert str(tmp_path / "other") in out
    code, out, err = _run(capsys, "--set", "journal.nothing=1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = _run(capsys, "--run", "not a name")
    assert (code, out) == (2, "")
    assert err.startswith("fedstream: --run: 'not a name'")
    code, out, err = _run(capsys, "--redis", "redis://[::1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fedstream: redis.url: ")
