"""Where a run stands, and how a queue entry advances it.

The live updater, recovery and replay all go through these two functions, so that replaying a record
gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.layout import Model
from fedstream.core.messages import Contribution, Upload
from fedstream.journal.norms import Norms
from fedstream.journal.records import Counted
from fedstream.runtime.plugins import words
from fedstream.strategies import RULES, Decision, State, Strategy, Update
from fedstream.strategies.mixing import norm

_BUILT_IN = frozenset(RULES.built_in.values())
_STALENESS_MEMORY = 0.9  # decay of the moving average that the scheduler uses


@dataclass(frozen=True, slots=True)
class Progress:
    """Version, model and memory; the updates held in the memory; recent staleness and sizes."""

    state: State
    held: tuple[Contribution, ...] = ()
    mean_staleness: float = 0.0
    norms: Norms = field(default_factory=Norms)

    def with_sizes(self, counted: Counted) -> Progress:
        """With one more update's sizes counted towards what is usual; () counts none."""
        if not counted:
            return self
        return Progress(self.state, self.held, self.mean_staleness, self.norms.grown(counted))


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one queue entry."""

    after: Progress
    decision: Decision | None = None  # None: the entry was not an update
    made: tuple[Contribution, ...] | None = None  # the updates in the version that it made


def take(
    strategy: Strategy,
    before: Progress,
    upload: Upload,
    model: Model,
    spare: Model,
    *,
    weight: float | None = None,
) -> Step:
    """Take in an update. ``model`` is its content; ``spare`` may be written into, and kept.

    ``weight``: the recorded weight, if the update is replayed.

    Raises ConfigError if the rule, which may be its user's, raises anything or does what no rule
    may.
    """
    update = Update(
        model=model,
        tau=upload.since,
        device=upload.device,
        samples=upload.samples,
        steps=upload.steps,
        lr=upload.lr,
        weight=weight,
    )
    with _asking(strategy, "receive"):
        state, decision = strategy.receive(before.state, update, spare)
        wrong = _wrong(before.state, update, state, decision)
    if wrong:
        raise ConfigError(f"strategy {strategy.name!r}: receive() returned {wrong}")
    if decision.outcome == "dropped":
        return Step(before, decision)
    if state.version != before.state.version and weight is None:
        _check_finite(strategy, state.model)
    contribution = Contribution(
        task=upload.task,
        device=upload.device,
        tau=upload.tau,
        staleness=decision.staleness,
        weight=decision.weight,
        samples=upload.samples,
        steps=upload.steps,
        loss=upload.loss,
    )
    held, norms = (*before.held, contribution), before.norms.with_samples(upload.samples)
    mean = mean_after(before.mean_staleness, decision.staleness)
    if state.version == before.state.version:
        return Step(Progress(state, held, mean, norms), decision)
    return Step(Progress(state, (), mean, norms), decision, held)


def mean_after(mean: float, staleness: int) -> float:
    """The moving average of staleness after one more update."""
    return _STALENESS_MEMORY * mean + (1 - _STALENESS_MEMORY) * staleness


def close_round(strategy: Strategy, before: Progress, version: int, *, drops: bool = False) -> Step:
    """End the round on top of ``version``: make a version of what has arrived, if anything has.

    ``drops``: end it without using that.
    """
    if version != before.state.version:
        return Step(before)  # the round was full before
    if drops:
        state = strategy.drop_round(before.state)
        return Step(Progress(state, (), before.mean_staleness, before.norms))
    with _asking(strategy, "end_round"):
        state = strategy.end_round(before.state)
        wrong = state.version not in (version, version + 1)
    if wrong:
        raise ConfigError(
            f"strategy {strategy.name!r}: end_round() made version {state.version} of {version}: "
            f"it must make {version + 1}, or none"
        )
    if state.version == version:
        return Step(before)
    _check_finite(strategy, state.model)
    return Step(Progress(state, (), before.mean_staleness, before.norms), made=before.held)


def weight_of(strategy: Strategy, version: int, upload: Upload) -> float:
    """What an update that is not mixed in yet would weigh, by the rule. Raises ConfigError."""
    with _asking(strategy, "weigh"):
        weight = strategy.weigh(version, upload.since, upload.samples)
        wrong = _wrong_weight(weight)
    if wrong:
        raise ConfigError(f"strategy {strategy.name!r}: weigh() returned {wrong}")
    return weight


@contextmanager
def _asking(strategy: Strategy, method: str) -> Iterator[None]:
    """Report whatever a rule raises in one line, with the place in its program."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            yield
    except (FedstreamError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"strategy {strategy.name!r}: {method}() raised {words(error)}"
        ) from error


def _wrong(before: State, update: Update, after: State, decision: Decision) -> str:
    """What is wrong with a rule's answer; '' if nothing is."""
    made = 1 if decision.outcome == "applied" else 0
    if after.version != before.version + made:
        return (
            f"version {after.version} and {decision.outcome!r} on top of version {before.version}: "
            "'applied' is for an update that makes the next version, and no other"
        )
    if decision.staleness != before.version - update.tau:
        return f"a staleness of {decision.staleness}: it is {before.version - update.tau}"
    return _wrong_weight(decision.weight)


def _wrong_weight(weight: float) -> str:
    if isinstance(weight, float | int) and 0 <= weight < math.inf:
        return ""
    return f"the weight {weight!r}: it must be a float, finite and not negative"


def _check_finite(strategy: Strategy, model: Model) -> None:
    """Raise ConfigError if a user's own rule made a model that nobody could use or train.

    Built-in rules are spared the pass over the model: updates and weights were checked.
    """
    if type(strategy) not in _BUILT_IN and not math.isfinite(norm(model.floats)):
        raise ConfigError(
            f"strategy {strategy.name!r}: made a model with values that are not finite: its "
            "weights or its server_lr are too large"
        )
