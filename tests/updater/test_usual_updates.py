"""What an update may not do to a model by default: be larger than is usual, or change integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.broker import blobs
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.journal import Taken, segments
from fedstream.journal.norms import Norms, sizes
from fedstream.journal.progress import Progress
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.strategies import (
    AfaCdSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    ScaffoldSettings,
    State,
    Strategy,
    Update,
)
from fedstream.strategies.mixing import count, distance, norm
from fedstream.updater.decider import refusal_by_content, refusal_by_integers
from tests.support import Hand, context, model_of, running, wait_until
from tests.updater.journalled import HALF, records, refused
from tests.updater.states import upload_of

UPLOAD = upload_of("t", tau=0, steps=2)
LAYOUT = Layout(
    (
        Tensor("weight", (4,), "float32", "parameter"),
        Tensor("mean", (2,), "float32", "buffer"),
    )
)


# sizes


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FedAsyncSettings(), (4.0, 0.0, 0.0)),  # 3 - 1, four times
        (FedBuffSettings(server_lr=0.5), (3.0, 0.0, 0.0)),  # half of 3, four times
        (AfaCdSettings(server_lr=0.1), (3.0, 0.0, 0.0)),  # of 6 / (gamma H)
    ],
)
def test_size_is_how_far_an_update_alone_moves_the_model(
    rule: Strategy, expected: tuple[float, ...]
) -> None:
    x, update = model_of(LAYOUT, 1.0), model_of(LAYOUT, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0)
    assert sizes(UPLOAD, rule.build(10), update, x) == pytest.approx(expected)


def test_buffers_are_measured_relative_to_the_model_and_controls_absolutely() -> None:
    layout = LAYOUT.with_controls()
    x, update = model_of(layout, 1.0), model_of(layout, 0.0)
    update.buffers[:] = (4.0, 5.0)
    update.controls[:] = 2.0
    found = sizes(UPLOAD, ScaffoldSettings().build(10), update, x)
    assert found == pytest.approx((0.0, 5.0, 4.0))


@given(st.lists(st.floats(-1e15, 1e15), max_size=9), st.floats(0, 1e15))
def test_distance_is_the_norm_of_the_difference(values: list[float], shift: float) -> None:
    a = np.asarray(values, np.float32)
    b = a - np.float32(shift)
    assert distance(a, b) == pytest.approx(norm(a - b))


# what is usual


def usual_of(*last: float) -> Norms:
    return Norms(tuple((size, 0.0, 0.0) for size in last))


def judged(norms: Norms, size: float, own: float = 0.0, n: int = 4) -> tuple[bool, float]:
    layout = Layout((Tensor("weight", (n,), "float32", "parameter"),))
    usual, counted = norms.judged((size, 0.0, 0.0), 30.0, model_of(layout, own))
    return usual, counted[0]


def test_up_to_30_times_the_median_is_accepted() -> None:
    norms = usual_of(*[1.0] * 40, *[1000.0] * 39)
    assert judged(norms, 30.0) == (True, 30.0)
    assert judged(norms, 30.1) == (False, 30.0)


def test_up_to_ten_times_the_model_is_accepted() -> None:
    assert judged(usual_of(*[1e-6] * 50), 40.0, own=2.0) == (True, 40.0)  # its norm is 4
    assert judged(usual_of(*[1e-6] * 50), 40.1, own=2.0) == (False, 40.0)


def test_converged_model_times_minus_20_is_refused() -> None:
    for median in (1e-6, 1.0, 2.0):  # half of the model's own norm
        assert judged(usual_of(*[median] * 50), 21 * 4.0, own=2.0)[0] is False


def test_vanished_controls_may_grow_as_large_as_parameters() -> None:
    x = model_of(LAYOUT.with_controls(), 2.0)
    x.controls[:] = 1e-6
    norms = Norms(((1.0, 0.0, 1e-6),) * 50)
    assert norms.judged((1.0, 0.0, 40.0), 30.0, x)[0]
    assert not norms.judged((1.0, 0.0, 40.1), 30.0, x)[0]


RARE = (
    "task.partition.p=1",
    "run.versions=60",
    "simulation.staleness.kind=none",
    "participation=[{devices=[0], rate=200.0}]",
)
"""One device with one class has converged when another with another class comes."""
UNEQUAL = (
    "run.versions=40",
    "run.seed=1",
    "task.seed=1",
    "solver.lr=0.1",
    "solvers=[{devices=[1, 4], lr=1.0}]",
)
"""Two of ten devices have ten times the others' learning rate."""


ALIKE = ("run.versions=5", "solver.lr=1.0")


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        (RARE, ("strategy.name=fedasync", "strategy.alpha=0.9")),
        (RARE, ("strategy.name=scaffold", "solver.kind=scaffold", "strategy.buffer_size=1")),
        (UNEQUAL, ("strategy.name=fedbuff",)),
        (ALIKE, ("strategy.name=fedavg",)),
        (ALIKE, ("strategy.name=afa-cs",)),
    ],
    ids=("fedasync", "scaffold", "unequal", "round", "means"),
)
def test_honest_devices_are_not_refused(devices: tuple[str, ...], rule: tuple[str, ...]) -> None:
    given = ("task.name=digits", "simulation.threads=1", "simulation.evaluate_every=0")
    settings = read(None, [*given, *devices, *rule])
    outcome = simulate(settings)
    assert outcome.versions[-1].version == settings.run.versions
    assert outcome.refused == {}


@pytest.mark.parametrize(("own", "largest"), [(0.02, 200.0), (0.011, 110.0), (0.009, 1e4)])
def test_first_updates_of_a_large_model_are_bounded_by_its_own_norm(
    own: float, largest: float
) -> None:
    """Not by a vector of ones, unless the model has no scale yet."""
    for seen in ([], [0.0] * 50):
        assert judged(usual_of(*seen), 0.99 * largest, own, 1_000_000)[0]
        assert not judged(usual_of(*seen), 1.01 * largest, own, 1_000_000)[0]


@pytest.mark.parametrize(
    ("own", "seen", "largest"),
    [
        (100.0, [], 2000.0),  # ten times its norm, which is 200
        (1.0, [], 31.62),  # as a vector of 1000 ones
        (0.0, [], 316.2),  # ten times that
        (1.0, [10.0] * 4, 31.62),
        (1.0, [10.0] * 5, 300.0),  # five give a median
        (1.0, [0.1] * 19, 31.62),
        (1.0, [0.1] * 20, 20.0),
    ],
)
def test_first_updates_are_bounded_by_the_model(
    own: float, seen: list[float], largest: float
) -> None:
    assert judged(usual_of(*seen), largest, own)[0]
    usual, counted = judged(usual_of(*seen), 1.01 * largest, own)
    assert not usual
    assert counted == pytest.approx(largest, rel=1e-3)


def test_large_updates_that_most_devices_share_are_soon_usual() -> None:
    """Such as a regression's on inputs that nobody scaled, whose model begins small."""
    norms, verdicts = usual_of(), []
    for _ in range(7):
        usual, counted = norms.judged((900.0, 0.0, 0.0), 30.0, model_of(LAYOUT, 0.1))
        norms = norms.grown(counted)
        verdicts.append(usual)
    assert verdicts == [False] * 5 + [True] * 2


def test_zero_updates_do_not_block_a_moving_one() -> None:
    assert judged(usual_of(*[0.0] * 50), 5.0) == (True, 5.0)


def test_size_of_most_devices_updates_becomes_usual() -> None:
    """A learning rate that was raised a hundredfold: the run goes on after a while."""
    norms, verdicts = usual_of(*[1.0] * 101), []
    for _ in range(60):
        usual, counted = norms.judged((100.0, 0.0, 0.0), 30.0, model_of(LAYOUT))
        norms = norms.grown(counted)
        verdicts.append(usual)
    assert not verdicts[0]
    assert verdicts[-1]
    assert len(norms.last) == 101


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=60), st.integers(0, 10))
def test_minority_cannot_raise_the_limit_for_long(attacks: list[float], seed: int) -> None:
    """Whatever they send: what is let through stays below the limit that honest ones set."""
    rng, norms = np.random.default_rng(seed), usual_of(*[1.0] * 101)
    for attack in attacks:
        for size in (attack, 1.0, float(rng.uniform(0.5, 2.0))):
            usual, counted = norms.judged((size, 0.0, 0.0), 30.0, model_of(LAYOUT))
            norms = norms.grown(counted)
            assert usual == (size <= 60.0) or 15.0 <= size <= 60.0


def test_each_part_has_its_own_limit() -> None:
    norms = Norms(((1.0, 100.0, 0.0),) * 50)
    assert norms.judged((1.0, 3000.0, 0.0), 30.0, model_of(LAYOUT))[0]
    assert not norms.judged((3000.0, 100.0, 0.0), 30.0, model_of(LAYOUT))[0]
    assert not norms.judged((1.0, 3001.0, 0.0), 30.0, model_of(LAYOUT))[0]


# in the updater


async def test_huge_first_update_is_refused_by_default(make: Any, hand: Hand) -> None:
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(400.0)
        await refused(hand, "norm too large")
        await hand.admitted(4.0)
        await hand.reaches(1)
        assert (await hand.model((await hand.published())[-1])).floats.tolist() == [2.0] * 4
        await hand.balanced()


async def test_median_survives_a_restart(make: Any, hand: Hand, folder: Path) -> None:
    """Also of updates behind the checkpoint, and of one that was refused."""
    updater = make(segment_versions=10)
    async with running(updater, context()):
        await hand.join()
        for n in range(25):
            await hand.admitted(1.0)
            await hand.reaches(n + 1)
        await hand.admitted(1e6)
        await refused(hand, "norm too large")
        before = updater._loop.state.progress.norms
    assert len(before.last) == 26
    assert len(records(folder)) == 26
    again = make()
    async with running(again, context()):
        await wait_until(lambda: again._recorder.head)
        assert segments(folder)[-1].standing.sizes == before.last
        await hand.join()
        await hand.admitted(1e5)
        await refused(hand, "norm too large", 2)


async def test_norm_limit_can_be_disabled(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(norm_factor=0), context()):
        await hand.join()
        await hand.admitted(1e36)
        await hand.reaches(1)
    [record] = records(folder)
    assert isinstance(record, Taken)
    assert record.sizes == ()


# integers

INTEGERS = Layout(
    (
        Tensor("weight", (2,), "float32", "parameter"),
        Tensor("position_ids", (3,), "int64", "integer"),
        Tensor("norm.num_batches_tracked", (), "int64", "counter"),
        Tensor("zero_point", (2,), "int8", "variable"),
        Tensor("ready", (), "bool", "variable"),
    )
)
X = (0, 1, 2, 50, 3, -3, 0)


@pytest.mark.parametrize(
    ("integers", "reason"),
    [
        (X, ""),
        ((0, 1, 2, 60, 127, -128, 1), ""),
        ((0, 1, 2, 40, 3, -3, 0), ""),  # stale: it began when fewer were counted
        ((0, 1, 2**40, 50, 3, -3, 0), "integers"),
        ((0, 1, 2, -1, 3, -3, 0), "integers"),
        ((0, 1, 2, 50 + 1_000_000, 3, -3, 0), ""),
        ((0, 1, 2, 51 + 1_000_000, 3, -3, 0), "integers"),
        ((0, 1, 2, 50, 128, -3, 0), "integers"),
        ((0, 1, 2, 50, 3, -129, 0), "integers"),
        ((0, 1, 2, 50, 3, -3, 2), "integers"),
    ],
)
def test_integers_change_only_as_the_layout_allows(integers: tuple[int, ...], reason: str) -> None:
    x, update = model_of(INTEGERS, integers=X), model_of(INTEGERS, integers=integers)
    assert refusal_by_integers(update, x) == reason
    found, _ = refusal_by_content(
        UPLOAD, HALF.build(), update, Progress(State(0, x)), max_norm=None, norm_factor=0
    )
    assert found == reason


RULES: tuple[Strategy, ...] = (
    FedAsyncSettings(),
    FedAvgSettings(clients_per_round=2),
    FedBuffSettings(buffer_size=2),
    AfaCdSettings(buffer_size=2),
)


def test_counters_may_be_written_into_either_model() -> None:
    for into in (0, 1):
        x = model_of(INTEGERS, integers=X)
        new = model_of(INTEGERS, integers=(0, 1, 2, 49, 5, 5, 1))
        count(x, new, into=(x, new)[into])
        assert (x, new)[into].integers.tolist() == [0, 1, 2, 50, 5, 5, 1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_counters_never_go_back(rule: Strategy) -> None:
    """A stale device counted fewer batches: what comes next would seem to have counted too many."""
    strategy, state = rule.build(10), State(0, model_of(INTEGERS, integers=X))
    for counter in (70, 60, 40, 45):
        sent = model_of(INTEGERS, integers=(0, 1, 2, counter, counter % 7, 1, 1))
        update = Update(sent, state.version, 1, 1, 1, 0.1)
        state, _ = strategy.receive(state, update, Model(INTEGERS))
    assert state.version >= 2
    assert state.model.integers.tolist() == [0, 1, 2, 70, 45 % 7, 1, 1]


async def test_changed_constant_integer_is_refused_and_counted(make: Any, hand: Hand) -> None:
    hand.layout = INTEGERS
    async with running(make(), context()):
        await hand.join()
        before = await hand.model((await hand.published())[-1])
        [task] = await hand.open()
        bad = model_of(INTEGERS, 1.0, integers=(0, 0, 2**40, 0, 0, 0, 0))
        upload = await hand.trained(task, digest=bad.digest(), write=False)
        await blobs.write(hand.client, hand.keys.update(upload.blob), bad, expire_s=60)
        assert await hand.admit(upload) == [("admitted", "")]
        await refused(hand, "integers")
        assert await hand.version() == 0
        assert before.integers.tolist() == [0] * 7
        await hand.admitted(2.0)
        await hand.reaches(1)
        await hand.balanced()
