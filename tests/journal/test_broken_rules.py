"""A user's rule that fails, or answers what no rule may: it is told, and makes no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.journal.progress import Progress, Step, close_round, take
from fedstream.strategies import (
    Batch,
    Decision,
    FedAsyncSettings,
    Mixing,
    StalenessFunction,
    State,
    Strategy,
    Update,
)
from fedstream.updater.decider import refusal_by_content
from tests.support import layout_of, model_of
from tests.updater.states import upload_of

LAYOUT = layout_of(2)


class Weighs(Batch):
    """Every update makes a version and weighs what the test says."""

    buffer_size: int = 1
    weight: object = 1.0

    def weigh(self, version: int, tau: int, samples: int) -> float:
        if self.weight is None:
            raise ValueError("no\nidea")
        return self.weight  # type: ignore[return-value]


class Answers(Strategy):
    """Makes the version that the test says, whatever arrives."""

    version: int = 1
    staleness: int = 0
    outcome: str = "applied"
    suspects: tuple[int, ...] = ()

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        decision = Decision(self.outcome, 1.0, self.staleness)  # type: ignore[arg-type]
        return State(self.version, update.model), replace(decision, suspects=self.suspects)

    def end_round(self, state: State) -> State:
        return State(self.version, state.model)


class Never(StalenessFunction):
    def __call__(self, d: int) -> float:
        return float("nan")


class Vast(Mixing):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        return 1e300


UPLOAD = upload_of("t", tau=0, samples=2**53, layout=LAYOUT.signature, sends="delta")
BEFORE = Progress(State(0, model_of(LAYOUT, 1.0, 1.0)))


def taken(rule: Strategy) -> Step:
    return take(rule, BEFORE, UPLOAD, model_of(LAYOUT, 2.0, 2.0), Model(LAYOUT))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Weighs(weight=float("nan")), r"returned the weight nan: it must be a float, finite"),
        (Weighs(weight=-1.0), r"returned the weight -1\.0"),
        (Weighs(weight="x"), r"receive\(\) raised TypeError: .*batches\.py:\d+$"),
        (Weighs(weight=None), r"receive\(\) raised ValueError: no idea at .*broken_rules\.py:\d+$"),
        (Answers(version=2), r"version 2 and 'applied' on top of version 0"),
        (Answers(outcome="buffered"), r"version 1 and 'buffered' on top of version 0"),
        (Answers(staleness=3), r"a staleness of 3: it is 0"),
        (Answers(suspects=(1,)), r"the suspects \(1,\), but the next version has 1 updates"),
        (FedAsyncSettings(staleness=Never()), r"'fedasync': receive\(\) returned the weight nan"),
        (Vast(), r"values that are not finite: its weights or its server_lr are too large"),
    ],
)
def test_rule_that_breaks_its_contract_is_told_in_one_line(rule: Strategy, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        taken(rule)
    assert "\n" not in str(raised.value)


def test_round_ends_with_one_version_or_none() -> None:
    assert close_round(Answers(version=0), BEFORE, 0).made is None
    assert close_round(Answers(version=1), BEFORE, 0).after.state.version == 1
    with pytest.raises(ConfigError, match=r"end_round\(\) made version 2 of 0: it must make 1"):
        close_round(Answers(version=2), BEFORE, 0)


@pytest.mark.parametrize(("weigh", "why"), [(lambda samples: 1.0, ""), (float, "norm too large")])
def test_delta_that_its_weight_would_make_overflow_is_refused(
    weigh: Callable[[int], float], why: str
) -> None:
    """A device must not end a run by claiming many samples, where a rule weighs by these."""

    class Claimed(Batch):
        def weigh(self, version: int, tau: int, samples: int) -> float:
            return weigh(samples)

    sent = model_of(LAYOUT, 1e20, 0.0)
    refusal, _ = refusal_by_content(UPLOAD, Claimed(), sent, BEFORE, max_norm=None, norm_factor=0.0)
    assert refusal == why
