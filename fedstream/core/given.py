"""Published models x_tau, in the wire format in which devices receive them.

The updater keeps its versions in float32 and encodes each of them anew, so encoding errors don't
accumulate. QAFeL (*Asynchronous Federated Learning with Bidirectional Quantized Communications and
Buffered Aggregation*, Ortega and Jafarkhani 2023) sends quantised differences, which devices add
up, and therefore needs a hidden state shared by server and devices; whole models need none.

For a strategy that takes models, the devices' models contain the encoding error of x_tau, which
rounding to nearest would never let shrink. So the versions of such a strategy are rounded
stochastically, seeded by the version's number, with zero error in the mean
(:mod:`fedstream.core.bf16`). Strategies that take deltas don't have this problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedstream.core import compressed
from fedstream.core.digest import DigestAlgorithm, algorithm_of, digest_of
from fedstream.core.errors import BlobDamaged, Unavailable, Undecodable
from fedstream.core.formats import format_of
from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from fedstream.core.formats import Format
    from fedstream.core.messages import Sends


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A published model's bytes and description."""

    payload: Payload
    encoded: Encoded | None  # None: the model itself
    digests: DigestAlgorithm

    @property
    def digest(self) -> str:
        """The digest by which devices request the model."""
        return self.encoded.digest if self.encoded else self.payload.digest(self.digests)


def given(
    model: Model,
    how: Format,
    room: Callable[[int], Payload] = Payload.empty,
    *,
    version: int,
    sends: Sends,
    digests: DigestAlgorithm,
) -> GivenModel:
    """Encode the model of a version in format ``how``; a plain format shares the model's memory.

    ``room``: allocates the payload if needed. ``sends``: whether the run's strategy takes models
    or deltas. ``digests``: the run's digest algorithm.
    """
    if how.is_plain:
        return GivenModel(model, None, digests)
    seed = version if sends == "model" else None
    bare = replace(how, zstd=False)
    if how.zstd:
        data = bare.encoded(model, seed=seed)
        payload, digest = Payload(compressed.encode(data)), digest_of(data.data, digests)
    else:
        payload = room(bare.sizes(model.layout)[1])
        bare.encoded(model, seed=seed, into=payload.buffer)
        digest = payload.digest(digests)
    return GivenModel(payload, Encoded(how.name, payload.buffer.nbytes, digest), digests)


def room_for(encoded: Encoded, layout: Layout) -> Payload:
    """A payload to read an encoded model into.

    Raises Unavailable for another release's format, BlobDamaged for an impossible size.
    """
    try:
        how = format_of(encoded.format)
    except Undecodable as error:
        raise Unavailable(
            f"models are published in the format {encoded.format:.40}, which this release of "
            "fedstream does not know: upgrade this service"
        ) from error
    least, most = how.sizes(layout)
    if not least <= encoded.size <= most:
        raise BlobDamaged(f"a model in {how.name} has {encoded.size} bytes, not {least} to {most}")
    return Payload.empty(encoded.size)


def decode(payload: Payload, encoded: Encoded, into: Model) -> None:
    """Decode a published model into ``into``, with the same bits as every device.

    Checks the digest of a compressed model, which covers the decompressed bytes; for other models,
    :func:`fedstream.broker.blobs.read` has checked the digest. Raises BlobDamaged if the digest
    differs, and Unavailable if the model can't be decoded.
    """
    try:
        data = inside(payload, encoded, into.layout)
        replace(format_of(encoded.format), zstd=False).decode(data, into)
    except Undecodable as error:  # such as a scale that is infinite; the next version may be sound
        raise Unavailable(f"the published model can't be decoded: {error}") from error


def inside(payload: Payload, encoded: Encoded, layout: Layout) -> npt.NDArray[np.uint8]:
    """The bytes that an encoded model's digest covers, decompressed if necessary.

    Raises BlobDamaged if the digest of decompressed bytes differs, and Undecodable for a bad frame.
    """
    how = format_of(encoded.format)
    if not how.zstd:
        return payload.buffer
    data = compressed.decode(payload.buffer, replace(how, zstd=False).sizes(layout)[1])
    if (own := digest_of(data.data, algorithm_of(encoded.digest))) != encoded.digest:
        raise BlobDamaged(f"a model in a frame has digest {own}, expected {encoded.digest}")
    return data
