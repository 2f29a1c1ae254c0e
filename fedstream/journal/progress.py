"""The state of a run's model and memory, and its advance by a queue entry.

The live updater, recovery and replay all go through these two functions, so that replaying a record
gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from fedstream.core import reasons
from fedstream.core.errors import ConfigError, FedstreamError, SumOutOfRange
from fedstream.core.layout import Model
from fedstream.core.messages import Contribution, Upload
from fedstream.journal.norms import Norms
from fedstream.journal.records import Counted
from fedstream.runtime.plugins import words
from fedstream.strategies import RULES, Decision, State, Strategy, Update
from fedstream.strategies.mixing import norm

_BUILT_IN = frozenset(RULES.built_in.values())
_STALENESS_MEMORY = 0.9  # decay of the moving average that the scheduler uses
OUT_OF_RANGE = "sum out of range"  # why a private batch was dropped


@dataclass(frozen=True, slots=True)
class PrivacyAccount:
    """What the opened sums of a private run have told of a device."""

    squares: int = 0  # of its weights, added up
    sums: int = 0  # that were opened with an update of it
    dropped: int = 0  # the last opened sums with an update of it that were dropped, in a row


@dataclass(frozen=True, slots=True)
class Progress:
    """Version, model and memory; the updates held in the memory; recent staleness and sizes.

    Of a private run also the devices' privacy accounts, the numbers of opened sums and dropped
    batches, and the sealed updates of the batch that is not opened yet; the batch's contributions
    are the last that are held. With correlated noise, the devices of the last opened sums.
    """

    state: State
    held: tuple[Contribution, ...] = ()
    mean_staleness: float = 0.0
    norms: Norms = field(default_factory=Norms)
    sealed: tuple[bytes, ...] = ()
    accounts: Mapping[int, PrivacyAccount] = field(default_factory=dict)
    sums: int = 0  # that were opened
    dropped: int = 0
    recent: tuple[tuple[int, ...], ...] = ()  # by sum, oldest first
    scale: float = 1.0  # of the rule's step, if it adapts
    scaled_at: int = 0  # the version up to which updates decided on it

    @property
    def in_sum(self) -> tuple[Contribution, ...]:
        """The updates of the private batch that is not opened yet."""
        return self.held[len(self.held) - len(self.sealed) :]

    def with_sizes(self, counted: Counted) -> Progress:
        """Count one more update's sizes for later limits; () counts none."""
        return replace(self, norms=self.norms.grown(counted)) if counted else self


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one queue entry."""

    after: Progress
    decision: Decision | None = None  # None: the entry was not an update
    made: tuple[Contribution, ...] | None = None  # the updates in the version that it made
    dropped: str = ""  # why a private batch was dropped
    suspects: tuple[int, ...] = ()  # devices with updates that stand out


def take(
    strategy: Strategy,
    before: Progress,
    upload: Upload,
    model: Model,
    spare: Model,
    *,
    weight: float | None = None,
) -> Step:
    """Take in an update. ``model``: its content; ``spare``: may be written into and kept.

    ``weight``: the recorded weight, if the update is replayed.

    Raises ConfigError if a user's rule raises or breaks the contract of rules.
    """
    strategy = strategy.scaled(before.scale)
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
        wrong = _wrong(before, update, state, decision)
    if wrong:
        raise ConfigError(f"strategy {strategy.name!r}: receive() returned {wrong}")
    if decision.outcome == "dropped":
        judged = decision.reason == reasons.FAR_FROM_ROOT
        return Step(before, decision, suspects=(upload.device,) if judged else ())
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
    norms = before.norms.with_samples(upload.samples)
    held = before.held if decision.is_reference else (*before.held, contribution)
    suspects = tuple(sorted({held[place].device for place in decision.suspects}))
    mean = mean_after(before.mean_staleness, decision.staleness)
    after = replace(before, state=state, held=held, mean_staleness=mean, norms=norms)
    if upload.sealed is not None:
        after = replace(after, sealed=(*before.sealed, upload.sealed))
    if state.version == before.state.version:
        return Step(after, decision, suspects=suspects)
    return Step(replace(after, held=()), decision, held, suspects=suspects)


def mean_after(mean: float, staleness: int) -> float:
    """The moving average of staleness after one more update."""
    return _STALENESS_MEMORY * mean + (1 - _STALENESS_MEMORY) * staleness


def close_round(strategy: Strategy, before: Progress, version: int, *, drops: bool = False) -> Step:
    """End the round that trains from ``version``: make a version of its updates, if any.

    ``drops``: drop the updates instead.
    """
    if version != before.state.version:
        return Step(before)  # the round was full before
    if drops:
        state = strategy.drop_round(before.state)
        return Step(replace(before, state=state, held=(), sealed=()))
    with _asking(strategy, "end_round"):
        state = strategy.scaled(before.scale).end_round(before.state)
        wrong = state.version not in (version, version + 1)
    if wrong:
        raise ConfigError(
            f"strategy {strategy.name!r}: end_round() made version {state.version} of {version}: "
            f"it must make {version + 1}, or none"
        )
    if state.version == version:
        return Step(replace(before, state=state))
    _check_finite(strategy, state.model)
    return Step(replace(before, state=state, held=()), made=before.held)


def forget(strategy: Strategy, before: Progress, devices: Iterable[int]) -> Progress:
    """The run once ``devices`` are quarantined. Raises ConfigError as :func:`take` does."""
    with _asking(strategy, "forget"):
        return replace(before, state=strategy.forget(before.state, devices))


def charged(
    accounts: Mapping[int, PrivacyAccount],
    batch: Iterable[tuple[int, int]],
    *,
    is_opened: bool,
    is_dropped: bool,
) -> Mapping[int, PrivacyAccount]:
    """The accounts after a batch of (device, weight). A sum that is opened counts."""
    if not is_opened:  # the helper's refusal says nothing of most devices
        return accounts
    found = dict(accounts)
    for device, weight in batch:
        was = found.get(device, PrivacyAccount())
        found[device] = PrivacyAccount(
            squares=was.squares + weight**2,
            sums=was.sums + 1,
            dropped=was.dropped + 1 if is_dropped else 0,
        )
    return found


def open_sum(strategy: Strategy, before: Progress, masks: Model | None, refused: str = "") -> Step:
    """Open the sum of a private batch that is due, which may make a version, or drop the batch.

    ``masks``: of the helper, as 32-bit words in place of the parameters; None: it opened nothing.
    ``refused``: why, in that case.
    """
    state, why = before.state, refused
    if masks is not None:
        try:
            state = strategy.open(before.state, masks)
        except SumOutOfRange:
            why = OUT_OF_RANGE
    if why:
        state = strategy.drop_sum(before.state)
    batch = [(one.device, int(one.weight)) for one in before.in_sum]
    recent = before.recent
    if masks is not None and strategy.sits_out:
        recent = (*recent, tuple(device for device, _ in batch))[-strategy.sits_out :]
    accounts = charged(before.accounts, batch, is_opened=masks is not None, is_dropped=bool(why))
    held = before.held[: len(before.held) - len(before.sealed)] if why else before.held
    made = held if state.version != before.state.version else None
    after = replace(
        before,
        state=state,
        held=() if made is not None else held,
        sealed=(),
        accounts=accounts,
        sums=before.sums + (masks is not None),
        dropped=before.dropped + bool(why),
        recent=recent,
    )
    return Step(after, made=made, dropped=why)


def weight_of(strategy: Strategy, version: int, upload: Upload) -> float:
    """The weight that the rule would give an update. Raises ConfigError."""
    with _asking(strategy, "weigh"):
        weight = strategy.weigh(version, upload.since, upload.samples)
        wrong = _wrong_weight(weight)
    if wrong:
        raise ConfigError(f"strategy {strategy.name!r}: weigh() returned {wrong}")
    return weight


@contextmanager
def _asking(strategy: Strategy, method: str) -> Iterator[None]:
    """Report an error of a rule in one line, with the place in its program."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            yield
    except (FedstreamError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"strategy {strategy.name!r}: {method}() raised {words(error)}"
        ) from error


def _wrong(before: Progress, update: Update, after: State, decision: Decision) -> str:
    """The error in a rule's result; '' for none."""
    version, made = before.state.version, 1 if decision.outcome == "applied" else 0
    if after.version != version + made:
        return (
            f"version {after.version} and {decision.outcome!r} on top of version {version}: "
            "'applied' is for an update that makes the next version, and no other"
        )
    if decision.staleness != version - update.tau:
        return f"a staleness of {decision.staleness}: it is {version - update.tau}"
    arrived = len(before.held) + (not decision.is_reference)
    if decision.suspects and not 0 <= min(decision.suspects) <= max(decision.suspects) < arrived:
        return f"the suspects {decision.suspects}, but the next version has {arrived} updates"
    if decision.outcome == "dropped" and decision.reason not in reasons.REFUSED:
        return f"the reason {decision.reason!r}: it must be one of reasons.REFUSED"
    return _wrong_weight(decision.weight)


def _wrong_weight(weight: float) -> str:
    if isinstance(weight, float | int) and 0 <= weight < math.inf:
        return ""
    return f"the weight {weight!r}: it must be a float, finite and not negative"


def _check_finite(strategy: Strategy, model: Model) -> None:
    """Raise ConfigError if a user's own rule made a model that is not finite.

    Built-in rules don't need this pass over the model, as updates and weights were checked.
    """
    if type(strategy) not in _BUILT_IN and not math.isfinite(norm(model.floats)):
        raise ConfigError(
            f"strategy {strategy.name!r}: made a model with values that are not finite: its "
            "weights or its server_lr are too large"
        )
