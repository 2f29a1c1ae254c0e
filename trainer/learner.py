"""The user's task at work: the module, the devices' data, and training from a start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from fedstream.broker.layout import Payload
from fedstream.trainer import vector
from fedstream.trainer.answer import as_sent
from fedstream.trainer.data import size_of
from fedstream.trainer.placement import Processor, check, placed
from fedstream.trainer.task import untrained
from fedstream.wire import F32, fed_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import Dataset

    from fedstream.broker.layout import Floats, Model
    from fedstream.broker.messages import Sends
    from fedstream.trainer.solvers import Trained, Work
    from fedstream.trainer.start import Start
    from fedstream.trainer.task import Task
    from fedstream.wire import Format

_PARTITIONS_KEPT = 64  # devices' data sets kept open


@dataclass(frozen=True)
class Learned:
    """What training came to: the update, ready for upload, and its numbers."""

    trained: Trained
    update: Payload  # in its wire format
    digest: str
    unsent: Floats | None = None  # of the parameters, as it was encoded; None: not fed back
    dropped: bool = False  # what the device's last one left unsent was too large to be added


class Learner:
    """The task, its module and its data. Creating it loads them; only one thread may use it."""

    def __init__(self, load: Callable[[], Task], threads: int, place: Processor) -> None:
        check("trainer.device", place)
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = True  # redoing a task gives the same bits
        self.task = task = load()
        self._module = untrained(task).to(place)
        self.layout = vector.layout_of(self._module)
        self._place = place
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
        """Train from x_tau; ``into`` becomes the update, which is encoded as ``how`` says.

        ``memory``: what the device's last update left unsent; None: nothing.
        """
        vector.load(start.model, self._module)
        trained = self.task.train(self._module, self._data(work.device), work)
        vector.read(self._module, into)
        took = as_sent(
            trained, into, start.model, start.device_control, sends, work.solver.compression
        )
        if how.of_changes:
            sent, unsent, dropped = fed_back(into, memory, how)
            update = Payload(sent)
            return Learned(took, update, update.digest_like(start.digest), unsent, dropped)
        seed = work.seed if sends == "model" else None  # a model needs wire/dither.py
        update = into if how.is_plain else Payload(how.encoded(into, seed=seed))
        return Learned(took, update, update.digest_like(start.digest))

    def _loaded(self, device: int) -> Dataset[Any]:
        """A device's data. Raises DataError if there are none; whatever the task raises."""
        data = self.task.device_data(device)
        size_of(data, device)
        return placed(data, self._place)
