"""A sinks process that is killed again and again writes every version exactly once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import tensorboardX.event_file_writer  # noqa: F401  (once, before the forks)
from mlflow import MlflowClient

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.runtime.http import HttpSettings
from fedstream.runtime.logging import LogSettings
from fedstream.runtime.service import serve
from fedstream.sinks.mlflow import MLflowSettings
from fedstream.sinks.service import Sinks
from fedstream.sinks.settings import named
from fedstream.sinks.sink import SinkSettings
from fedstream.sinks.tensorboard import TensorBoardSettings
from tests.fedstream.sinks.conftest import Messages, tensorboard_of
from tests.support import wait_until

KILLS = 10


def child(sinks: Sequence[SinkSettings], keys: Keys, redis: RedisSettings, log: Path) -> None:
    """The service as a process; forked, because starting one takes seconds."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    service = Sinks(named(sinks), {"a": 1}, keys=keys, redis=redis, name="sinks")
    os._exit(
        serve(
            service,
            http=HttpSettings(),
            log=LogSettings(),
            run=keys.name,
            name="sinks",
            drain_s=20.0,
        )
    )


def _is_at_least(count: Callable[[], int], least: int) -> bool:
    return count() >= least


@pytest.mark.process
async def test_each_version_is_written_once_by_a_process_killed_ten_times(
    messages: Messages, redis: RedisSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "mlruns").as_uri()
    sinks = (
        TensorBoardSettings(dir=str(tmp_path / "tensorboard"), every_s=0.001),
        MLflowSettings(tracking_uri=store, every_s=0.001),
    )
    rng, keys, log = random.Random(7), messages.hand.keys, tmp_path / "log"
    fork = multiprocessing.get_context("fork")
    written = 0

    async def go_on(seconds: float) -> None:
        nonlocal written
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            written += 1
            await messages.version(written)
            if written % 10 == 0:
                await messages.evaluation(written)
            await asyncio.sleep(0.001)

    def begun() -> int:
        return log.read_text().count('"tracking"')  # a line for each sink

    log.touch()
    for life in range(KILLS):
        # Killed at ten different places, not ten times before it had begun. A folder of MLflow's is
        # lost if its writer is killed while it makes the run, so the first life does that in peace.
        enough = begun() + (len(sinks) if life == 0 else 1)
        process = fork.Process(target=child, args=(sinks, keys, redis, log))
        process.start()
        await wait_until(partial(_is_at_least, begun, enough), 60, "it has begun")
        await go_on(rng.uniform(0.0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, log.read_text()
    await messages.finish()
    process = fork.Process(target=child, args=(sinks, keys, redis, log))
    process.start()
    await wait_until(lambda: log.read_text().count('"complete"') == 2, 60, "both complete")
    process.terminate()
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0, log.read_text()

    versions = list(range(written + 1))
    measured = list(range(10, written + 1, 10))
    [folder] = (tmp_path / "tensorboard").iterdir()
    found = tensorboard_of(folder)
    assert [step for step, _ in found["version/updates"]] == versions
    assert found["staleness/mean"] == [(n, n % 3) for n in versions[1:]]
    assert dict(found["test/accuracy"]) == {n: pytest.approx(n / 1000) for n in measured}
    assert [step for step, _ in found["test/loss"]] == measured

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("fedstream")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    for key, steps in {
        "updates": versions,
        "staleness/max": versions[1:],
        "train/loss": versions[1:],
        "test/accuracy": measured,
        "test/loss": measured,
    }.items():
        assert [one.step for one in client.get_metric_history(run.info.run_id, key)] == steps, key
    assert run.info.status == "FINISHED"
    assert run.data.params == {"a": "1", "goal.bits": "min"}
