"""The sinks' service: what trackers get, and what happens when one fails or comes too late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError
from fedstream.core.messages import Contribution, Event, Version
from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from fedstream.sinks import Reached, Sink, SinkSettings, TrackedPoint, TrackedRun, TrackedValue
from fedstream.sinks.service import Sinks
from fedstream.sinks.settings import added, named, parameters
from fedstream.sinks.sink import Feed, counted
from fedstream.sinks.tensorboard import TensorBoardSettings
from tests.fedstream.sinks.conftest import Messages
from tests.fedstream.views import event
from tests.support import context, running, wait_until
from tests.support import counted as metric


class Remembers(SinkSettings):
    """A tracker in memory, which can be told to fail."""

    kind: str = "remembers"
    every_s: float = 0.01

    def build(self) -> Sink:
        return Memory()


class Memory(Sink):
    """Knows nothing of before."""

    def __init__(self) -> None:
        self.fails = False
        self.begun: list[TrackedRun] = []
        self.written: list[TrackedPoint] = []
        self.summaries: list[Mapping[str, TrackedValue]] = []
        self.models: list[dict[str, Any]] = []

    def begin(self, run: TrackedRun) -> Reached | None:
        if self.fails:
            raise OSError("no route to tracker\nand more")
        self.begun.append(run)
        return None  # the cursor decides

    def write(self, points: Sequence[TrackedPoint]) -> None:
        if self.fails:
            raise OSError("no route to tracker\nand more")
        self.written += points

    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        self.summaries.append(summary)
        self.models.append({} if model is None else load_file(model))

    def close(self) -> None:
        pass

    def versions(self) -> list[int]:
        return [point.version for point in self.written if point.kind == "version"]


def memory_of(service: Sinks) -> Memory:
    [(_, sink)] = service._sinks
    assert isinstance(sink, Memory)
    return sink


async def test_failing_tracker_catches_up_and_the_cursor_outlives_the_process(
    messages: Messages, service: Callable[..., Sinks]
) -> None:
    first, live = service(Remembers()), context()
    tracker = memory_of(first)
    async with running(first, live):
        await wait_until(lambda: tracker.begun)
        assert tracker.begun[0].parameters == {
            "strategy.alpha": 0.6,
            "run.versions": 100,
            "goal.bits": "min",
        }
        await messages.version(1)
        await wait_until(lambda: tracker.versions() == [0, 1])
        tracker.fails = True
        for number in (2, 3):
            await messages.version(number)
        await wait_until(lambda: metric(live, "fedstream_sink_failures_total", sink="remembers"))
        assert live.health.not_ready()
        tracker.fails = False
        await wait_until(lambda: tracker.versions() == [0, 1, 2, 3])
    second = service(Remembers())
    again, live = memory_of(second), context()
    async with running(second, live):
        await wait_until(lambda: again.begun)
        await messages.version(4)
        await wait_until(lambda: again.versions() == [4])
        assert metric(live, "fedstream_sink_version", sink="remembers") == 4


async def test_versions_trimmed_before_they_were_written_are_counted(
    messages: Messages, service: Callable[..., Sinks]
) -> None:
    for number in range(1, 8):
        await messages.version(number)
    await messages.hand.client.call("XTRIM", messages.hand.keys.models, "MAXLEN", 2)
    late, live = service(Remembers()), context()
    async with running(late, live):
        await wait_until(lambda: memory_of(late).versions() == [6, 7])
        await wait_until(
            lambda: metric(live, "fedstream_sink_lost_versions", sink="remembers") == 6
        )


async def test_stopped_at_the_end_of_the_run_it_writes_the_rest_and_the_model(
    messages: Messages, service: Callable[..., Sinks]
) -> None:
    sinks, live = service(Remembers()), context()
    live.stop.set()  # before it has read anything
    for number in (1, 2):
        await messages.version(number)
    await messages.evaluation(2)
    await messages.finish()
    async with running(sinks, live) as task:
        await wait_until(task.done)
    tracker = memory_of(sinks)
    assert tracker.versions() == [0, 1, 2]
    [newest] = [point for point in tracker.written if "tasks/issued" in point.values]
    assert newest.version == 2
    [summary] = tracker.summaries
    assert (summary["why"], summary["test/accuracy"]) == ("enough", 0.002)
    [model] = tracker.models
    assert model["weight"].tolist() == [0, 0, 0, 0]  # of version 0, the only one in this Redis


def test_feed_gives_each_version_and_measurement_once() -> None:
    update = Contribution(task="a", device=1, tau=0, staleness=2, weight=0.5, samples=1, steps=1)
    late = update.model_copy(update={"staleness": 4, "weight": 0.25, "loss": 1.5})

    def version(number: int, *updates: Contribution) -> Version:
        return Version(
            version=number, time=1.0, epoch=1, digest="d", blob="b", size=1, updates=updates
        )

    def measured(number: int, **changes: Any) -> Event:
        about = {"what": "evaluation", "metrics": {"loss": 0.5}, "version": number}
        return Event(service="e", time=2.0, **{**about, **changes})

    feed = Feed(Reached(2, 10))
    points = feed.points(
        [version(2, update), version(3, update, late), version(6, update), version(7), version(3)],
        [measured(10), measured(12, device=3), measured(20), measured(20)],
    )
    assert [(point.kind, point.version) for point in points] == [
        ("version", 3),
        ("version", 6),
        ("evaluation", 20),
    ]
    assert points[0].values == {
        "updates": 2,
        "weight": 0.375,
        "staleness/mean": 3,
        "staleness/max": 4,
        "train/loss": 1.5,
    }
    assert feed.lost == 3  # 4 and 5, which were trimmed, and 7, of which nothing is known
    assert feed.reached == Reached(7, 20)
    with_counts = counted(points, {"tasks/issued": 9})
    assert ["tasks/issued" in point.values for point in with_counts] == [False, True, False]


def test_what_devices_measure_has_points_of_its_own() -> None:
    """They may come late, when the evaluator has gone on."""
    feed = Feed(Reached())
    told = [
        event("evaluation", version=20, metrics={"accuracy": 0.5}),
        event("devices_evaluated", version=10, metrics={"devices_loss": 1.0}),
        event("devices_evaluated", version=20, metrics={"device_mean_loss": 2.0}),
        event("devices_evaluated", version=20, metrics={"device_mean_loss": 2.0}),  # again
    ]
    assert [(one.kind, one.version, one.values) for one in feed.points([], told)] == [
        ("evaluation", 20, {"test/accuracy": 0.5}),
        ("devices", 10, {"devices/loss": 1.0}),
        ("devices", 20, {"devices/mean_loss": 2.0}),
    ]
    assert feed.reached == Reached(-1, 20, 20)
    assert feed.has_tried(20)
    feed.points([], [event("devices_evaluated", version=30, metrics={})])
    assert not feed.has_tried(30)  # the evaluator has not


def settings_of(*sets: str) -> Settings:
    return load(Settings, path=None, environ={}, sets=sets)


def test_track_adds_to_the_configured_sinks_and_names_are_distinct(tmp_path: Path) -> None:
    table = f'{{kind = "tensorboard", dir = "{tmp_path}"}}'
    sinks = settings_of(f"sinks=[{table}, {table}]").sinks
    assert [one["kind"] for one in added(sinks, ["tensorboard", "mlflow"])] == [
        "tensorboard",
        "tensorboard",
        "mlflow",
    ]
    assert [one.name for one in named(sinks)] == ["tensorboard", "tensorboard-2"]


def test_parameters_are_flat_and_without_secrets() -> None:
    found = parameters(
        settings_of("redis.password=hunter2", "redis.url=redis://u:hunter2@h", "run.seed=3")
    )
    assert found["run.seed"] == 3
    assert found["strategy.name"] == "fedasync"
    assert found["devices.slow_devices"] == "[]"
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ('[{kind="tensorbord"}]', "did you mean 'tensorboard'"),
        ('[{kind="wandb", mode="of"}]', "sinks[0].mode"),
    ],
)
def test_wrong_sinks_are_reported_by_key(sets: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of(f"sinks={sets}")
    assert said in str(raised.value)


def test_missing_extra_and_folder_are_reported_in_a_line(
    monkeypatch: pytest.MonkeyPatch, keys: Keys, service: Callable[..., Sinks]
) -> None:
    with pytest.raises(ConfigError, match="tensorboard needs dir"):
        service(TensorBoardSettings())
    monkeypatch.setattr("fedstream.sinks.sink.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstream\[tensorboard\]'"):
        service(TensorBoardSettings(dir="x"))
    with pytest.raises(ConfigError, match="no sinks"):
        service()
