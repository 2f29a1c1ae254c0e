"""What a helper refuses to open, as a function of the policy, the roster and the intent.

What it has opened before is the store's to check (:mod:`fedstream.helper.store`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedstream.core.errors import FedstreamError
from fedstream.private.policy import KeyRoster, PrivacyPolicy
from fedstream.private.sealing import BadSeal, EpochSecret, Intent, OpenRefusal


class NotOpened(FedstreamError):
    """An intent that the helper refuses. ``about``: what the asking program needs to go on."""

    def __init__(self, reason: OpenRefusal, text: str, **about: Any) -> None:
        super().__init__(text)
        self.reason = reason
        self.about = about


def check_intent(intent: Intent, policy: PrivacyPolicy, roster: KeyRoster) -> None:
    """Check all that the intent itself shows, signatures included. Raises NotOpened."""
    updates, digest = intent.updates, policy.digest
    if intent.policy != digest:
        raise NotOpened("policy", f"the intent names policy {intent.policy}, not {digest}")
    if len(updates) < policy.min_batch:
        raise NotOpened(
            "too few", f"{len(updates)} updates, at least {policy.min_batch} are opened"
        )
    if len(updates) > policy.max_batch:
        raise NotOpened(
            "too many", f"{len(updates)} updates, at most {policy.max_batch} are opened"
        )
    _check_weights(intent, policy)
    for name, seen in (
        ("device", Counter(one.device for one in updates)),
        ("task", Counter(one.task for one in updates)),
    ):
        value, count = seen.most_common(1)[0]
        if count > 1:
            raise NotOpened(
                "twice", f"{name} {value} is in the batch {count} times", **{name: value}
            )
    layouts = {one.layout for one in updates}
    if {one.run for one in updates} != {intent.run} or len(layouts) > 1:
        raise NotOpened("mixed", "the updates are of several runs or model layouts")
    for update in updates:
        if update.policy != digest:
            raise NotOpened(
                "policy", f"task {update.task} was sealed under another policy", task=update.task
            )
        key = roster.keys.get(update.device)
        if key is None:
            raise NotOpened(
                "not in roster",
                f"task {update.task}: device {update.device} is not in the roster",
                task=update.task,
            )
        try:
            update.check(key)
        except BadSeal as error:
            raise NotOpened("signature", str(error), task=update.task) from None


def _check_weights(intent: Intent, policy: PrivacyPolicy) -> None:
    """Weights are the table's, and no update stands out from the sum."""
    if len(intent.weights) != len(intent.updates):
        raise NotOpened("weights", f"{len(intent.weights)} weights, {len(intent.updates)} updates")
    for update, weight in zip(intent.updates, intent.weights, strict=True):
        staleness = intent.version - update.tau
        known = 0 <= staleness < len(policy.weights)
        if not known or weight != policy.weights[staleness]:
            said = policy.weights[staleness] if known else "none"
            raise NotOpened(
                "weights",
                f"task {update.task} has weight {weight}; the policy's for staleness {staleness}: "
                f"{said}",
                task=update.task,
            )
    if sum(intent.weights) < policy.min_batch * max(intent.weights):
        raise NotOpened(
            "weights",
            f"weights that add up to {sum(intent.weights)} with one of {max(intent.weights)} hide "
            f"its update among fewer than {policy.min_batch}",
        )


def seeds_of(
    intent: Intent, policy: PrivacyPolicy, epochs: Mapping[str, EpochSecret]
) -> list[tuple[bytes, int]]:
    """The seeds of the intent's updates with their weights. Raises NotOpened."""
    found = []
    for update, weight in zip(intent.updates, intent.weights, strict=True):
        secret = epochs.get(update.epoch)
        if secret is None:
            raise NotOpened(
                "helper lost",
                f"task {update.task} was sealed to epoch {update.epoch}, whose key is gone",
                task=update.task,
            )
        try:
            found.append((secret.seed_of(update, policy.kem), weight))
        except BadSeal as error:
            raise NotOpened("seal", str(error), task=update.task) from None
    return found


def noise_epoch(intent: Intent, epochs: Mapping[str, EpochSecret]) -> EpochSecret:
    """The epoch whose key selects the noise: the newest of the intent's, for ever the same."""
    named = {update.epoch for update in intent.updates}
    return [secret for epoch, secret in epochs.items() if epoch in named][-1]
