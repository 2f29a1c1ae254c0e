"""The models x_tau that a journal's updates were trained from, as the devices received them.

An update names its x_tau by version and digest. Reading a journal from its beginning passes every
version, so only the versions that later updates were trained from must be kept: as many as devices
trained at the same time, for any length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fedstream.core.digest import algorithm_of
from fedstream.core.errors import FedstreamError
from fedstream.core.formats import F32, Format
from fedstream.core.given import given
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Sends, Upload
from fedstream.strategies.vectors import IN_MEMORY, on_disk


class BaseModels:
    """Keeps each version until the last update trained from it.

    ``uploads``: the later updates, each of which is passed to :meth:`of` once, in any order. Models
    beyond ``in_memory`` bytes are in unnamed temporary files (in ``TMPDIR``).
    """

    def __init__(self, uploads: Iterable[Upload], *, in_memory: int = IN_MEMORY) -> None:
        self._uses = Counter(upload.tau for upload in uploads)  # later updates by version
        self._kept: dict[int, tuple[str, Model]] = {}  # version -> digest and model
        self._free: list[Model] = []
        self._lent: list[Model] = []  # returned last, and reusable afterwards
        self._in_memory = in_memory
        self._bytes = 0  # allocated

    @property
    def oldest(self) -> int | None:
        """The oldest version that a later update was trained from."""
        return min(self._uses, default=None)

    def add(
        self, version: int, digest: str, model: Model, how: Format = F32, sends: Sends = "model"
    ) -> None:
        """Copy a version as published, if a later update was trained from it.

        ``digest``: of the float32 model. ``how``: the format of publication. ``sends``: whether the
        strategy takes models or deltas. Raises FedstreamError.

        Replaces an earlier model of the same version, as after an adoption from Redis.
        """
        if version not in self._uses:
            return
        _, copied = self._kept.pop(version, ("", None))
        copied = copied or (self._free.pop() if self._free else self._allocated(model.layout))
        if how.is_exact:
            copied.buffer[:] = model.buffer
        else:
            one = given(model, how, version=version, sends=sends, digests=algorithm_of(digest))
            how.decode(one.payload.buffer, copied)
            digest = one.digest
        self._kept[version] = digest, copied

    def of(self, upload: Upload) -> Model | None:
        """x_tau of an update, valid until the next call; None if the journal lacks it."""
        self._free += self._lent
        self._lent = []
        digest, model = self._kept.get(upload.tau, ("", None))
        self._uses[upload.tau] -= 1
        if self._uses[upload.tau] <= 0:
            del self._uses[upload.tau]
            if model is not None:
                del self._kept[upload.tau]
                self._lent = [model]
        return model if digest == upload.base else None

    def _allocated(self, layout: Layout) -> Model:
        self._bytes += layout.nbytes
        if self._bytes <= self._in_memory or not layout.nbytes:
            return Model(layout)
        try:
            return Model(layout, on_disk(layout.nbytes))
        except OSError as error:
            raise FedstreamError(
                f"no room for {len(self._kept) + 1} models that updates were trained from, "
                f"{layout.nbytes} bytes each: {error.strerror}: set TMPDIR to a folder with enough "
                "space"
            ) from error
