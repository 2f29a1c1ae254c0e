"""What-if: another rule, or the same rule without some devices, on the recorded updates.

If the rule takes deltas and the devices sent models, or the reverse, each update is converted by
its recorded x_tau: to x_new - x_tau, exactly as the device would have sent it, or to x_tau plus the
delta. Floating-point buffers and integers are x_new's in both cases.

A recorded change of the step's scale also scales the steps of the other rule, if it has ``adapt``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from fedstream.core.layout import Model
from fedstream.core.messages import Message, Sends
from fedstream.journal.progress import Progress, Step, close_round, forget, open_sum, take
from fedstream.journal.rebuild import recorded, unfit
from fedstream.journal.records import (
    QuarantineSet,
    RoundClosed,
    StepScaled,
    SumOpened,
    Taken,
    is_used,
)
from fedstream.journal.segment import Record
from fedstream.strategies import Strategy

Unused: TypeAlias = Literal["", "left_out", "no_base", "unfit"]
"""Why the other rule did not get a recorded update: its device is left out; x_tau is not in the
journal; or its metadata does not fit (as AFA needs steps), so a live updater would refuse it."""


class WhatIf:
    """Another rule applied to the recorded updates, starting from a recorded state."""

    def __init__(
        self, rule: Strategy, was: Strategy, start: Progress, without: frozenset[int]
    ) -> None:
        """Continue from ``start``, taking over its models; leave out the devices ``without``.

        ``rule`` replaces ``was``, the recorded rule.
        """
        self.progress = start
        self.unused: Unused = ""  # why the last record was not used
        self._without = without
        self._filling = bool(start.held)  # a recorded round that is not full yet
        self._free: list[Model] = []
        self.change(rule, was)

    def change(self, rule: Strategy, was: Strategy) -> None:
        """Continue with the rules of another segment."""
        self._rule = rule
        self._sent = was.sends
        self._in_rounds = was.max_staleness == 0  # only rounds allow no staleness

    def converts(self, message: Message) -> bool:
        """Whether this record's update must be converted, which needs x_tau."""
        return is_used(message) and self._rule.sends != self._sent

    def take(self, record: Record, update: Model | None, base: Model | None = None) -> Step:
        """Apply one record; a used update needs its payload and x_tau."""
        message, before = record.message, self.progress
        used = [before.state.model]
        step = Step(before)
        self.unused = self._why_not(message, base)
        if is_used(message) and not self.unused:
            spare = self._spare(before)
            used.append(spare)
            sent = recorded(record, update)
            if base is not None and self.converts(message):
                sent = _converted(sent, base, self._rule.sends, into=self._spare(before))
                used.append(sent)
            # Keep the recorded staleness: this rule may have made fewer versions by now.
            tau = max(0, before.state.version - message.staleness)
            upload = message.upload.model_copy(update={"tau": tau, "handed": None})
            step = take(self._rule, before, upload, sent, spare)
        if isinstance(message, StepScaled):
            step = Step(replace(before, scale=message.scale, scaled_at=message.at))
        elif isinstance(message, QuarantineSet) and not message.release:
            step = Step(forget(self._rule, before, message.devices))
        elif isinstance(message, SumOpened):
            used += before.state.models()
            step = open_sum(self._rule, before, update, message.reason)
        elif self._ends_round(message) and step.made is None:
            used += step.after.state.models()
            closed = close_round(
                self._rule, step.after, step.after.state.version, drops=_is_dropped(message)
            )
            step = Step(closed.after, step.decision, closed.made)
        self.progress = step.after
        in_use = {id(model) for model in step.after.state.models()}
        self._free += [model for model in used if id(model) not in in_use]
        return step

    def _why_not(self, message: Message, base: Model | None) -> Unused:
        if not is_used(message):
            return ""
        if message.upload.device in self._without:
            return "left_out"
        if unfit(self._rule, message.upload):
            return "unfit"
        return "no_base" if base is None and self.converts(message) else ""

    def _spare(self, before: Progress) -> Model:
        return self._free.pop() if self._free else Model(before.state.model.layout)

    def _ends_round(self, message: Message) -> bool:
        """Whether a recorded round ended here; it then ends even if devices are left out."""
        if self._rule.masked:  # its batches end where their sums were opened
            return isinstance(message, RoundClosed) and not message.late
        if not (self._in_rounds and isinstance(message, Taken | RoundClosed)):
            return False
        if message.digest is None and not _is_dropped(message):
            self._filling |= is_used(message)
            return False
        filled, self._filling = self._filling, False
        return filled or isinstance(message, RoundClosed)


def _is_dropped(message: Message) -> bool:
    return isinstance(message, RoundClosed) and message.dropped > 0


def _converted(sent: Model, base: Model, to: Sends, into: Model) -> Model:
    """Convert an update into ``into``: to x_new, or to x_new - x_tau for the parameters."""
    into.buffer[:] = sent.buffer
    change = np.subtract if to == "delta" else np.add
    change(sent.parameters, base.parameters, out=into.parameters)
    return into
