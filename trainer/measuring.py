"""An evaluation on a device: its metrics of one version, as sums and weights."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from fedstream.broker.published import read_model
from fedstream.core import reasons
from fedstream.core.errors import BlobMissing, FedstreamError
from fedstream.core.layout import Model
from fedstream.core.messages import Evaluation, Measured
from fedstream.trainer.failures import Guard
from fedstream.trainer.solvers import Cancelled
from fedstream.trainer.task import NoLabels

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.core.layout import Layout
    from fedstream.trainer.attempt import AttemptContext


class Evaluated:
    """A cache of the version that devices evaluate."""

    def __init__(self, client: Client, keys: Keys, layout: Layout) -> None:
        self._client = client
        self._keys = keys
        self._layout = layout
        self._blob = ""
        self._model: Model | None = None

    async def read(self, task: Evaluation) -> Model:
        """The model of a task's version. Raises BlobMissing or BlobDamaged."""
        model = self._model or Model(self._layout)
        if task.blob != self._blob:
            self._blob, self._model = "", model
            await read_model(
                self._client,
                self._keys.model(task.blob),
                model,
                digest=task.digest,
                chunks=task.chunks,
                encoded=task.encoded,
            )
            self._blob = task.blob
        return model


async def measurement(
    task: Evaluation, lost: asyncio.Event, shared: AttemptContext, evaluated: Evaluated
) -> Measured:
    """Evaluate a version on a device. ``lost``: set when the lease is lost.

    The time that a simulated device would take does not count, nor its availability. Raises
    Cancelled if the lease is lost or the trainer is told to stop, and retriable errors of Redis.
    """
    stop, began = shared.context.stop, time.monotonic()
    answer = Measured(
        task=task.task,
        attempt=secrets.token_hex(6),
        device=task.device,
        trainer=shared.name,
        version=task.version,
        base=task.base,
        site=shared.settings.site,
    )

    if shared.sealer is not None:  # metrics tell of a single device's data
        return answer.model_copy(update={"reason": reasons.NO_TEST_DATA})

    def is_cancelled() -> bool:
        return lost.is_set() or stop.is_set()

    def hangs() -> None:
        shared.context.log.error("metrics() hangs: this trainer exits and must be restarted")
        stop.set()

    reason, found = None, None
    try:
        model = await evaluated.read(task)
        with Guard(is_cancelled, hangs, patience_s=shared.settings.drain_s):
            local = await shared.local.of(task.device)
            found = await shared.thread.run(shared.learner.measure, model, local, task.device)
        reason = reasons.NO_TEST_DATA if found is None else None
    except Cancelled:
        raise
    except NoLabels:
        reason = reasons.NO_TEST_DATA
    except BlobMissing:  # the evaluation is over
        reason = reasons.DEADLINE_PASSED
    except Exception as error:
        if isinstance(error, FedstreamError) and error.retriable:
            raise
        await shared.failures.raised(error, task, task.version)
        reason = reasons.raised(error)
    if is_cancelled():
        raise Cancelled
    samples, sums = found or (0, {})
    seconds = time.monotonic() - began
    return answer.model_copy(
        update={"samples": samples, "sums": sums, "reason": reason, "seconds": seconds}
    )
