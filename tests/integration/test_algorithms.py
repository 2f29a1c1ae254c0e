"""Every algorithm that takes deltas, live: its replay and the same arrivals simulated agree.

SCAFFOLD runs as `fedstream run`, with an updater that is killed; the others with all services in
this process and a real Redis, since what differs between them is in the updater and the solvers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.given import given
from fedstream.journal import Segment, SegmentHead, Taken, cuts, entries, opened
from fedstream.journal.inspection import model_at
from fedstream.journal.rebuild import recovered
from fedstream.journal.records import is_used
from fedstream.journal.replay import Replayer
from fedstream.settings.config import Settings, read
from fedstream.simulation import Arrival, SimulationResult, simulate
from tests.broker.pipeline import Pipeline, finished, pipeline
from tests.integration.command import TEST_GUARD_S, Command, adds_up, held

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

VERSIONS = 10
SETS = ("strategy.buffer_size=3", "journal.segment_versions=4")  # three updates make a version
RULES = {
    "fedbuff": ("strategy.staleness.kind=polynomial",),
    "afa-cd": ("solver.lr=0.1", "strategy.server_lr=0.5"),
    "afa-cs": ("solver.lr=0.1", "strategy.server_lr=0.5"),
}
ONE_BY_ONE = ("simulation.batched=false", "simulation.threads=1")
DIGITS = """
from fedstream import Task
from fedstream.trainer.images import digits
from fedstream.trainer.task import TaskSettings

class Digits(Task):
    _as = digits(TaskSettings())
    devices, model, device_data, test_data = 10, _as.model, _as.device_data, _as.test_data
task = Digits()
"""


def arrivals_of(chain: list[Segment]) -> list[Arrival]:
    """What arrived, as the journal has it."""
    taken = [
        message
        for segment, cut in cuts(chain)
        for _, message in entries(segment, cut)
        if isinstance(message, Taken) and is_used(message)
    ]
    taus = [message.upload.tau for message in taken]
    return [
        Arrival(
            n=n,
            device=message.upload.device,
            seed=message.upload.seed or 0,
            steps=message.upload.steps,
            epochs=None,
            tau=message.upload.tau,
            version=message.version - (message.digest is not None),
            makes=message.digest is not None,
            oldest=min(taus[n:]),
            time=float(n),
        )
        for n, message in enumerate(taken)
    ]


def simulated(settings: Settings, chain: list[Segment]) -> SimulationResult:
    """The same arrivals in virtual time: one code path, the same bits."""
    outcome = simulate(settings, arrivals=arrivals_of(chain))
    assert outcome.versions[-1].version == VERSIONS
    last, how = model_at(chain, VERSIONS)[0], settings.wire.of_models
    if not how.is_exact:  # a simulation's result is what devices are given, like a live run's
        one = given(last, how, version=VERSIONS, sends=settings.rule.sends, digests="sha256")
        how.decode(one.payload.buffer, last)
    assert outcome.model.digest() == last.digest()
    return outcome


def agree(services: Pipeline, folder: Path) -> list[SegmentHead]:
    """The journal's replay and a simulation of its arrivals give the live run's bits.

    Returns the heads of the segments.
    """
    with Replayer(folder) as replayer:
        moments = [moment.identical for moment in replayer if moment.message.digest]
    assert moments == [True] * VERSIONS
    with opened(folder) as chain:
        outcome = simulated(read(None, [*services.sets, *ONE_BY_ONE]), chain)
        heads = [segment.head for segment in chain]
    assert outcome.last("loss") < outcome.measured[0].metrics["loss"]
    return heads


def test_scaffold_run_with_a_killed_updater_gives_the_same_bits(
    tmp_path: Path, quick_programs: Path
) -> None:
    program = "digits_held.py"  # it is imported here, too
    (tmp_path / program).write_text(held(DIGITS, 4))
    sets = (*SETS, "solver.kind=scaffold", "solver.lr=0.1", "wire.model=int8")
    command = Command(
        tmp_path,
        f"--strategy scaffold --versions {VERSIONS} --trainers 1 --task {program}:task",
        sets=sets,
        programs=quick_programs,
    )
    try:
        command.reaches(4)
        pid = command.pid("updater")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        command.go()
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    summary, tasks = command.summary, command.summary["tasks"]
    assert adds_up(summary)
    assert (summary["strategy"], summary["state"]) == ("scaffold", "finished")
    assert (summary["versions"], tasks["applied"]) == (VERSIONS, VERSIONS)
    assert tasks["buffered"] == 2 * VERSIONS
    assert tasks["refused"] == tasks["dead"] == 0
    assert summary["accuracy"] > 0.3  # it has learned: guessing is 0.1
    assert {name for name, times in summary["restarts"].items() if times} == {"updater"}
    said = subprocess.run(
        [quick_programs / "fedstream", "replay", command.out, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    replayed = json.loads(said.stdout)
    assert (replayed["made"], replayed["identical"]) == (VERSIONS, VERSIONS)
    with opened(command.out) as chain:
        assert {segment.head.epoch for segment in chain} == {1, 2}
        assert chain[-1].head.needs
        progress = recovered(chain[-1]).progress
        simulated(read(command.out / "run.toml", ONE_BY_ONE), chain)
    assert progress is not None
    vectors, c = progress.state.memory.devices, progress.state.model.controls
    assert vectors is not None
    assert np.any(c)
    assert c == pytest.approx(
        np.mean([vectors[n] for n in range(vectors.devices)], axis=0), abs=1e-4
    )


@pytest.mark.parametrize("name", RULES)
async def test_run_replay_and_simulation_agree(
    name: str, client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    sets = (f"strategy.name={name}", f"run.versions={VERSIONS}", *SETS, *RULES[name])
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for trainer in ("ann", "bob"):
            await services.start("trainer", trainer)
        view = await finished(client, keys)
    used = {outcome: n for outcome, n in view.outcomes.items() if n and outcome != "given_up"}
    assert used == {"applied": VERSIONS, "buffered": 2 * VERSIONS}
    _, *later = agree(services, tmp_path / "journal")
    assert len(later) > 1
    assert all(bool(head.needs) == (name == "afa-cs") for head in later)


async def test_ringleader_agrees(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    """Segments begin in the middle of rounds, which the devices' numbers know."""
    sets = ("strategy.name=ringleader", f"run.versions={VERSIONS}", SETS[-1])
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for trainer in ("ann", "bob"):
            await services.start("trainer", trainer)
        view = await finished(client, keys)
    assert view.outcomes["applied"] == VERSIONS
    assert view.outcomes["buffered"] >= 5, "until each device had sent one"
    agree(services, tmp_path / "journal")


@pytest.mark.parametrize(
    "rule",
    [
        ("name=fedbuff", "aggregate=median", "buffer_size=3", "clip=0.5"),
        ("name=basgd", "buckets=3"),
        ("name=aflguard", "root=[0,1]", "radius=1.3"),
    ],
    ids=lambda rule: rule[0],
)
async def test_rules_that_resist_attackers_agree(
    rule: tuple[str, ...], client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    sets = (*(f"strategy.{key}" for key in rule), f"run.versions={VERSIONS}", SETS[-1])
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for trainer in ("ann", "bob"):
            await services.start("trainer", trainer)
        view = await finished(client, keys)
    assert view.outcomes["applied"] == VERSIONS
    assert view.outcomes["buffered"] > 0
    agree(services, tmp_path / "journal")


async def test_ringmaster_agrees_and_cancels_the_tasks_of_slow_devices(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    sets = (
        "strategy.name=ringmaster",
        "strategy.max_staleness=1",
        f"run.versions={VERSIONS}",
        "devices.latency={kind='fixed', mean_s=0.2}",
        "devices.slow_devices=[0,1]",
        "devices.slow_factor=3000",
        SETS[-1],
    )
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for trainer in ("ann", "bob", "cat"):
            await services.start("trainer", trainer)
        view = await finished(client, keys)
    assert view.outcomes["applied"] == VERSIONS
    assert view.reasons("given_up")["became too stale"] > 0
    agree(services, tmp_path / "journal")
