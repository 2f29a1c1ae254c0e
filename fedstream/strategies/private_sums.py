"""A rule that gets masked updates (:mod:`fedstream.private`), and steps along their opened sum.

A batch's memory is sum w_i c_i modulo 2**32, the masked updates by the policy's integer weights, as
32-bit words in place of the parameters. The batch is complete with K updates, or when its round
ends. :meth:`PrivateSums.open` subtracts the helper's masks, checks the range of the sum, and lets
the rule that it wraps step along

    sum w_i (x_new_i - x_tau_i) / (w K),    w: the policy's largest weight, K: the rule's constant

also if fewer than K updates came. So how far a device moves the model never depends on the others.

With B buckets, a version is made of B sums of K / B updates. The first B - 1 openings keep their
bucket's sum in the rule's vectors; the last one steps along what a rule that resists outliers
(:mod:`fedstream.strategies.robust`) makes of the B means. A bucket that was dropped is missing, and
collected again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_serializer

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats, Layout, Model
from fedstream.core.messages import Sends
from fedstream.core.words import MaskWords
from fedstream.private import masks
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.settings import Buckets
from fedstream.strategies import robust
from fedstream.strategies.afa import AfaCdSettings
from fedstream.strategies.batches import Batch, FedBuffSettings
from fedstream.strategies.fedavg import FedAvgSettings
from fedstream.strategies.mixing import add
from fedstream.strategies.staleness import Constant
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update


class PrivateTerms(Buckets):
    """What makes a recorded rule private."""

    policy: PrivacyPolicy
    # gamma H of every update, by which AFA-CD divides; None: unknown, or not the same for all.
    per: Annotated[float, Field(gt=0)] | None = None


class PrivateSums(Strategy):
    """A rule on sums of masked updates."""

    sends: ClassVar[Sends] = "delta"
    masked: ClassVar[bool] = True
    name: str
    rule: Strategy
    terms: PrivateTerms

    @classmethod
    def of(cls, rule: Strategy, terms: PrivateTerms) -> PrivateSums:
        """The private form of a rule. Raises ConfigError if it has none."""
        policy = terms.policy
        check_sums(rule)
        if why := _unfit(rule, terms):
            raise ConfigError(f"strategy.name = {rule.name!r} in a private run: {why}")
        limit = len(policy.weights) - 1
        if rule.max_staleness is not None:
            limit = min(limit, rule.max_staleness)
        return cls.model_construct(
            name=rule.name,
            max_staleness=limit,
            cancel_stale=rule.cancel_stale,
            rule=rule,
            terms=terms,
        )

    @model_serializer
    def _recorded(self) -> dict[str, Any]:
        """As in a journal: the rule's own keys, and the terms."""
        return self.rule.model_dump(mode="json") | {"private": self.terms.model_dump(mode="json")}

    @property
    def policy(self) -> str:
        """The text of the policy that the run keeps to."""
        return self.terms.policy.text.decode()

    @property
    def sits_out(self) -> int:
        """The sums whose noise is correlated with that of a device's own."""
        return self.terms.policy.bands - 1

    @property
    def batch(self) -> int:
        """K, the updates in a version."""
        return self.rule.batch

    @property
    def in_a_sum(self) -> int:
        """K / B, the updates in a sum."""
        return self.rule.batch // self.terms.buckets

    @property
    def rate(self) -> float:
        """The factor of the mean delta."""
        return self.rule.rate

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The vectors that the rule keeps between versions, and the sums of opened buckets."""
        return (*self.rule.vector_names, *self.kept_names)

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The names of the vectors with the sums of the buckets before the last."""
        return tuple(f"bucket {number}" for number in range(1, self.terms.buckets))

    def replaced(self, rule: Strategy, over: str | None = None) -> PrivateSums:
        """Another rule on the sums that this one opens, of the same updates in each.

        ``over``: what to make of the buckets' means; None: the same. Raises ConfigError.
        """
        key = rule.batch_key
        for name, recorded in (("max_staleness", self.rule.max_staleness), (key, self.batch)):
            if name in rule.model_fields_set and getattr(rule, name) != recorded:
                raise ConfigError(
                    f"strategy.{name} = {getattr(rule, name)}: it was "
                    f"{'not set' if recorded is None else recorded} in this private run, and no "
                    "update can be added to an opened sum or taken out of it: leave the key out"
                )
        if key in type(rule).model_fields:
            rule = rule.model_copy(update={key: self.batch})
        terms = self.terms.model_copy(update={"over": over or self.terms.over})
        return PrivateSums.of(rule, terms).model_copy(update={"max_staleness": self.max_staleness})

    def taken_over(self, memory: Memory, was: Strategy) -> Memory:
        """The same memory, without another rule's vectors: sums don't depend on the rule."""
        alike = isinstance(was, PrivateSums) and type(self.rule) is type(was.rule)
        if memory.devices is None or (alike and self.vector_names == was.vector_names):
            return memory
        vectors = None
        if memory.opened:
            vectors = self.vectors(memory.devices[self.kept_names[0]].size)
            for name in self.kept_names[: memory.opened]:
                vectors.write(name)[:] = memory.devices[name]
        return replace(memory, devices=vectors)

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The policy's weight for the staleness."""
        return float(self.terms.policy.weights[version - tau])

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Add a masked update to the sum; no version comes of it before the sum is opened."""
        d = state.version - update.tau
        if self.is_too_stale(d):
            return state, Decision("dropped", 0.0, d)
        weight = self.weight_of(state, update)
        memory = state.memory
        total = memory.model
        if total is None:
            total = spare
            total.buffer[:] = 0
        masks.add_masked(words_of(total), words_of(update.model), int(weight))
        grown = replace(
            memory, model=total, arrivals=memory.arrivals + 1, weight=memory.weight + weight
        )
        return State(state.version, state.model, grown), Decision("buffered", weight, d)

    def end_round(self, state: State) -> State:
        """Close the batch, so that its sum is due.

        Without updates in it, make the version of the buckets that were opened, if any.
        """
        if state.memory.arrivals:
            return replace(state, memory=replace(state.memory, closed=True))
        return self._step(state, Model(state.model.layout), []) if state.memory.opened else state

    def is_due(self, state: State) -> bool:
        """Whether the batch is complete, so that its sum can be opened."""
        return state.memory.closed or state.memory.arrivals >= self.in_a_sum

    def open(self, state: State, opened: Model) -> State:
        """Open the batch's sum; the last bucket's makes the version.

        ``opened``: the helper's masks, as 32-bit words. Raises SumOutOfRange, and changes nothing,
        if the sum can't be that of honest devices' updates.
        """
        memory, policy = state.memory, self.terms.policy
        total = Batch.total(state)
        found = masks.unmasked(words_of(total), words_of(opened), policy)
        masks.check_range(found, int(memory.weight), policy)
        scale = float(max(policy.weights))
        if self.rule.by_steps and self.terms.per is not None:
            scale *= self.terms.per
        mine = masks.in_model_units(found, scale, policy)
        if memory.closed or memory.opened + 1 == self.terms.buckets:
            return self._step(state, total, [mine])
        vectors = memory.devices or self.vectors(mine.size)
        vectors.write(self.kept_names[memory.opened])[:] = mine
        return replace(state, memory=Memory(devices=vectors, opened=memory.opened + 1))

    def drop_sum(self, state: State) -> State:
        """Drop the batch that is due, but no bucket that was opened."""
        memory = state.memory
        left = replace(state, memory=Memory(devices=memory.devices, opened=memory.opened))
        return self.end_round(left) if memory.closed else left

    def _step(self, state: State, into: Model, last: list[Floats]) -> State:
        """Make a version of the opened buckets' sums, and ``last``, by the rule."""
        memory, x = state.memory, state.model.parameters
        vectors = memory.devices
        if vectors is None and self.vector_names:
            vectors = self.vectors(x.size)
        kept = [] if vectors is None else [vectors[one] for one in self.kept_names[: memory.opened]]
        robust.RULES[self.terms.over]([*kept, *last], into.parameters)
        full = Memory(into, self.in_a_sum, devices=vectors)
        if isinstance(self.rule, Batch):
            return self.rule.step(State(state.version, state.model, full), None)
        add(x, into.parameters, 1.0 / self.in_a_sum, into=into.parameters)
        return State(state.version + 1, into, Memory(devices=vectors))


def words_of(model: Model) -> MaskWords:
    """The words in place of a model's parameters (a view)."""
    return model.parameters.view(np.uint32)


def check_layout(layout: Layout, policy: PrivacyPolicy) -> None:
    """Raise ConfigError unless masked updates can carry all that devices of this layout send."""
    apart = [t.name for t in layout.tensors if t.kind != "parameter"]
    if apart:
        raise ConfigError(
            f"a private run sends trained parameters alone, but the model has "
            f"{', '.join(apart[:3])}{' and others' if apart[3:] else ''}: keep them on the "
            "devices (Task.local), or use layers without such buffers, such as GroupNorm"
        )
    if layout.parameters != policy.parameters:
        raise ConfigError(
            f"the privacy policy is for {policy.parameters} parameters, the model has "
            f"{layout.parameters}: agree on a policy for this model"
        )


def check_sums(rule: Strategy) -> None:
    """Raise ConfigError unless sums are all that a rule of this class needs."""
    if type(rule) not in (FedBuffSettings, FedAvgSettings, AfaCdSettings):
        raise ConfigError(
            f"strategy.name = {rule.name!r} in a private run: it needs each update alone, and a "
            "private run opens sums only: choose fedbuff, fedavg or afa-cd"
        )


def _unfit(rule: Strategy, terms: PrivateTerms) -> str:
    """Why a rule on sums has no private form with its keys; '' if it has one."""
    policy, n = terms.policy, terms.buckets
    if isinstance(rule, FedBuffSettings) and rule.aggregate != "mean":
        return (
            f"strategy.aggregate = {rule.aggregate!r} needs each update alone: in a private run, "
            "private.buckets and private.over resist outliers"
        )
    if isinstance(rule, Batch) and rule.clip is not None:
        return "strategy.clip needs each update alone: leave it out, devices clip by the policy"
    if isinstance(rule, FedBuffSettings) and not isinstance(rule.staleness, Constant):
        return (
            "strategy.staleness weighs each update: leave it out, the privacy policy has weights "
            "by staleness"
        )
    if isinstance(rule, FedAvgSettings) and rule.weighting != "uniform":
        return "strategy.weighting = 'samples' would tell each device's samples: use 'uniform'"
    if rule.by_steps and terms.per is None:
        return "it divides by gamma H, which is not known to be the same for all devices"
    key = f"strategy.{rule.batch_key} = {rule.batch}"
    if rule.batch % n:
        return f"{key} updates can't be split into private.buckets = {n} of one size"
    if not policy.min_batch <= rule.batch // n <= policy.max_batch:
        each = f" in {n} buckets (private.buckets) of {rule.batch // n}" if n > 1 else ""
        return (
            f"{key}{each}, but the privacy policy opens sums of {policy.min_batch} to "
            f"{policy.max_batch} updates"
        )
    return ""


def check_weights(rule: Strategy, terms: PrivateTerms) -> None:
    """Raise ConfigError if the helper may refuse honest batches, as one update stands out.

    Recorded runs need no such check.
    """
    policy, n = terms.policy, terms.buckets
    key, weights = f"strategy.{rule.batch_key} = {rule.batch}", policy.weights
    if rule.max_staleness is not None:
        weights = weights[: rule.max_staleness + 1]
    needed, most = policy.min_batch * max(weights), max(weights)
    least = most + (rule.batch // n - 1) * min(weights)  # of a sum in which one update stands out
    if rule.rounds != "always" and least < needed:
        raise ConfigError(
            f"{key}, but at weights of {min(weights)} to {most} a sum may add up to {least}, and "
            f"the policy opens none below {needed} (min_batch {policy.min_batch} times {most}): "
            "lower strategy.max_staleness, or agree on a lower private.terms.min_batch"
        )
