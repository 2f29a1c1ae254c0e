"""Encoding and decoding of models and updates in a run's wire formats.

Uses the formats' own code (:mod:`fedstream.core.formats`), as in a live run. ``f32`` costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedstream.core.errors import Undecodable
from fedstream.core.formats import fed_back
from fedstream.core.given import given
from fedstream.core.layout import Payload

if TYPE_CHECKING:
    from fedstream.core.layout import Floats, Model
    from fedstream.core.messages import Sends
    from fedstream.runtime.task_settings import WireSettings


class Transport:
    """The transport between server and devices, with the devices' error feedback.

    Error feedback (``int4``, ``topk``) takes the memory of a model's parameters for each device
    that has sent an update.
    """

    def __init__(self, settings: WireSettings, sends: Sends) -> None:
        self._sends, self._digests = sends, settings.digest
        self._updates = settings.of_updates
        self._models = replace(settings.of_models, zstd=False)  # decodes the same
        self._lost: dict[int, Floats] = {}
        self.update_bytes = 0
        """of all updates, as sent"""

    @property
    def copies(self) -> bool:
        """Whether devices get another model than the server's."""
        return not self._models.is_exact

    @property
    def remembering(self) -> int:
        """Devices with error feedback."""
        return len(self._lost)

    def publish(self, model: Model, version: int, into: Model) -> str:
        """Write a version's model as devices receive it; return its published digest.

        Raises Undecodable if the model can't be encoded because it is not finite.
        """
        one = given(model, self._models, version=version, sends=self._sends, digests=self._digests)
        self._models.decode(one.payload.buffer, into)
        return one.digest

    @property
    def format(self) -> str:
        """The name of the updates' format."""
        return self._updates.name

    def send(self, device: int, update: Model, seed: int) -> tuple[Payload, str]:
        """Replace ``update`` by its decoded form. Call it in the order of sending.

        ``seed``: of the task. Returns the sent payload, and the reason why it can't be decoded ('':
        it can); the values of ``update`` are then undefined.
        """
        how, refusal = self._updates, ""
        if how.is_plain:
            self.update_bytes += update.buffer.nbytes
            return update, refusal
        if how.of_changes:
            data, self._lost[device], _ = fed_back(update, self._lost.get(device), how)
        else:
            data = how.encoded(update, seed=seed if self._sends == "model" else None)
        self.update_bytes += data.nbytes
        try:
            how.decode(data, update)  # once more after feedback, which leaves infinities undecoded
        except Undecodable as error:
            refusal = error.reason
        return Payload(data), refusal
