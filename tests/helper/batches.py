"""Devices' batches for a helper, and the server that gets their sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedstream.helper.opening import NotOpened
from fedstream.helper.service import Helper
from fedstream.helper.store import HelperStore
from fedstream.private.masks import add_masked, rounded, unmasked, unpacked
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import Intent, SealedUpdate, seal
from tests.private.enrolled import DEVICES, HELPER, ROSTER, policy_of

RUN = "lineage"


class Batches:
    """A helper with its devices; what the server holds is by task."""

    def __init__(self, path: Path, policy: PrivacyPolicy | None = None) -> None:
        self.path, self.policy = path, policy or policy_of()
        self.now = 1000.0
        self.values: dict[str, NDArray[np.int64]] = {}
        self.sent: dict[str, bytes] = {}
        self.start()

    def start(self) -> None:
        """Start the helper, or start it again."""
        self.store = HelperStore(self.path, self.policy)
        self.helper = Helper(
            self.policy,
            ROSTER,
            HELPER,
            self.store,
            epoch_s=100.0,
            keep_s=100.0,
            now=lambda: self.now,
        )

    def restart(self) -> None:
        """Kill the helper and start it again."""
        self.store.close()
        self.start()

    def trained(self, device: int, task: str | None = None, **about: Any) -> SealedUpdate:
        """A device's answer to a task; the masked update stays with the server."""
        task = task or f"task-{device}"
        rng = np.random.default_rng([device, len(task)])
        delta = rng.standard_normal(self.policy.parameters).astype(np.float32)
        values = rounded(delta, self.policy, rng)
        given = {"run": RUN, "attempt": "1", "tau": 7, "layout": "layout", "now": self.now, **about}
        data, update = seal(
            values,
            self.policy,
            self.helper.key,
            DEVICES[device],
            task=task,
            device=device,
            **given,
        )
        self.values[task], self.sent[task] = values, data
        return update

    def intent(self, *updates: SealedUpdate, version: int = 7, **changes: Any) -> Intent:
        """The batch that the updater journals; weights are the policy's."""
        made = {
            "run": RUN,
            "policy": self.policy.digest,
            "version": version,
            "updates": updates,
            "weights": tuple(self.policy.weights[version - one.tau] for one in updates),
        }
        return Intent(**{**made, **changes})

    def opened(self, intent: Intent) -> NDArray[np.int64]:
        """The sum as the server gets it. Raises NotOpened."""
        masks = unpacked(self.helper.open(intent), self.policy)
        total = np.zeros(self.policy.parameters, np.uint32)
        for update, weight in zip(intent.updates, intent.weights, strict=True):
            add_masked(total, unpacked(self.sent[update.task], self.policy), weight)
        return unmasked(total, masks, self.policy)

    def plain(self, intent: Intent) -> NDArray[np.int64]:
        """The weighted sum of the plain updates, which no service sees."""
        pairs = zip(intent.updates, intent.weights, strict=True)
        return sum((w * self.values[u.task] for u, w in pairs), np.zeros(1, np.int64))


def refused(batches: Batches, intent: Intent) -> NotOpened:
    """Why the helper refuses; it has recorded nothing."""
    before = list(batches.store._database.iterdump())
    with pytest.raises(NotOpened) as caught:
        batches.helper.open(intent)
    assert list(batches.store._database.iterdump()) == before
    return caught.value
