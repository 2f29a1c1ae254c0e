"""`fedstream device` as its owner starts it: a process of its own, its output and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestServer
from torch import nn

from fedstream.cli.app import main
from fedstream.core.layout import Model
from fedstream.trainer.vector import layout_of
from tests.device.fake import FakeGateway
from tests.support import wait_until

pytestmark = pytest.mark.process

PROGRAM = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Blobs(Task):
    def model(self):
        return torch.nn.Linear(2, 2)
    def device_data(self, device):
        y = torch.arange(100) % 2
        return TensorDataset(torch.arange(200.0).view(100, 2), y)

blobs = Blobs()
"""
Start = Callable[..., "asyncio.Future[Process]"]


@pytest.fixture
def name(tmp_path: Path) -> str:
    """The owner's task."""
    (tmp_path / "owners_task.py").write_text(PROGRAM)
    return f"{tmp_path}/owners_task.py:blobs"


@pytest.fixture
def x_tau(gateway: FakeGateway) -> Model:
    """The newest version's model, of that task: zeros."""
    gateway.layout = layout_of(torch.nn.Linear(2, 2))
    model = Model(gateway.layout)
    model.buffer[:] = 0
    return model


@pytest.fixture
async def start(
    tmp_path: Path, server: TestServer, gateway: FakeGateway, name: str, python: Path
) -> AsyncIterator[Start]:
    """Starts device 7 with these options."""
    running: list[Process] = []

    async def started(*options: str) -> Process:
        environment = {key: v for key, v in os.environ.items() if not key.startswith("FEDSTREAM_")}
        process = await asyncio.create_subprocess_exec(
            python,
            *("-P", "-m", "fedstream", "device"),
            "--url",
            str(server.make_url("/")),
            "--task",
            name,
            "--key",
            "device.pem",
            *options,
            cwd=tmp_path,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=environment | {"FEDSTREAM_INVITE": gateway.invite(7)},
        )
        running.append(process)
        return process

    yield started  # type: ignore[misc]
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_once_does_one_task_and_leaves_a_key_and_a_folder(
    start: Start, gateway: FakeGateway, x_tau: Model, tmp_path: Path
) -> None:
    offer = gateway.offer(x_tau)
    process = await start("--once", "--set", "solver.lr=0.25")
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    enrolled, answered = out.decode().splitlines()
    assert enrolled == "enrolled as device 7 of run demo"
    assert answered.startswith("task task-1: admitted: trained from version 0, 3 steps")
    assert gateway.sent[offer.attempt].report.lr == 0.25
    assert (tmp_path / "device.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "device.pem.state").stat().st_mode & 0o777 == 0o700


async def test_signal_gives_the_task_up_and_says_so(
    start: Start, gateway: FakeGateway, x_tau: Model
) -> None:
    gateway.offer(x_tau, steps=10**9, heartbeat_s=0.05)
    process = await start()
    await wait_until(lambda: gateway.beats)
    process.send_signal(signal.SIGTERM)
    out, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    assert out.decode().splitlines()[1:] == [
        "SIGTERM: leaving; a second signal ends this process at once",
        "task task-1: given up: dropped out",
    ]
    assert gateway.given_up == [("task-1", "dropped out")]


async def test_killed_device_goes_on_after_a_restart(
    start: Start, gateway: FakeGateway, x_tau: Model
) -> None:
    offer = gateway.offer(x_tau, heartbeat_s=0.05)
    gateway.fails("POST", "/v1/tasks/task-1/updates", status=503, headers={"Retry-After": "3000"})
    process = await start()
    await wait_until(lambda: not gateway.faults)
    process.kill()
    await process.communicate()
    gateway.over = True
    again = await start()
    out, _ = await again.communicate()
    assert again.returncode == 0
    assert gateway.sent[offer.attempt].complete
    device, delivered, over = out.decode().splitlines()
    assert device == "device 7 of run demo"
    assert delivered.startswith("task task-1: admitted")
    assert over == "the run is over"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--url", "http://gateway.example"], 2, "use https://"),
        (["--url", "https://127.0.0.1:9", "--ca", "none.pem"], 2, "--ca none.pem: cannot be read"),
        (["--url", "https://127.0.0.1:9", "--task", "none"], 2, "unknown task 'none'"),
        (["--url", "https://127.0.0.1:9", "--invite", "x"], 2, "that is not an invite"),
        (["--url", "https://127.0.0.1:9"], 2, "pass the invite"),
    ],
)
def test_mistake_is_told_in_one_sentence(
    options: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["device", "--key", "device.pem", *options])
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("fedstream: ")
    assert shown.err.count("\n") == 1


def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedstream.cli.device.find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main(["device", "--key", "k", "--url", "https://gateway.example"])
    assert ended.value.code == 2
    assert "pip install 'fedstream[device]'" in capsys.readouterr().err


# examples/plain_device.py

PLAIN = Path(__file__).parents[2] / "examples" / "plain_device.py"


@pytest.mark.process
async def test_a_task_of_another_model_is_given_up_with_a_reason(
    gateway: FakeGateway, server: TestServer, model: Model, python: Path
) -> None:
    gateway.offer(model)
    url = str(server.make_url("/")).rstrip("/")
    process = await asyncio.create_subprocess_exec(
        python, PLAIN, url, gateway.invite(7), stderr=PIPE
    )
    _, err = await process.communicate()
    assert (process.returncode, gateway.given_up) == (1, [("task-1", "raised ValueError")])
    said = f"given up: `train` is for another model than one of {model.layout.nbytes} bytes"
    assert err.decode().startswith(f"task task-1: {said}")


@pytest.mark.process
async def test_it_measures_a_model(server: TestServer, gateway: FakeGateway, python: Path) -> None:
    """The weights separate the two clouds of points."""
    clouds = nn.Linear(2, 2)
    gateway.layout = layout_of(clouds)
    model = Model(gateway.layout)
    model.floats[:] = [0.0, 0.0, 1.0, 1.0, 0.0, -3.0]
    offer = gateway.evaluates(model)
    url = str(server.make_url("/")).rstrip("/")
    process = await asyncio.create_subprocess_exec(
        python, PLAIN, url, gateway.invite(7), stdout=PIPE
    )
    await wait_until(lambda: gateway.measured)
    gateway.over = True
    out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "task eval-1: measured: True\n")
    hits, weight = gateway.measured[offer.task.id].sums["accuracy"]
    assert 95 < hits <= weight == 100


def test_it_stays_within_140_lines() -> None:
    assert len(PLAIN.read_text().splitlines()) <= 140
