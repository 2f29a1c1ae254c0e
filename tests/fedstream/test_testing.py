"""The checks for users' rules find each fault alone, and none in the built-in rules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies import (
    FUNCTIONS,
    RULES,
    AfaCsSettings,
    Batch,
    Decision,
    FedBuffSettings,
    Memory,
    Mixing,
    StalenessFunction,
    State,
    Strategy,
    Update,
)
from fedstream.strategies.staleness import Hinge
from fedstream.testing import Fault, check_staleness, check_strategy

Result = tuple[State, Decision]


@pytest.mark.parametrize("rule", RULES.built_in.values())
def test_built_in_strategies_keep_what_is_relied_on(rule: type[Strategy]) -> None:
    check_strategy(rule)


@pytest.mark.parametrize(
    "rule",
    [
        FedBuffSettings(buffer_size=1),
        FedBuffSettings(buffer_size=3, staleness=Hinge(b=1)),
        AfaCsSettings(buffer_size=1, max_staleness=2),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_so_do_they_with_other_keys(rule: Strategy, seed: int) -> None:
    check_strategy(rule, seed=seed)


@pytest.mark.parametrize("function", FUNCTIONS.built_in.values())
def test_built_in_staleness_functions(function: type[StalenessFunction]) -> None:
    check_staleness(function)


class Right(Batch):
    """Nothing is wrong with this one."""

    def weigh(self, version: int, tau: int, samples: int) -> float:
        return 1.0 + samples / 500


class RightMixing(Mixing):
    """Nor with this one."""

    def weigh(self, version: int, tau: int, samples: int) -> float:
        return 0.5 / (1 + version - tau)


class WritesModel(Right):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        state.model.floats[0] += 1
        return super().receive(state, update, spare)


class WritesUpdate(Right):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        update.model.floats[0] += 1
        return super().receive(state, update, spare)


class KeepsUpdate(Right):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        if after.memory.model is None:
            return after, decision
        return replace(after, memory=replace(after.memory, model=update.model)), decision


class KeepsModel(RightMixing):
    has_memory = True

    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        return replace(after, memory=Memory(state.model)), decision


class Clock(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        after.model.floats[0] += time.perf_counter() % 1
        return after, decision


class Counts(RightMixing):
    calls: ClassVar[list[int]] = []

    def receive(self, state: State, update: Update, spare: Model) -> Result:
        self.calls.append(1)
        after, decision = super().receive(state, update, spare)
        after.model.floats[0] += len(self.calls)
        return after, decision


class RemembersOutside(RightMixing):
    """The second call for an update gives what the first one gave, but a second run does not."""

    seen: ClassVar[set[str]] = set()

    def receive(self, state: State, update: Update, spare: Model) -> Result:
        self.seen.add(update.model.digest())
        after, decision = super().receive(state, update, spare)
        after.model.floats[0] += 1e-3 * len(self.seen)
        return after, decision


class ReadsSpare(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        left = int(spare.integers[0])
        after, decision = super().receive(state, update, spare)
        after.model.integers[0] = left
        return after, decision


class ReadsGivenAway(RightMixing):
    """It keeps the model of the last update, which somebody else uses by now."""

    last: ClassVar[list[Model]] = []

    def receive(self, state: State, update: Update, spare: Model) -> Result:
        if state.version == 0:
            self.last.clear()
        elif self.last:
            update = replace(update, model=update.model.copy())
            update.model.floats[:] += self.last[-1].floats
        after, decision = super().receive(state, update, spare)
        if state.version != 0:
            return after, decision
        self.last[:] = [update.model]
        return after, decision


class IgnoresRecordedWeight(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        return super().receive(state, replace(update, weight=None), spare)


class WeighsOtherwise(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        weight = 0.1 if update.weight is None else update.weight
        return super().receive(state, replace(update, weight=weight), spare)


class NeverDrops(RightMixing):
    def is_too_stale(self, staleness: int) -> bool:
        return False


class DropsAtTheLimit(RightMixing):
    def is_too_stale(self, staleness: int) -> bool:
        return self.max_staleness is not None and staleness >= self.max_staleness


class DroppedChanges(Right):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        if decision.outcome != "dropped":
            return after, decision
        return replace(after, memory=replace(after.memory, arrivals=99)), decision


class SaysOtherStaleness(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        return after, replace(decision, staleness=decision.staleness + 1)


class SaysBuffered(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        return after, replace(decision, outcome="buffered")


class ChangesWithoutVersion(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        return replace(after, version=state.version), replace(decision, outcome="buffered")


class SaysAnything(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        said: Any = "taken"
        return after, replace(decision, outcome=said)


class NegativeWeight(RightMixing):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        return -0.1


class Overflows(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        after.model.floats[0] = math.inf
        return after, decision


class HiddenMemory(RightMixing):
    def receive(self, state: State, update: Update, spare: Model) -> Result:
        after, decision = super().receive(state, update, spare)
        return replace(after, memory=Memory(arrivals=1)), decision


class SaysSmallBatch(Right):
    @property
    def batch(self) -> int:
        return 3


class NoBatch(Right):
    @property
    def batch(self) -> int:
        return 0


class NeverEndsRounds(Right):
    def end_round(self, state: State) -> State:
        return state


class EndsEmptyRounds(Right):
    def end_round(self, state: State) -> State:
        return replace(state, version=state.version + 1)


class LeavesArrivals(Right):
    def end_round(self, state: State) -> State:
        after = super().end_round(state)
        if after is state:
            return state
        return replace(after, memory=replace(after.memory, arrivals=1))


@dataclass(frozen=True, slots=True)
class MoreMemory(Memory):
    """What it has in addition is in no checkpoint."""

    more: int = 0


class RemembersMore(Right):
    """It weighs by how many updates there were, which a checkpoint doesn't have."""

    def receive(self, state: State, update: Update, spare: Model) -> Result:
        so_far = state.memory.more if isinstance(state.memory, MoreMemory) else 0
        after, decision = super().receive(state, update, spare)
        if decision.outcome == "applied":
            after.model.integers[0] = so_far
        memory = {key: getattr(after.memory, key) for key in Memory.__slots__}
        return replace(after, memory=MoreMemory(**memory, more=so_far + 1)), decision


class HidesKey(Right):
    usual: float = Field(default=1.0, exclude=True)


class Raises(RightMixing):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        return 1.0 / abs(version - 3)


class Heavier(FedBuffSettings):
    """Derived from a built-in rule, and journalled under its own name."""

    factor_of_all: float = 2.0

    def weigh(self, version: int, tau: int, samples: int) -> float:
        return self.factor_of_all * super().weigh(version, tau, samples)


class NeedsKeys(Right):
    usual: float


class Misspelt(Right):
    def end_rond(self, state: State) -> State:
        return state


FAULTS: list[tuple[type[Strategy], str]] = [
    (WritesModel, r"arrival 1 \(device \d, at version 0\): receive\(\) wrote into state.model"),
    (WritesUpdate, r"arrival 1 .*: receive\(\) wrote into the update's model"),
    (KeepsUpdate, r"arrival 1 .*: receive\(\) keeps the update's model instead of a copy"),
    (KeepsModel, r"arrival 1 .*: receive\(\) keeps state.model instead of a copy"),
    (Clock, "arrival 1 .*: the same state and update gave another result the second time"),
    (Counts, "arrival 1 .*: the same state and update gave another result the second time"),
    (ReadsSpare, "arrival 1 .*gave another result the second time: .* or what was in spare"),
    (RemembersOutside, "a second run with the same arrivals gave other bits"),
    (ReadsGivenAway, "arrival 2 .*: the new model isn't finite"),
    (IgnoresRecordedWeight, "update.weight was 0.25, but the weight .* was used"),
    (WeighsOtherwise, r"used the weight 0.1, but weigh\(\) says 0.5"),
    (NeverDrops, "max_staleness is 3, but an update with staleness 4 was applied"),
    (DropsAtTheLimit, "max_staleness is 3, but an update with staleness 3 was dropped"),
    (DroppedChanges, "an update with staleness 4 was dropped, but changed the state"),
    (SaysOtherStaleness, r"the staleness is 0, but receive\(\) says 1"),
    (SaysBuffered, "the update was buffered, but version 0 became 1"),
    (ChangesWithoutVersion, "the update was buffered, but the model changed"),
    (SaysAnything, "the outcome is 'taken': expected applied, buffered or dropped"),
    (NegativeWeight, "the weight is -0.1: expected a finite number >= 0"),
    (Overflows, "the new model isn't finite"),
    (HiddenMemory, "has_memory is False, but there is something in its memory"),
    (SaysSmallBatch, "batch says that a version takes 3 updates, but number 3 was buffered"),
    (NoBatch, "batch is 0: a version takes at least one update"),
    (NeverEndsRounds, r"end_round\(\) with 9 arrivals made version 0 of 0 and left 9"),
    (EndsEmptyRounds, r"end_round\(\) changed something although nothing had arrived"),
    (LeavesArrivals, r"end_round\(\) with 9 arrivals made version 1 of 0 and left 1 arrivals"),
    (RemembersMore, "it remembers something that isn't in Memory"),
    (HidesKey, "its settings are .* once written and read"),
    (Raises, r"weigh\(\) raised ZeroDivisionError: .* at .*test_testing.py:\d+"),
    (NeedsKeys, r"usual: Field required: give the check its keys, as in \(NeedsKeys, key=value\)"),
    (Misspelt, r"defines end_rond\(\), which nothing uses; did you mean end_round\(\)\?"),
]


@pytest.mark.parametrize("rule", [Right, RightMixing, Heavier])
def test_faultless_rules_pass(rule: type[Strategy]) -> None:
    check_strategy(rule)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of arithmetic with NaN
@pytest.mark.parametrize(("rule", "words"), FAULTS)
def test_each_fault_is_found_and_named(rule: type[Strategy], words: str) -> None:
    strategy: Any = HidesKey(usual=2.0) if rule is HidesKey else rule
    with pytest.raises(Fault, match=rf"(?s)^{rule.__name__}: .*{words}"):
        check_strategy(strategy)


def test_keys_are_given_to_a_class_and_only_to_a_class() -> None:
    check_strategy(NeedsKeys, usual=2.0)
    with pytest.raises(Fault, match="NeedsKeys: usual has no effect on an object: give the class"):
        check_strategy(NeedsKeys(usual=2.0), usual=3.0)


def linear(d: int, a: float = 0.5) -> float:
    return 1 / (1 + a * d)


def test_faultless_function_passes() -> None:
    check_staleness(linear)
    check_staleness(linear, a=2.0)
    check_staleness(Hinge(b=2))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda d: 0.5, r"s\(0\) is 0.5: an update that isn't stale weighs 1"),
        (lambda d: 1.0 - 0.1 * d, r"s\(11\) is -0.1.*: expected a finite number, 0 or more"),
        (lambda d: math.inf if d > 3 else 1.0, r"s\(4\) is inf: expected a finite number"),
        (lambda d: 1 / (10 - d) * 10, r"s\(10\) raised ZeroDivisionError: division by zero at "),
        (lambda d: 1.0 + (d > 0) * time.perf_counter(), r"s\(1\) is .* once and .* the next time"),
        (lambda: 1.0, r"\(\) must take d, then its own parameters"),
    ],
)
def test_each_wrong_function_is_found(function: Callable[..., float], words: str) -> None:
    with pytest.raises(Fault, match=words):
        check_staleness(function)


def test_wrong_parameter_is_named() -> None:
    with pytest.raises(Fault, match=r"(?s)linear: .*b"):
        check_staleness(linear, b=2.0)
