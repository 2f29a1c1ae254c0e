"""A rule that gets masked updates (:mod:`fedstream.private`), and steps along their opened sum.

A batch's memory is sum w_i c_i modulo 2**32, the masked updates by the policy's integer weights, as
32-bit words in place of the parameters. The batch is complete with K updates, or when its round
ends. :meth:`PrivateSums.open` subtracts the helper's masks, checks the range of the sum, and lets
the rule that it wraps step along

    sum w_i (x_new_i - x_tau_i) / (w K),    w: the policy's largest weight, K: the rule's constant

also if fewer than K updates came. So how far a device moves the model never depends on the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_serializer

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Sends
from fedstream.core.words import MaskWords
from fedstream.private import masks
from fedstream.private.policy import PrivacyPolicy
from fedstream.runtime.config import Section
from fedstream.strategies.afa import AfaCdSettings
from fedstream.strategies.batches import Batch, FedBuffSettings
from fedstream.strategies.fedavg import FedAvgSettings
from fedstream.strategies.mixing import add
from fedstream.strategies.staleness import Constant
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update


class PrivateTerms(Section):
    """What makes a recorded rule private."""

    policy: PrivacyPolicy
    # gamma H, by which AFA-CD divides an update; 1 for other rules.
    per: float = Field(default=1.0, gt=0)


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
        if why := _unfit(rule, policy):
            raise ConfigError(f"strategy.name = {rule.name!r} in a private run: {why}")
        limit = len(policy.weights) - 1
        if rule.max_staleness is not None:
            limit = min(limit, rule.max_staleness)
        return cls.model_construct(
            name=rule.name,
            max_staleness=limit,
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
    def batch(self) -> int:
        """K, the updates in a sum."""
        return self.rule.batch

    @property
    def rate(self) -> float:
        """The factor of the mean delta."""
        return self.rule.rate

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The vectors that the rule keeps between versions."""
        return self.rule.vector_names

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
        """Close the batch, so that its sum is due; without updates there is none."""
        if not state.memory.arrivals:
            return state
        return replace(state, memory=replace(state.memory, closed=True))

    def is_due(self, state: State) -> bool:
        """Whether the batch is complete, so that its sum can be opened."""
        return state.memory.closed or state.memory.arrivals >= self.batch

    def open(self, state: State, opened: Model) -> State:
        """Make the version of an opened sum. ``opened``: the helper's masks, as 32-bit words.

        Raises SumOutOfRange if the sum can't be that of honest devices' updates.
        """
        memory, policy = state.memory, self.terms.policy
        total = Batch.total(state)
        found = masks.unmasked(words_of(total), words_of(opened), policy)
        masks.check_range(found, int(memory.weight), policy)
        scale = max(policy.weights) * self.terms.per
        total.parameters[:] = masks.in_model_units(found, scale, policy)
        full = Memory(total, self.batch, devices=memory.devices)
        if isinstance(self.rule, Batch):
            return self.rule.step(State(state.version, state.model, full), None)
        x = state.model.parameters
        add(x, total.parameters, 1.0 / self.batch, into=total.parameters)
        return State(state.version + 1, total)


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


def _unfit(rule: Strategy, policy: PrivacyPolicy) -> str:
    """Why a rule has no private form; '' if it has one."""
    if type(rule) not in (FedBuffSettings, FedAvgSettings, AfaCdSettings):
        return "its server must see each update alone; fedbuff, fedavg and afa-cd work on sums"
    if isinstance(rule, FedBuffSettings) and not isinstance(rule.staleness, Constant):
        return (
            "strategy.staleness weighs each update: leave it out, the privacy policy has weights "
            "by staleness"
        )
    if isinstance(rule, FedAvgSettings) and rule.weighting != "uniform":
        return "strategy.weighting = 'samples' would tell each device's samples: use 'uniform'"
    if not policy.min_batch <= rule.batch <= policy.max_batch:
        return (
            f"strategy.{rule.batch_key} = {rule.batch}, but the privacy policy opens sums of "
            f"{policy.min_batch} to {policy.max_batch} updates"
        )
    return ""
