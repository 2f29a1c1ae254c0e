"""Training a user's task: its module and data, and the update that training yields."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstream.core.errors import ConfigError
from fedstream.core.formats import F32, fed_back
from fedstream.core.layout import Payload
from fedstream.trainer import local_values, vector
from fedstream.trainer.compression import Compression, compress
from fedstream.trainer.data import Processor, check, placed, size_of
from fedstream.trainer.on_devices import sums_of
from fedstream.trainer.precision import Precision
from fedstream.trainer.solvers import Trained
from fedstream.trainer.task import untrained

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.core.formats import Format
    from fedstream.core.layout import Floats, Model
    from fedstream.core.messages import Sends, Sum
    from fedstream.trainer.solvers import Work
    from fedstream.trainer.task import Task
    from fedstream.trainer.workspace import Start


def as_sent(
    trained: object,
    into: Model,
    base: Model,
    device_control: Floats | None,
    sends: Sends,
    compression: Compression,
) -> Trained:
    """Convert ``into``, which holds x_new, to the model or delta to send.

    Returns the numbers of ``trained``, the result of train(). ``base``: x_tau. ``device_control``:
    c_i (None: zero). Only the parameters of a delta are compressed.

    Raises TypeError or ValueError if ``trained`` is invalid; ConfigError if compression is
    configured but models, not deltas, are sent.
    """
    from fedstream.trainer import vector

    if not isinstance(trained, Trained):
        raise TypeError(f"train() must return Trained(...), not {type(trained).__name__}")
    lr = None if trained.lr is None else float(trained.lr)
    loss = None if trained.loss is None else float(trained.loss)
    took = Trained(int(trained.steps), int(trained.samples), loss, lr=lr)
    if min(took.steps, took.samples) < 0:
        raise ValueError("train() must return Trained(...) with no negative numbers")
    if lr is not None and not 0.0 < lr < math.inf:
        raise ValueError(
            f"train() must return Trained(..., lr=...) with a finite lr above 0, not {lr}"
        )
    if sends == "delta":
        vector.to_delta(into, base)
        compress(into.parameters, compression)
    elif compression.kind != "none":
        raise ConfigError(
            f"compression.kind = {compression.kind!r}: devices send their models in this run, and "
            "only deltas can be compressed"
        )
    if into.layout.controls:
        if trained.control is None:
            raise TypeError("train() must return Trained(..., control=...): SCAFFOLD needs it")
        known = 0.0 if device_control is None else device_control
        np.subtract(trained.control, known, out=into.controls)
    return took


_PARTITIONS_KEPT = 64  # cached data sets of devices


@dataclass(frozen=True)
class Learned:
    """The result of training: the update, ready for upload, and its numbers."""

    trained: Trained
    update: Payload  # in its wire format
    digest: str
    unsent: Floats | None = None  # encoding error of the parameters; None: no error feedback
    dropped: bool = False  # the previous feedback was too large to be added
    local: Model | None = None  # new values of the device's local tensors, to be kept
    format: Format = F32  # of the update
    sealed: bytes | None = None  # beside a masked update; see :mod:`fedstream.trainer.sealing`


class Learner:
    """The task, its module and its data, loaded at creation. Only one thread may use it."""

    def __init__(
        self,
        load: Callable[[], Task],
        threads: int,
        place: Processor,
        say: Callable[[str], object] = lambda _line: None,
    ) -> None:
        """``say``: called with a line if bfloat16 is configured but slower than float32."""
        check("trainer.device", place)
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = True  # for the same bits when a task is repeated
        self.task = task = load()
        self._module = untrained(task).to(place)
        self.layout = vector.layout_of(self._module)
        self._place = place
        self._precision = Precision(task, say)
        self._data = lru_cache(_PARTITIONS_KEPT)(self._loaded)

    def train(
        self,
        start: Start,
        work: Work,
        into: Model,
        sends: Sends,
        how: Format = F32,
        memory: Floats | None = None,
    ) -> Learned:
        """Train from x_tau into ``into``; return the update encoded in the format ``how``.

        ``memory``: error feedback of the device's last update; None: zero.
        """
        data = self._data(work.device)
        module = self._loaded_with(start.model, start.local)
        work = self._precision.settled(replace(work, descents=count()), module, data)
        trained = self.task.train(module, data, work)
        vector.read(self._module, into)
        local = local_values.read(self._module, self.layout)
        took = as_sent(
            trained, into, start.model, start.device_control, sends, work.solver.compression
        )
        if how.of_changes:
            sent, unsent, dropped = fed_back(into, memory, how)
            update = Payload(sent)
            digest = update.digest_like(start.digest)
            return Learned(took, update, digest, unsent, dropped, local, how)
        seed = work.seed if sends == "model" else None  # models are dithered, see core/bf16.py
        update = into if how.is_plain else Payload(how.encoded(into, seed=seed))
        digest = update.digest_like(start.digest)
        return Learned(took, update, digest, local=local, format=how)

    def measure(
        self, model: Model, local: Model | None, device: int
    ) -> tuple[int, dict[str, Sum]] | None:
        """Samples, sums and weights of a model's metrics on a device's test data; None: no data.

        ``local``: the device's local values; None: those of version 0, in ``model``.
        Raises the errors of :func:`fedstream.trainer.on_devices.sums_of`.
        """
        data = self.task.device_test_data(device)
        if data is None:
            return None
        return sums_of(self.task, self._loaded_with(model, local), placed(data, self._place))

    def _loaded_with(self, model: Model, local: Model | None) -> nn.Module:
        """The module with a model's values, and a device's own of local tensors."""
        vector.load(model, self._module)
        if local is not None:
            vector.load_part(local, self._module)
        return self._module

    def _loaded(self, device: int) -> Dataset[Any]:
        """The data of a device. Raises DataError if the data is empty, and the task's errors."""
        data = self.task.device_data(device)
        size_of(data, device)
        return placed(data, self._place)
