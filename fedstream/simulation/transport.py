"""What devices get of a model, and the server of an update, in the wire formats of a run.

Both are encoded and decoded by the formats' own code (:mod:`fedstream.core.formats`), as in a live
run. A format that is not switched on costs nothing.
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
    """The way between server and devices, with the devices' error feedback.

    Error feedback (``int4``, ``topk``) takes the memory of a model's parameters for each device
    that has sent an update.
    """

    def __init__(self, settings: WireSettings, sends: Sends) -> None:
        self._sends, self._digests = sends, settings.digest
        self._updates = settings.of_updates
        self._models = replace(settings.of_models, zstd=False)  # devices get the same without
        self._lost: dict[int, Floats] = {}
        self.update_bytes = 0
        """of all updates, as sent"""

    @property
    def copies(self) -> bool:
        """Whether devices get something else than the server's model."""
        return not self._models.is_exact

    @property
    def remembering(self) -> int:
        """Devices with error feedback."""
        return len(self._lost)

    def publish(self, model: Model, version: int, into: Model) -> str:
        """Write what devices get of a version; returns the digest by which they know it.

        Raises Undecodable if the model can't be encoded because it is not finite.
        """
        one = given(model, self._models, version=version, sends=self._sends, digests=self._digests)
        self._models.decode(one.payload.buffer, into)
        return one.digest

    @property
    def format(self) -> str:
        """The name of the format that updates are sent in."""
        return self._updates.name

    def send(self, device: int, update: Model, seed: int) -> tuple[Payload, str]:
        """Turn ``update`` into what its receiver decodes; to be called in the order of sending.

        ``seed``: of the task. Returns what is sent, and the reason for which it can't be decoded:
        then the values of ``update`` are undefined. '' if it can.
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
