"""Devices that seal what they have learnt, in a run that is played by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedstream.broker import blobs
from fedstream.core.layout import Payload
from fedstream.core.messages import Trigger, Upload
from fedstream.private.masks import in_model_units, rounded
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import EpochKey, seal
from tests.private.enrolled import DEVICES
from tests.support import Hand, wait_until


@dataclass
class Devices:
    """Devices that seal what they have learnt; their plain updates are by task and attempt."""

    hand: Hand
    policy: PrivacyPolicy
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    values: dict[tuple[str, str], NDArray[np.int64]] = field(default_factory=dict)

    async def answers(self, device: int, *, malformed: bool = False) -> Upload:
        """A device's masked and sealed answer to a new task, admitted."""
        [task] = await self.hand.open(device=device)
        upload = await self.trains(task, malformed=malformed)
        assert await self.hand.admit(upload) == [("admitted", "")]
        return upload

    async def trains(
        self,
        task: Trigger,
        attempt: str = "a1",
        *,
        delta: NDArray[np.float32] | None = None,
        malformed: bool = False,
    ) -> Upload:
        """A device's masked and sealed answer, which is written but not admitted."""
        hand, policy = self.hand, self.policy

        async def key() -> bytes | None:
            found: bytes | None = await hand.client.call("GET", hand.keys.sealing)
            return found

        epoch = EpochKey.decode(await wait_until(key))
        run, head = await hand.ledger.run(), await hand.ledger.head()
        assert head is not None
        if delta is None:
            delta = (self.rng.standard_normal(policy.parameters) / 4).astype(np.float32)
        values = rounded(delta, policy, self.rng)
        if malformed:
            values = self.rng.integers(-(2**31), 2**31, policy.parameters)
        data, sealed = seal(
            values,
            policy,
            epoch,
            DEVICES[task.device],
            run=run.lineage,
            task=task.task,
            attempt=attempt,
            device=task.device,
            tau=head.version,
            layout=hand.layout.signature,
        )
        self.values[task.task, attempt] = values
        payload = Payload(np.frombuffer(data, np.uint8))
        upload = await hand.trained(
            task,
            write=False,
            attempt=attempt,
            tau=head.version,
            base=head.given,
            digest=payload.digest(),
            size=len(data),
            sends="delta",
            format=policy.format.name,
            samples=0,
            steps=0,
            sealed=sealed.encode(),
        )
        await blobs.write(hand.client, hand.keys.update(upload.blob), payload, expire_s=60)
        return upload

    def mean(self, *uploads: Upload) -> NDArray[np.float32]:
        """The plain mean of updates, in the units in which they were sent."""
        total = sum(self.values[one.task, one.attempt] for one in uploads)
        return in_model_units(np.asarray(total), len(uploads), self.policy)
