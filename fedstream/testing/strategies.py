"""Checks for strategies."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import ValidationError

from fedstream.core import reasons
from fedstream.core.errors import FedstreamError
from fedstream.journal import segments
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.runtime.plugins import words
from fedstream.strategies import RULES, Decision, Memory, State, Strategy, Update
from fedstream.testing.recording import (
    DEVICES,
    LATEST,
    DrawnUpdate,
    Recording,
    StatePrint,
    drawn,
    filled,
    layout_of,
    memory_print,
    state_print,
)
from fedstream.testing.rules import Fault, made

T = TypeVar("T")


def check_strategy(
    strategy: type[Strategy] | Strategy, *, arrivals: int = 60, seed: int = 0, **keys: object
) -> None:
    """Check that a strategy fulfils fedstream's requirements. Raises Fault.

    With ``arrivals`` random updates drawn from ``seed``, it checks that

    - ``receive`` writes neither into ``state.model`` nor into the update's model, keeps neither,
      and reads nothing of ``spare``;
    - the same state and update give the same result, to the last bit, every time;
    - version, outcome, staleness and weight fit together, and a recorded weight is used as it is;
    - updates with staleness 0 and ``max_staleness`` are used, and staler ones change nothing;
    - a version is made of ``batch`` updates, and of fewer if the round ends;
    - the strategy's memory survives the journal: a replay and a recovery from a checkpoint in the
      middle of a batch give the same bits;
    - its settings can be written and read again.

    ``strategy`` is an object, or a class and the ``keys`` that it needs:
    ``check_strategy(Mine, beta=0.9)``.
    """
    strategy = made(RULES, strategy, keys)
    check = _Check(strategy, seed, arrivals)
    is_own = strategy.name not in RULES.built_in
    with RULES.lending(strategy.name, type(strategy)) if is_own else nullcontext():
        check.settings()
        check.every_arrival()
        check.staleness()
        check.batches()
        check.journal()


class _Check:
    """A strategy under test, and its arrivals."""

    def __init__(self, strategy: Strategy, seed: int, arrivals: int) -> None:
        self.strategy = strategy
        self.name = type(strategy).__name__
        self.layout = layout_of(controls=strategy.controls)
        self.first = drawn(self.layout, np.random.default_rng(seed), 1.0)
        rng = np.random.default_rng([seed, 1])
        self.arrivals = [
            DrawnUpdate(
                number,
                int(rng.integers(DEVICES)),
                max(0, int(rng.integers(-4, LATEST + 1))),
                int(rng.integers(0, 500)),
                int(rng.integers(1, 20)),
                float(rng.uniform(0.01, 0.5)),
                drawn(self.layout, rng, 0.1),
            )
            for number in range(1, arrivals + 1)
        ]

    def fail(
        self, what: str, arrival: DrawnUpdate | None = None, state: State | None = None
    ) -> NoReturn:
        where = ""
        if arrival is not None:
            at = "" if state is None else f", at version {state.version}"
            where = f"arrival {arrival.number} (device {arrival.device}{at}): "
        raise Fault(f"{self.name}: {where}{what}")

    def call(
        self, what: str, method: Callable[..., T], *arguments: Any, at: DrawnUpdate | None
    ) -> T:
        try:
            return method(*arguments)
        except Exception as error:
            self.fail(f"{what} raised {words(error)}", at, None)

    def built(self) -> Strategy:
        return self.call("build()", self.strategy.build, DEVICES, at=None)

    def begun(self) -> State:
        return State(0, self.first.copy())

    def received(
        self, rule: Strategy, state: State, update: Update, at: DrawnUpdate, fill: int = 0xFF
    ) -> tuple[State, Decision]:
        return self.call("receive()", rule.receive, state, update, filled(self.layout, fill), at=at)

    # checks

    def settings(self) -> None:
        """Check that settings survive TOML and the journal, by which other processes get them."""
        rule = self.strategy
        if not isinstance(rule.batch, int) or rule.batch < 1:
            self.fail(f"batch is {rule.batch!r}: a version takes at least one update")
        try:
            again = type(rule).model_validate_json(rule.model_dump_json())
        except ValidationError as error:
            self.fail(f"its settings can't be read as they are written: {error}")
        if again != rule:
            self.fail(f"its settings are {rule!r}, but {again!r} once written and read")

    def every_arrival(self) -> None:
        """Check purity, determinism, and that results fit together."""
        rule, state = self.built(), self.begun()
        seen = []
        for arrival in self.arrivals:
            update = arrival.update(state, rule.sends)
            twin, other = state.copy(), replace(update, model=update.model.copy())
            third, recorded = state.copy(), replace(update, model=update.model.copy(), weight=0.25)
            before, sent = state_print(state), update.model.digest()
            weight = self.call(
                "weigh()", rule.weigh, state.version, update.tau, update.samples, at=arrival
            )
            after, decision = self.received(rule, state, update, arrival)
            if state.model.digest() != before.model:
                self.fail("receive() wrote into state.model", arrival, state)
            if update.model.digest() != sent:
                self.fail("receive() wrote into the update's model", arrival, state)
            made = [after.memory.model, after.model if after.model is not state.model else None]
            for whose, theirs in (("state.model", state), ("the update's model", update)):
                if any(
                    one is not None and np.shares_memory(one.buffer, theirs.model.buffer)
                    for one in made
                ):
                    self.fail(f"receive() keeps {whose} instead of a copy", arrival, state)
            self._fits(rule, before, update, after, decision, weight, arrival)
            twice = self.received(rule, twin, other, arrival, fill=0)
            if (state_print(twice[0]), twice[1]) != (state_print(after), decision):
                self.fail(
                    "the same state and update gave another result the second time: receive() "
                    "goes by something else, such as a clock, random numbers, what it kept outside "
                    "the state, or what was in spare",
                    arrival,
                    state,
                )
            if decision.outcome != "dropped":
                used = self.received(rule, third, recorded, arrival)[1]
                if used.weight != 0.25:
                    self.fail(
                        f"update.weight was 0.25, but the weight {used.weight!r} was used: replay "
                        "needs the recorded one",
                        arrival,
                        state,
                    )
            in_use = {id(model) for model in after.models()}
            given = (update.model, other.model, recorded.model)
            for model in (*state.models(), *given):  # NaN, to reveal later reads of these models
                if id(model) not in in_use:
                    model.buffer[:] = 0xFF
            state = after
            seen.append(state_print(state))
        again, state = self.built(), self.begun()
        for arrival, then in zip(self.arrivals, seen, strict=True):
            state, _ = self.received(again, state, arrival.update(state, again.sends), arrival)
            if state_print(state) != then:
                self.fail("a second run with the same arrivals gave other bits", arrival, state)

    def _fits(
        self,
        rule: Strategy,
        before: StatePrint,
        update: Update,
        after: State,
        decision: Decision,
        weight: float,
        arrival: DrawnUpdate,
    ) -> None:
        now, late = state_print(after), before.version - update.tau
        if decision.staleness != late:
            self.fail(f"the staleness is {late}, but receive() says {decision.staleness}", arrival)
        wanted = {"applied": 1, "buffered": 0, "dropped": 0}.get(decision.outcome)
        if wanted is None:
            self.fail(f"the outcome is {decision.outcome!r}: expected applied, buffered or dropped")
        if now.version - before.version != wanted:
            self.fail(
                f"the update was {decision.outcome}, but version {before.version} became "
                f"{now.version}",
                arrival,
            )
        if not np.isfinite(after.model.floats).all():
            self.fail(
                "the new model isn't finite: receive() reads spare before it writes it, reads a "
                "model that it gave away, or overflows",
                arrival,
            )
        if decision.outcome != "applied" and now.model != before.model:
            self.fail(f"the update was {decision.outcome}, but the model changed", arrival)
        if decision.outcome == "dropped":
            if now != before or decision.weight != 0:
                self.fail("a dropped update must change nothing and weigh 0", arrival)
        elif not (math.isfinite(decision.weight) and decision.weight >= 0):
            self.fail(f"the weight is {decision.weight!r}: expected a finite number >= 0", arrival)
        elif not math.isclose(decision.weight, weight, rel_tol=1e-12, abs_tol=1e-60):
            self.fail(
                f"receive() used the weight {decision.weight!r}, but weigh() says {weight!r}",
                arrival,
            )
        if not rule.has_memory and now.memory != memory_print(Memory()):
            self.fail("has_memory is False, but there is something in its memory", arrival)

    def staleness(self) -> None:
        """Check that staleness 0 and the maximum are used, and that beyond, nothing changes."""
        limit = self.strategy.max_staleness
        if limit is None:
            limit = 3
            self.strategy = self.strategy.model_copy(update={"max_staleness": limit})
            try:
                self._at_the_limit(limit)
            finally:
                self.strategy = self.strategy.model_copy(update={"max_staleness": None})
        else:
            self._at_the_limit(limit)

    def _at_the_limit(self, limit: int) -> None:
        rule, arrival = self.built(), self.arrivals[0]
        for late in (0, limit, limit + 1):
            state = State(limit + 5, self.first.copy())
            before = state_print(state)
            update = arrival.update(state, rule.sends, late)
            after, decision = self.received(rule, state, update, arrival)
            too_stale = decision.outcome == "dropped" and decision.reason == reasons.TOO_STALE
            if too_stale != (late > limit):
                self.fail(
                    f"max_staleness is {limit}, but an update with staleness {late} was "
                    f"{decision.outcome}"
                )
            if late > limit and state_print(after) != before:
                self.fail(f"an update with staleness {late} was dropped, but changed the state")

    def batches(self) -> None:
        """Check that a version takes ``batch`` updates, or fewer if its round ends."""
        rule, state = self.built(), self.begun()
        if state_print(self.call("end_round()", rule.end_round, state, at=None)) != state_print(
            state
        ):
            self.fail("end_round() changed something although nothing had arrived")
        if rule.rounds == "never":
            return
        fresh = [arrival for arrival in self.arrivals if arrival.late == 0]
        for number in range(1, rule.batch + 1):
            arrival = fresh[number % len(fresh)]
            if number == rule.batch and number > 1:
                self._short_round(rule, state.copy())
            state, decision = self.received(
                rule, state, arrival.update(state, rule.sends, 0), arrival
            )
            if (decision.outcome == "applied") != (number == rule.batch):
                self.fail(
                    f"batch says that a version takes {rule.batch} updates, but number {number} "
                    f"was {decision.outcome}"
                )

    def _short_round(self, rule: Strategy, state: State) -> None:
        before = state_print(state)
        after = self.call("end_round()", rule.end_round, state, at=None)
        if after.version != before.version + 1 or after.memory.arrivals:
            self.fail(
                f"end_round() with {before.memory.arrivals} arrivals made version {after.version} "
                f"of {before.version} and left {after.memory.arrivals} arrivals: expected the next "
                "version, and none left"
            )
        if state.model.digest() != before.model:
            self.fail("end_round() wrote into state.model")

    def journal(self) -> None:
        """Check that a replay of a journal and a recovery from it give the same bits."""
        with tempfile.TemporaryDirectory(prefix="fedstream-check-") as folder:
            try:
                first = self.first.copy()
                last = Recording(Path(folder), self.strategy, first, self.arrivals).play()
                with Replayer(Path(folder)) as replayer:
                    for moment in replayer:
                        after = moment.step.after.state
                if state_print(after) != state_print(last):
                    self.fail("after a replay, its memory is not what it was")
                chain = segments(Path(folder))
                try:
                    found = recovered(chain[-1])
                finally:
                    for segment in chain:
                        segment.close()
            except FedstreamError as error:
                self.fail(
                    "it can't be replayed from its journal, so it remembers something that isn't "
                    f"in Memory, or goes by more than state and update: {error}"
                )
            if found.progress is None or state_print(found.progress.state) != state_print(last):
                self.fail("after a recovery from a checkpoint, its memory is not what it was")
