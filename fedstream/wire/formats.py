"""The formats by name: ``f32``, ``bf16``, ``int8``, ``int4``, ``topk:0.1``; each also ``+zstd``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from fedstream.broker import reasons
from fedstream.wire import bf16, blocks, compressed, sparse
from fedstream.wire.dither import Dither
from fedstream.wire.refused import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.broker.layout import Layout, Model

Encoding = Literal["f32", "bf16", "int8", "int4", "topk"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

_NAME = re.compile(r"(f32|bf16|int8|int4|topk:(0\.[0-9]{1,9}|1))(\+zstd)?")


@dataclass(frozen=True, slots=True)
class Format:
    """What models look like as bytes."""

    kind: Encoding = "f32"
    share: float = 1.0  # of the parameters that ``topk`` keeps; 0 < share <= 1, nine digits
    zstd: bool = False

    @property
    def name(self) -> str:
        """The format as :func:`format_of` reads it."""
        share = f":{self.share:.9f}".rstrip("0").rstrip(".") if self.kind == "topk" else ""
        return f"{self.kind}{share}{'+zstd' if self.zstd else ''}"

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the model's own."""
        return self.kind == "f32" and not self.zstd

    @property
    def is_exact(self) -> bool:
        """Whether a model is decoded as it was."""
        return self.kind == "f32"

    @property
    def of_changes(self) -> bool:
        """Whether the format is too coarse for models: fit only for what changed in them."""
        return self.kind in ("int4", "topk")

    def sizes(self, layout: Layout) -> tuple[int, int]:
        """The fewest and the most bytes that a model of this layout takes."""
        least, most = self._sizes(layout)
        return (1, compressed.most(most)) if self.zstd else (least, most)

    def _sizes(self, layout: Layout) -> tuple[int, int]:
        as_it_is, count = _as_it_is(layout), layout.parameters
        match self.kind:
            case "f32":
                least = most = 4 * count
            case "bf16":
                least = most = bf16.nbytes(count)
            case "int8":
                least = most = blocks.nbytes(count, 8)
            case "int4":
                least = most = blocks.nbytes(count, 4)
            case "topk":
                least, most = sparse.nbytes_between(count, self.share)
        return as_it_is + least, as_it_is + most

    def encoded(
        self, model: Model, *, seed: int | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The model's bytes in this format; a view of the model's own if :attr:`is_plain`.

        ``seed``: of the numbers to round by (:mod:`fedstream.wire.dither`), in bf16, int8 and int4;
        None: rounded to nearest. ``into``: room for exactly these bytes, in bf16, int8 and int4
        without Zstandard; None: new memory.

        Values that are not finite stay so, or make their block's scale so: their receiver refuses
        them.
        """
        data = self._encoded(model, None if seed is None else Dither(seed), into)
        return compressed.encode(data) if self.zstd else data

    def _encoded(
        self, model: Model, dither: Dither | None, data: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        if self.kind == "f32":
            return model.buffer
        layout, values = model.layout, model.parameters
        if self.kind == "topk":
            kept = sparse.encode(values, self.share)
            data = np.empty(_as_it_is(layout) + kept.size, np.uint8)
            data[_as_it_is(layout) :] = kept
        else:
            if data is None:
                data = np.empty(self._sizes(layout)[1], np.uint8)
            into = data[_as_it_is(layout) :]
            if self.kind == "bf16":
                bf16.encode(values, into, dither)
            else:
                blocks.encode(values, 8 if self.kind == "int8" else 4, into, dither)
        split = 8 * layout.integers
        data[:split] = model.buffer[:split]
        data[split : _as_it_is(layout)] = model.floats[layout.parameters :].view(np.uint8)
        return data

    def decode(self, data: npt.NDArray[np.uint8], into: Model) -> None:
        """Write the model that ``data`` encodes into a model of the same layout.

        Raises Undecodable, with the reason to refuse it; the model's values are then undefined.
        Values that are not finite are decoded: check them as in any model.
        """
        least, most = self._sizes(into.layout)
        if self.zstd:
            data = compressed.decode(data, most)
        if not least <= data.size <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise Undecodable(
                reasons.WIRE_LENGTH, f"{data.size} bytes in {self.name}; a model takes {wanted}"
            )
        if self.kind == "f32":
            into.buffer[:] = data
            return
        layout = into.layout
        split, begin = 8 * layout.integers, _as_it_is(layout)
        into.buffer[:split] = data[:split]
        into.floats[layout.parameters :].view(np.uint8)[:] = data[split:begin]
        match self.kind:
            case "bf16":
                bf16.decode(data[begin:], into.parameters)
            case "int8":
                blocks.decode(data[begin:], 8, into.parameters)
            case "int4":
                blocks.decode(data[begin:], 4, into.parameters)
            case "topk":
                sparse.decode(data[begin:], self.share, into.parameters)


F32 = Format()


def most_bytes(layout: Layout) -> int:
    """The most bytes that a model of this layout takes in any format."""
    return max(Format(kind, zstd=True).sizes(layout)[1] for kind in ENCODINGS)


@lru_cache(64)
def format_of(name: str) -> Format:
    """The format with this name. Raises Undecodable for any other text."""
    found = _NAME.fullmatch(name)
    share = float(found[2] or 1) if found else math.nan
    if found is None or not share > 0:
        raise Undecodable(
            reasons.WIRE_FORMAT, f"{name:.40} is none of ours: {', '.join(ENCODINGS)}"
        )
    kind = next(kind for kind in ENCODINGS if found[1].startswith(kind))
    return Format(kind, share, found[3] is not None)


def _as_it_is(layout: Layout) -> int:
    """Bytes of what is never encoded: integers, buffers and controls."""
    return 8 * layout.integers + 4 * (layout.floats - layout.parameters)
