"""`fedstream trainer --flower` joins a run that a plain task of the same model began."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from tests.broker.pipeline import finished, lines, pipeline

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

VERSIONS = 12
APP = """
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

app = ClientApp()

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

@app.train()
def train(message, context):
    node = context.node_config
    arrays = {name: Array(1 + array.numpy()) for name, array in message.content["arrays"].items()}
    numbers = {"num-examples": 10 + node["partition-id"], "train_loss": node["num-partitions"]}
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)
"""
PROJECT = '[tool.flwr.app.components]\nclientapp = "joining_app:app"\n'


@contextmanager
def trainer(config: Path, app: Path) -> Iterator[None]:
    """The command, as a process. It has to end well when it is told to stop."""
    command = ["trainer", "--config", str(config), "--flower", str(app), "--name", "joined"]
    log = config.with_name("log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedstream", *command],
            stdout=output,
            stderr=output,
            env={n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")},
        )
    try:
        yield
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


async def test_trainer_joins_with_an_app(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    """The client trains every device, as a partition of as many as the run has devices."""
    app, config = tmp_path / "app", tmp_path / "run.toml"
    app.mkdir()
    (app / "joining_app.py").write_text(APP)
    (app / "pyproject.toml").write_text(PROJECT)
    config.write_text(
        f'[run]\nname = "{keys.name}"\n[redis]\nurl = "{redis.url}"\n'
        '[task]\nname = "tests.broker.pipeline:lines"\n'
    )
    async with pipeline(keys, lambda _role: redis, tmp_path, f"run.versions={VERSIONS}"):
        with trainer(config, app):
            view = await finished(client, keys)
    assert view.outcomes["applied"] == VERSIONS
    with Replayer(tmp_path / "journal") as replayer:
        records = [moment.message for moment in replayer]
    uploads = [one.upload for one in records if isinstance(one, Taken)]
    assert {one.samples - one.device for one in uploads} == {10}  # each partition is its device
    assert {one.loss for one in uploads} == {lines.devices}
