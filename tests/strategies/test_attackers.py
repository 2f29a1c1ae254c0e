"""Rules that resist attackers: their memory, their suspects, and the effect of attacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedstream.core import reasons
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.core.messages import Upload
from fedstream.journal.progress import Progress, Step, take
from fedstream.strategies import (
    AflGuardSettings,
    BasgdSettings,
    Decision,
    FedBuffSettings,
    ScaffoldSettings,
    State,
    Strategy,
    Update,
)
from tests.strategies.independent import Vector
from tests.strategies.test_independent import MIDDLES, WIDTH
from tests.support import layout_of, model_of
from tests.updater.states import upload_of


def receive(
    rule: Strategy, now: State, device: int, *values: float, tau: int | None = None
) -> tuple[State, Decision]:
    tau = now.version if tau is None else tau
    update = Update(model_of(now.model.layout, *values), tau, device, 1, 1, 1.0)
    return rule.receive(now, update, Model(now.model.layout))


# kept updates


def test_a_short_batch_is_the_middle_of_those_that_came() -> None:
    """The vectors still hold three updates of the batch before."""
    rule, now = FedBuffSettings(buffer_size=3, aggregate="median"), State(0, model_of(layout_of(1)))
    for value in (100.0, 101.0, 102.0, 1.0, 3.0):
        now, _ = receive(rule, now, 0, value)
    assert rule.end_round(now).model.parameters == pytest.approx([101.0 + 2.0])


NORMED = Layout(
    (Tensor("weight", (1,), "float32", "parameter"), Tensor("var", (1,), "float32", "buffer"))
)


@pytest.mark.parametrize(
    "rule",
    [
        FedBuffSettings(buffer_size=3, aggregate="median"),
        BasgdSettings(buckets=3, aggregate="median"),
    ],
)
def test_buffers_become_the_middle_too(rule: Strategy) -> None:
    """An attacker can't spoil a BatchNorm's variance either."""
    now = State(0, model_of(NORMED, 0.0, 1.0))
    for device, (value, variance) in enumerate(((1.0, 2.0), (2.0, 4.0), (0.0, 1e6))):
        now, _ = receive(rule, now, device, value, variance)
    assert (now.version, *now.model.floats) == (1, 1.0, 4.0)


def test_a_rule_that_keeps_nothing_has_the_memory_that_it_always_had() -> None:
    """Otherwise old journals could not be read, nor journals of this release by older ones."""
    rule = FedBuffSettings()
    assert rule.vector_names == ()
    assert not {"aggregate", "clip"} & rule.model_dump().keys()


# buckets


def test_basgd_waits_for_every_bucket_and_averages_within() -> None:
    rule, now = (
        BasgdSettings(buckets=2, aggregate="mean").build(4),
        State(0, model_of(layout_of(1))),
    )
    for device, value in ((0, 2.0), (2, 6.0), (0, 1.0)):
        now, decision = receive(rule, now, device, value)
        assert (decision.outcome, now.version) == ("buffered", 0)
    now, decision = receive(rule, now, 3, 5.0)
    assert decision.outcome == "applied"
    assert now.model.parameters == pytest.approx([(3.0 + 5.0) / 2])


def test_basgd_needs_a_device_for_each_bucket() -> None:
    with pytest.raises(ConfigError, match=r"strategy.buckets = 5: the run's 3 devices .*at most 3"):
        BasgdSettings().build(3)


# a root device


def test_aflguard_judges_by_the_newest_root_update() -> None:
    rule, now = AflGuardSettings(root=(7,), radius=1.0).build(9), State(0, model_of(layout_of(1)))
    course: list[tuple[int, float, str, str]] = [
        (1, 1.0, "dropped", reasons.NO_ROOT),
        (7, 2.0, "buffered", ""),
        (1, 4.0, "applied", ""),  # at the limit
        (1, 4.1, "dropped", reasons.FAR_FROM_ROOT),
        (2, -0.1, "dropped", reasons.FAR_FROM_ROOT),
        (7, -2.0, "buffered", ""),
        (2, -0.1, "applied", ""),
    ]
    for device, value, outcome, reason in course:
        now, decision = receive(rule, now, device, value)
        assert decision.outcome == outcome
        assert not reason or decision.reason == reason
    assert (now.version, *now.model.parameters) == (2, pytest.approx(3.9))


def test_aflguard_judges_buffers_too() -> None:
    rule, now = AflGuardSettings(radius=1.0), State(0, model_of(NORMED, 0.0, 1.0))
    now, _ = receive(rule, now, 0, 1.0, 1.0)
    assert receive(rule, now, 1, 1.0, 3.0)[1].reason == reasons.FAR_FROM_ROOT
    assert receive(rule, now, 1, 1.0, 2.0)[1].outcome == "applied"


def test_a_root_device_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"strategy.root = \[0, 9\]: there is no device 9"):
        AflGuardSettings(root=(0, 9)).build(9)


def test_a_device_must_be_left_to_be_judged() -> None:
    """Else the run would go on for ever at version 0."""
    with pytest.raises(ConfigError, match=r"strategy.root = \[1, 0\]: all 2 devices .*name fewer"):
        AflGuardSettings(root=(1, 0)).build(2)


def test_root_updates_go_into_no_version_and_pile_up_nowhere() -> None:
    """They are in the memory only, however many come before the next version."""
    rule, progress = AflGuardSettings(), Progress(State(0, model_of(layout_of(2))))
    for n in range(50):
        progress = taken(rule, progress, n, 0, 1.0, 1.0).after
    assert progress.held == ()
    step = taken(rule, progress, 50, 1, 1.0, 1.0)
    assert step.made is not None
    assert [one.device for one in step.made] == [1]


# suspects


def taken(rule: Strategy, before: Progress, n: int, device: int, *values: float) -> Step:
    layout = before.state.model.layout
    upload: Upload = upload_of(f"task-{n}", tau=before.state.version, device=device)
    return take(rule, before, upload, model_of(layout, *values), Model(layout))


@pytest.mark.parametrize("how", MIDDLES)
def test_an_update_far_from_the_middle_is_named(how: Any) -> None:
    """By its device, and whether it came early or last."""
    for place in range(5):
        rule = FedBuffSettings(buffer_size=5, aggregate=how)
        progress = Progress(State(0, model_of(layout_of(2))))
        for n in range(5):
            values = (-9.0, -9.0) if n == place else (1.0 + n / 10, 1.0 - n / 10)
            step = taken(rule, progress, n, 20 + n, *values)
            progress = step.after
        assert step.suspects == (20 + place,)


def test_equal_updates_name_nobody() -> None:
    rule = FedBuffSettings(buffer_size=3, aggregate="median")
    progress = Progress(State(0, model_of(layout_of(2))))
    for n in range(3):
        step = taken(rule, progress, n, n, 1.0, 1.0)
        progress = step.after
    assert (progress.state.version, step.suspects) == (1, ())


def test_an_update_clipped_to_less_than_a_third_is_named_on_arrival() -> None:
    rule = FedBuffSettings(buffer_size=2, clip=1.0)
    progress = Progress(State(0, model_of(layout_of(1))))
    first = taken(rule, progress, 0, 4, 3.1)
    assert first.suspects == (4,)
    assert taken(rule, first.after, 1, 5, -2.9).suspects == ()


def test_an_update_far_from_the_root_is_named_but_no_stale_one() -> None:
    rule = AflGuardSettings(max_staleness=0)
    progress = Progress(State(0, model_of(layout_of(1))))
    progress = taken(rule, progress, 0, 0, 1.0).after
    assert taken(rule, progress, 1, 5, -9.0).suspects == (5,)
    progress = taken(rule, progress, 2, 1, 1.0).after
    late = upload_of("task-3", tau=0, device=5)
    step = take(rule, progress, late, model_of(layout_of(1), -9.0), Model(layout_of(1)))
    assert (step.decision and step.decision.reason, step.suspects) == (reasons.TOO_STALE, ())


# settings


def test_scaffold_refuses_to_clip() -> None:
    with pytest.raises(ValidationError, match=r"c_i\+ - c_i belongs to all of it: leave"):
        ScaffoldSettings(clip=1.0)


@pytest.mark.parametrize("rule", [FedBuffSettings, AflGuardSettings])
def test_middle_needs_three_updates(rule: type[FedBuffSettings]) -> None:
    with pytest.raises(ValidationError, match="buffer_size = 2: set a buffer_size of 3 or more"):
        rule(buffer_size=2, aggregate="median")
    assert rule(buffer_size=2).aggregate == "mean"
    assert rule(buffer_size=3, aggregate="median").buffer_size == 3


# attacks: 10 devices with targets near each other, of which devices 3 and 7 attack


def target(device: int) -> Vector:
    """The point to which a device's training leads: all are near (1, ..., 1)."""
    return 1 + 0.2 * np.random.default_rng([1, device]).standard_normal(WIDTH)


OPTIMUM = np.mean([target(device) for device in range(10)], axis=0)
ATTACKS: dict[str, Callable[[Vector, Vector], Vector]] = {
    "none": lambda honest, _: honest,
    "flip": lambda honest, _: -honest,
    "scaled": lambda honest, _: -10 * honest,
    "shift": lambda honest, deviation: honest - 1.5 * deviation,  # A Little Is Enough
}


def distance_after(rule: Strategy, attack: str, seed: int, n: int = 250) -> float:
    """How far the model ends from the mean of all targets; it begins at 0."""
    rng, rule = np.random.default_rng(seed), rule.build(10)
    now = State(0, Model(layout_of(WIDTH)))
    now.model.floats[:] = 0.0
    deviation = np.std([0.2 * target(device) for device in range(10)], axis=0)
    history = [now.model.parameters.copy()]
    for _ in range(n // 10):
        for device in rng.permutation(10).tolist():
            tau = max(0, now.version - int(rng.integers(0, 3)))
            honest = 0.2 * (target(device) - history[tau] + 0.1 * rng.standard_normal(WIDTH))
            delta = ATTACKS[attack](honest, deviation) if device in (3, 7) else honest
            now, _ = receive(rule, now, device, *delta, tau=tau)
            if now.version == len(history):
                history.append(now.model.parameters.copy())
    return float(np.linalg.norm(history[-1] - OPTIMUM))


@pytest.mark.parametrize("attack", ["flip", "scaled", "shift"])
@pytest.mark.parametrize(
    "rule",
    [
        FedBuffSettings(buffer_size=10, aggregate="median"),
        FedBuffSettings(buffer_size=10, aggregate="geometric median"),
        FedBuffSettings(buffer_size=10, clip=0.2),
        BasgdSettings(buckets=10, aggregate="median"),
        BasgdSettings(buckets=10),
        AflGuardSettings(root=(0,), server_lr=0.1),
    ],
    ids=repr,
)
def test_two_of_ten_attackers_do_little(rule: Strategy, attack: str) -> None:
    """The end is near that of the mean without attackers, 2.6 from where the run began."""
    plain = FedBuffSettings(buffer_size=10)
    for seed in range(2):
        assert distance_after(rule, attack, seed) < distance_after(plain, "none", seed) + 0.5


def test_two_of_ten_attackers_ruin_a_mean() -> None:
    plain = FedBuffSettings(buffer_size=10)
    assert distance_after(plain, "none", 0) < 0.2
    assert distance_after(plain, "scaled", 0) > 100
