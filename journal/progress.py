"""Where a run stands, and how a queue entry advances it.

The live updater, recovery and replay all go through these two functions, so that replaying a record
gives the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedstream.broker.layout import Model
from fedstream.broker.messages import Contribution, Upload
from fedstream.journal.norms import Norms
from fedstream.journal.records import Counted
from fedstream.strategies import Decision, State, Strategy, Update

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
        return replace(self, norms=self.norms.grown(counted)) if counted else self


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
    """
    update = Update(
        model=model, tau=upload.since, device=upload.device,
        samples=upload.samples, steps=upload.steps, lr=upload.lr, weight=weight,
    )  # fmt: skip
    state, decision = strategy.receive(before.state, update, spare)
    if decision.outcome == "dropped":
        return Step(before, decision)
    contribution = Contribution(
        task=upload.task, device=upload.device, tau=upload.tau,
        staleness=decision.staleness, weight=decision.weight,
        samples=upload.samples, steps=upload.steps, loss=upload.loss,
    )  # fmt: skip
    held = (*before.held, contribution)
    mean = _STALENESS_MEMORY * before.mean_staleness + (1 - _STALENESS_MEMORY) * decision.staleness
    if state.version == before.state.version:
        return Step(Progress(state, held, mean, before.norms), decision)
    return Step(Progress(state, (), mean, before.norms), decision, held)


def close_round(strategy: Strategy, before: Progress, version: int) -> Step:
    """End the round on top of ``version``: make a version of what has arrived, if anything has."""
    if version != before.state.version:
        return Step(before)  # the round was full before
    state = strategy.end_round(before.state)
    if state.version == version:
        return Step(before)
    return Step(Progress(state, (), before.mean_staleness, before.norms), made=before.held)
