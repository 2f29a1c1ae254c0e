"""The server's optimizers: the papers' formulas, in plain Python, and what a run keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from fedstream.core.layout import Model
from fedstream.journal.replay import Replayer
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.strategies import FedBuffSettings, State, Strategy, StrategySettings, Update
from fedstream.strategies.mixing import BLOCK
from fedstream.testing import check_strategy
from tests.support import layout_of, model_of
from tests.trainer.test_own_solver import Small

SETTINGS: TypeAdapter[Strategy] = TypeAdapter(StrategySettings)
ETA, TAU = 0.3, 0.02

# One element: the mean delta and the vectors before, to the step and the vectors after.
Step = Callable[[float, float, float], tuple[float, float, float]]


def momentum(d: float, m: float, v: float) -> tuple[float, float, float]:
    m = 0.8 * m + d
    return ETA * m, m, v


def nesterov(d: float, m: float, v: float) -> tuple[float, float, float]:
    m = 0.8 * m + d
    return ETA * (d + 0.8 * m), m, v


def adagrad(d: float, m: float, v: float) -> tuple[float, float, float]:
    m, v = 0.5 * m + 0.5 * d, v + d * d
    return ETA * m / (math.sqrt(v) + TAU), m, v


def adam(d: float, m: float, v: float) -> tuple[float, float, float]:
    m, v = 0.9 * m + 0.1 * d, 0.95 * v + 0.05 * d * d
    return ETA * m / (math.sqrt(v) + TAU), m, v


def yogi(d: float, m: float, v: float) -> tuple[float, float, float]:
    m = 0.9 * m + 0.1 * d
    v -= 0.05 * d * d * ((v > d * d) - (v < d * d))
    return ETA * m / (math.sqrt(v) + TAU), m, v


OPTIMIZERS: dict[str, tuple[dict[str, float], Step]] = {
    "momentum": ({"beta": 0.8}, momentum),
    "nesterov": ({"beta": 0.8}, nesterov),
    "adagrad": ({"beta1": 0.5, "tau": TAU}, adagrad),
    "adam": ({"beta2": 0.95, "tau": TAU}, adam),
    "yogi": ({"beta2": 0.95, "tau": TAU}, yogi),
}


def rule_of(name: str, kind: str, size: int, **more: Any) -> Strategy:
    keys = OPTIMIZERS[kind][0]
    about = {"name": name, "buffer_size": size, "server_lr": ETA, "server": {"kind": kind, **keys}}
    return SETTINGS.validate_python(about | more)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("name", "size"), [("fedbuff", 1), ("afa-cd", 3), ("afa-cs", 2)])
def test_known_answers(name: str, size: int, kind: str) -> None:
    """Against one element at a time in float64; deltas of -2 to 2, so that v both grows and
    falls."""
    devices, step = 4, OPTIMIZERS[kind][1]
    rule = rule_of(name, kind, size).build(devices)
    layout, rng = layout_of(5), np.random.default_rng(3)
    now = State(0, model_of(layout))
    x, m = [0.0] * 5, [0.0] * 5
    v = [TAU**2 if kind in ("adagrad", "adam", "yogi") else 0.0] * 5
    last, came = {device: [0.0] * 5 for device in range(devices)}, [[0.0] * 5] * 0
    for n in range(24):
        delta = Model(layout)
        delta.parameters[:] = rng.uniform(-2, 2, 5)
        new = Update(model=delta, tau=now.version, device=n % devices, samples=1, steps=2, lr=0.25)
        before = now.version
        now, _ = rule.receive(now, new, Model(layout))
        share = 1.0 if name == "fedbuff" else 1.0 / (0.25 * 2)
        last[n % devices] = [share * float(one) for one in delta.parameters]
        came.append(last[n % devices])
        if len(came) < size:
            assert now.version == before
            continue
        rows = list(last.values()) if name == "afa-cs" else came
        for i in range(5):
            moved, m[i], v[i] = step(sum(row[i] for row in rows) / len(rows), m[i], v[i])
            x[i] += moved
        came = []
        assert now.version == before + 1
        assert now.model.parameters == pytest.approx(x, rel=2e-5, abs=2e-6), n


@pytest.mark.parametrize(
    "rule",
    [
        *(rule_of("fedbuff", kind, 3) for kind in OPTIMIZERS),
        rule_of("fedbuff", "adam", 1),
        rule_of("afa-cs", "yogi", 2),
        rule_of("scaffold", "adam", 2),
    ],
    ids=lambda rule: f"{rule.name}-{rule.server.kind}-{rule.batch}",
)
def test_its_vectors_survive_journal_recovery_and_replay(rule: Strategy) -> None:
    check_strategy(rule)


def test_a_dropped_round_keeps_its_vectors() -> None:
    rule, layout = rule_of("fedbuff", "momentum", 1), layout_of(2)
    delta = model_of(layout, 1.0, 2.0)
    new = Update(model=delta, tau=0, device=0, samples=1, steps=1, lr=0.1)
    now, _ = rule.receive(State(0, model_of(layout)), new, Model(layout))
    vectors = rule.drop_round(now).memory.devices
    assert vectors is not None
    assert vectors["momentum m"].tolist() == [1.0, 2.0]


def test_every_block_of_a_large_model_moves() -> None:
    rule, layout = rule_of("fedbuff", "adagrad", 1), layout_of(BLOCK + 7)
    delta = Model(layout)
    delta.parameters[:] = 1.0
    new = Update(model=delta, tau=0, device=0, samples=1, steps=1, lr=0.1)
    now, _ = rule.receive(State(0, model_of(layout)), new, Model(layout))
    assert np.unique(now.model.parameters).size == 1
    assert now.model.parameters[0] > 0


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_a_square_beyond_float32_leaves_the_model_finite(kind: str) -> None:
    """Infinite squares would become NaN with the second one, or stop the element for good."""
    rule, layout = rule_of("fedbuff", kind, 1), layout_of(2)
    now = State(0, model_of(layout))
    for value in (1e30, 1e30, 1e30):
        delta = model_of(layout, value, 1.0)
        new = Update(model=delta, tau=now.version, device=0, samples=1, steps=1, lr=0.1)
        now, _ = rule.receive(now, new, Model(layout))
        vectors = now.memory.devices
        assert vectors is not None
        assert all(np.isfinite(vectors[name]).all() for name in vectors.names)
    assert np.isfinite(now.model.parameters).all()
    assert now.model.parameters[1] > 0


def test_a_replay_from_a_checkpoint_under_another_optimizer_begins_without_its_vectors(
    tmp_path: Path,
) -> None:
    """Names would be missing, or Adam's mean of gradients would become momentum's sum."""
    settings = read(
        None,
        [
            "run.versions=8",
            "journal.segment_versions=3",
            "strategy.name=fedbuff",
            "strategy.buffer_size=1",
            'strategy.server={kind="momentum"}',
        ],
    )
    simulate(settings, Small(), journal=tmp_path / "journal")
    for kind in ("adam", "nesterov", "sgd"):
        other = rule_of("fedbuff", kind, 1) if kind != "sgd" else FedBuffSettings(buffer_size=1)
        with Replayer(tmp_path / "journal", strategy=other, from_version=5) as replayer:
            assert [moment.version for moment in replayer][-1] == 8


def test_the_default_is_not_recorded() -> None:
    """An earlier release refuses a key that it does not know: it must go on with such a run."""
    plain = SETTINGS.validate_python({"name": "fedbuff"})
    assert "server" not in plain.model_dump(mode="json")
    adam_dump = rule_of("fedbuff", "adam", 3).model_dump(mode="json")
    assert adam_dump["server"] == {"kind": "adam", "beta1": 0.9, "beta2": 0.95, "tau": TAU}
