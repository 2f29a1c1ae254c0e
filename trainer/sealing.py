"""What a device sends in a private run in place of what it learned: a masked update, and its seal.

Of the numbers of training nothing is sent but the configured learning rate: samples, steps and loss
would tell about the data of a single device. See docs/privacy.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Payload
from fedstream.private.masks import rounded
from fedstream.private.policy import private_key
from fedstream.private.sealing import seal
from fedstream.runtime.process import read_regular
from fedstream.strategies.private_sums import check_layout
from fedstream.trainer.solvers import Trained

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedstream.core.layout import Layout, Model
    from fedstream.core.records import Run
    from fedstream.private.policy import PrivacyPolicy
    from fedstream.private.sealing import EpochKey
    from fedstream.private.settings import PrivateSettings
    from fedstream.trainer.learner import Learned


class Sealer:
    """Masks and seals the updates of devices whose private keys are here."""

    def __init__(
        self, policy: PrivacyPolicy, layout: Layout, key_of: Callable[[int], Ed25519PrivateKey]
    ) -> None:
        """``key_of``: a device's private key.

        Raises ConfigError if masked updates can't carry what devices of this model send.
        """
        check_layout(layout, policy)
        self.policy = policy
        self.format = policy.format
        self._layout = layout.signature
        self._key_of = key_of

    def sealed(
        self,
        learned: Learned,
        delta: Model,
        epoch: EpochKey,
        *,
        run: str,
        task: str,
        attempt: str,
        device: int,
        tau: int,
        base: str,
    ) -> Learned:
        """What the device sends, by a fresh seed: call it once for each attempt.

        ``delta``: x_new - x_tau in place of the parameters. ``run``: the run's lineage. ``base``:
        digest of x_tau. Raises BadSeal if ``epoch`` is not a key of the policy's helper, or too
        old.
        """
        found = delta.parameters
        if not np.isfinite(found).all():
            # To give the task up would answer a server whose model overflows on certain data.
            found = np.zeros_like(found)
        # Seeded by the system: a repeated attempt rounds anew, as it masks anew.
        values = rounded(found, self.policy, np.random.default_rng())
        data, update = seal(
            values,
            self.policy,
            epoch,
            self._key_of(device),
            run=run,
            task=task,
            attempt=attempt,
            device=device,
            tau=tau,
            layout=self._layout,
        )
        payload = Payload(np.frombuffer(data, np.uint8))
        return replace(
            learned,
            trained=Trained(steps=0, samples=0, loss=None),
            update=payload,
            digest=payload.digest_like(base),
            format=self.format,
            sealed=update.encode(),
        )


def device_keys(folder: Path, devices: Iterable[int]) -> dict[int, Ed25519PrivateKey]:
    """The private keys of these devices: the files ``DEVICE.pem`` in a folder.

    Raises ConfigError.
    """
    keys = {}
    for device in devices:
        at = f"private.keys: {folder / f'{device}.pem'}"
        try:
            keys[device] = private_key(read_regular(folder / f"{device}.pem"), at)
        except OSError as error:
            raise ConfigError(f"{at}: {error.strerror}") from error
    return keys


def sealer_of(run: Run, name: str, settings: PrivateSettings, devices: Iterable[int]) -> Sealer:
    """The sealer of a trainer that serves ``devices`` of run ``name``.

    Raises ConfigError unless the run has the policy of ``settings``: nothing is sent in a run
    without a policy, or with another one.
    """
    policy = settings.read()
    if policy is None:
        raise ConfigError(
            f"run {name!r} is private: set private.policy, private.owner and private.keys"
        )
    at = f"private.policy = {settings.policy!r}"
    if not run.policy:
        raise ConfigError(
            f"{at}: run {name!r} is not private, and this trainer sends no updates that others can "
            "read: leave it out if they may"
        )
    if run.policy.encode() != policy.text:
        found = hashlib.sha256(run.policy.encode()).hexdigest()
        raise ConfigError(
            f"{at}: its digest is {policy.digest}, but run {name!r} has policy {found}: this "
            "trainer takes part under its own policy alone"
        )
    if settings.keys is None:
        raise ConfigError("private.keys: name the folder with the devices' keys, DEVICE.pem")
    keys = device_keys(Path(settings.keys), devices)
    return Sealer(policy, run.layout, keys.__getitem__)
