"""Private runs: the rule that a policy makes of the strategy, and the settings that it rules out.

What rules a setting out is that a server would see a single device's numbers, or that devices would
send what a sum of masked updates can't carry (docs/privacy.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstream.core.errors import ConfigError
from fedstream.private.settings import PolicyTerms
from fedstream.runtime.task_settings import FixedSteps
from fedstream.trainer.schedules import ConstantRate
from fedstream.trainer.solvers import Solvers

if TYPE_CHECKING:
    from fedstream.private.policy import PrivacyPolicy
    from fedstream.settings.config import Settings
    from fedstream.strategies import Strategy


def refusal(settings: Settings) -> str:
    """Why these settings can't be those of a private run; '' if they can. Reads no file."""
    if settings.wire.update != "f32":
        return (
            f"wire.update = {settings.wire.update!r} in a private run (private.policy): masked "
            "updates have a format of their own: leave it out; solver.compression works"
        )
    if settings.evaluator.on_devices is not None:
        return (
            "evaluator.on_devices in a private run (private.policy): its answers are numbers of "
            "single devices: leave it out; evaluator.per_device measures the evaluator's own data"
        )
    if not settings.journal.weights:
        return (
            "journal.weights = false in a private run (private.policy): a sum can only be rebuilt "
            "from the masked updates: leave it out"
        )
    if settings.strategy.adapt is not None:
        return (
            "strategy.adapt in a private run (private.policy): the sums are opened once, at one "
            "scale: leave it out"
        )
    if settings.journal.sync == "never":
        return (
            "journal.sync = 'never' in a private run (private.policy): a batch must be on disk "
            "before its sum is opened, as no other is opened with its updates: use 'interval'"
        )
    if settings.gateway.flower_app is not None:
        return (
            "gateway.flower_app in a private run (private.policy): Flower's supernodes don't mask "
            "updates: leave it out; devices that run `fedstream device` do"
        )
    if settings.strategy.by_steps and (why := _unequal_steps(settings)):
        name = settings.strategy.name
        return (
            f"strategy.name = {name!r} in a private run (private.policy) divides each sum by one "
            f"gamma H, and {why}"
        )
    return ""


def _unequal_steps(settings: Settings) -> str:
    """The setting by which gamma H is not one for all devices, and what to do; '' for none."""
    steps, usual = settings.scheduler.steps, settings.solver
    solvers = (usual, *Solvers(usual, settings.solvers).others.values())
    if not isinstance(steps, FixedSteps):
        why = f"scheduler.steps.kind = {steps.kind!r} gives devices different steps: use 'fixed'"
    elif any(group.steps not in (None, steps) for group in settings.participation):
        why = "participation.steps gives some devices other steps: leave it out"
    elif any(solver.lr != usual.lr for solver in solvers):
        why = f"solvers.lr differs from solver.lr = {usual.lr:g}: give all devices one"
    elif not all(isinstance(solver.schedule, ConstantRate) for solver in solvers):
        why = "solver.schedule changes the learning rate: leave it out"
    elif any(solver.lr_scheduler is not None for solver in solvers):
        why = "solver.lr_scheduler changes the learning rate: leave it out"
    else:
        why = ""
    return why


def private_rule(settings: Settings, rule: Strategy) -> Strategy:
    """``rule``, or its private form if the settings name a policy.

    Raises ConfigError, also for terms that are not the policy's.
    """
    mine, usual = settings.private, PolicyTerms()
    if (policy := mine.read()) is None:
        return rule
    for key, asked in mine.terms:
        known = getattr(policy, key)
        if asked not in (known, getattr(usual, key)):
            raise ConfigError(
                f"private.terms.{key} = {asked!r}, but private.policy = {mine.policy!r} has "
                f"{known!r}: leave private.terms out, or make another policy (fedstream agree)"
            )
    return private_form(settings, rule, policy)


def private_form(settings: Settings, rule: Strategy, policy: PrivacyPolicy) -> Strategy:
    """The rule on sums under a policy. Raises ConfigError if it has no such form."""
    from fedstream.strategies.private_sums import PrivateSums, PrivateTerms, check_weights

    steps, per = settings.scheduler.steps, None
    if isinstance(steps, FixedSteps) and not _unequal_steps(settings):
        per = settings.solver.lr * steps.n
    mine = settings.private
    terms = PrivateTerms(policy=policy, per=per, buckets=mine.buckets, over=mine.over)
    form = PrivateSums.of(rule, terms)
    check_weights(rule, terms)
    return form
