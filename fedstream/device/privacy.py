"""A device's pinned policy: which tasks it takes, and what it sends of them.

A device with a policy trusts neither the gateway nor what is behind it. It takes no task of a run
that is not private or has another policy, and seals to no key that another helper has signed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.core.errors import BadMessage, ConfigError, FedstreamError
from fedstream.core.formats import F32
from fedstream.private.policy import PrivacyPolicy, public_key, read_policy
from fedstream.private.sealing import BadSeal, EpochKey
from fedstream.trainer.sealing import Sealer

if TYPE_CHECKING:
    from fedstream.core.layout import Layout, Model
    from fedstream.protocol.messages import Offer, OfferedPrivacy
    from fedstream.protocol.signatures import PrivateKey
    from fedstream.trainer.learner import Learned
    from fedstream.trainer.workspace import Start


class NotPrivate(FedstreamError):
    """An offer under which the device's update would not be private as its policy says."""


def policy_in(file: Path, owner: str) -> PrivacyPolicy:
    """Read a policy that ``owner`` has signed (64 hexadecimal digits). Raises ConfigError."""
    try:
        key = public_key(owner)
    except ValueError:
        raise ConfigError(
            "--policy-owner: expected the Ed25519 public key of the helper's owner, in 64 "
            "hexadecimal digits"
        ) from None
    return read_policy(file, key, f"--policy {file}")


class PrivateTasks:
    """A device's tasks under its policy."""

    def __init__(self, policy: PrivacyPolicy, key: PrivateKey, layout: Layout) -> None:
        """``key``: the device's. Raises ConfigError if it or the model doesn't fit the policy."""
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                "--key: with --policy, the device's key must be that of Ed25519 in the policy's "
                "roster"
            )
        self._sealer = Sealer(policy, layout, lambda _device: key)
        self.format = self._sealer.format.name

    def accepted(self, offer: Offer) -> Offer:
        """The task as the device trains it: for a delta that is not encoded. Raises NotPrivate."""
        self._of(offer)
        update = offer.update.model_copy(update={"sends": "delta", "format": F32.name})
        return offer.model_copy(update={"update": update})

    def sealed(self, offer: Offer, learned: Learned, delta: Model, start: Start) -> Learned:
        """What the device sends in answer to an accepted task.

        ``delta``: x_new - x_tau in place of the parameters. Raises NotPrivate if the helper's key
        is too old by now.
        """
        private, epoch = self._of(offer)
        return self._sealer.sealed(
            learned,
            delta,
            epoch,
            run=private.run,
            task=offer.task.id,
            attempt=offer.attempt,
            device=offer.task.device,
            tau=start.version,
            base=start.digest,
        )

    def _of(self, offer: Offer) -> tuple[OfferedPrivacy, EpochKey]:
        """An offer's privacy and the key in it, checked. Raises NotPrivate."""
        private, policy = offer.private, self._sealer.policy
        if private is None:
            raise NotPrivate(
                "the gateway offers a task of a run that is not private, and this device takes "
                f"part under policy {policy.digest} alone"
            )
        if private.policy != policy.digest:
            raise NotPrivate(
                f"the gateway offers a task under policy {private.policy}, and this device takes "
                f"part under policy {policy.digest} alone"
            )
        try:
            epoch = EpochKey.decode(private.epoch_key)
            epoch.check(policy, time.time())
        except (BadMessage, BadSeal) as error:
            raise NotPrivate(f"the helper's key that the gateway offers: {error}") from error
        return private, epoch
