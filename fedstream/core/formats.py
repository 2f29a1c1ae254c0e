"""Wire formats: encodings of models and updates on the wire and in the journal.

A format turns a model into bytes (:meth:`Format.encoded`) and bytes into a model
(:meth:`Format.decode`). Only the parameters are encoded; integers, floating-point buffers and
SCAFFOLD's control variates are sent unchanged:

    int64[integers] ++ float32[buffers and controls] ++ the parameters, encoded

little-endian, all of it in one Zstandard frame if the format's name ends in ``+zstd``. The format
``f32`` without ``+zstd`` is the model's own bytes, with the parameters before the buffers.

Decoding is element-wise float32 arithmetic in a fixed order: the same bytes give the same bits on
every machine. Whatever a device sends is checked against the layout before it is used.

The formats by name: ``f32``, ``bf16``, ``int8``, ``int4``, ``topk:0.1``; each also ``+zstd``.
Besides these, ``mask16``, ``mask24`` and ``mask32``: masked updates (:mod:`fedstream.private`).
They decode to 32-bit words in place of the parameters, and mean nothing but in a sum.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedstream.core import bf16, blocks, compressed, reasons, sparse, words
from fedstream.core.bf16 import Dither
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.core.layout import Floats, Layout, Model

Encoding = Literal["f32", "bf16", "int8", "int4", "topk", "mask"]
ENCODINGS: tuple[Encoding, ...] = ("f32", "bf16", "int8", "int4", "topk")  # of whole models

_NAME = re.compile(r"(f32|bf16|int8|int4|topk:(0\.[0-9]{1,9}|1))(\+zstd)?")
_MASKED = re.compile(r"mask(16|24|32)")
# Largest norm of error feedback, as a multiple of the update's norm divided by the share sent. The
# feedback of updates of equal norm has at most 2 times (Error Feedback Fixes SignSGD, Karimireddy
# et al. 2019, lemma 3); larger feedback comes from an outlier, which its receiver refused.
_MOST = 10.0


@dataclass(frozen=True, slots=True)
class Format:
    """One wire format."""

    kind: Encoding = "f32"
    share: float = 1.0  # share of the parameters that ``topk`` keeps; 0 < share <= 1, nine digits
    zstd: bool = False
    word_bits: words.WordBits = 32  # of ``mask``

    @property
    def name(self) -> str:
        """The format's name, which :func:`format_of` parses."""
        if self.kind == "mask":
            return f"mask{self.word_bits}"
        share = f":{self.share:.9f}".rstrip("0").rstrip(".") if self.kind == "topk" else ""
        return f"{self.kind}{share}{'+zstd' if self.zstd else ''}"

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the model's own."""
        return self.kind == "f32" and not self.zstd

    @property
    def is_exact(self) -> bool:
        """Whether decoding restores the exact model."""
        return self.kind == "f32"

    @property
    def is_masked(self) -> bool:
        """Whether the bytes are a masked update's, which only a sum gives a meaning."""
        return self.kind == "mask"

    @property
    def of_changes(self) -> bool:
        """Whether the format is fit only for deltas, being too coarse for models."""
        return self.kind in ("int4", "topk")

    def sizes(self, layout: Layout) -> tuple[int, int]:
        """The fewest and the most bytes of a model of this layout."""
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
            case "mask":
                least = most = self.word_bits // 8 * count
            case "topk":
                least, most = sparse.nbytes_between(count, self.share)
        return as_it_is + least, as_it_is + most

    def encoded(
        self, model: Model, *, seed: int | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The model's bytes in this format; a view of the model's own if :attr:`is_plain`.

        ``seed``: for stochastic rounding (:mod:`fedstream.core.bf16`) in bf16, int8 and int4; None:
        round to nearest. ``into``: memory for exactly these bytes, in bf16, int8 and int4 without
        Zstandard; None: new memory.

        Values that are not finite stay so, or make their block's scale not finite, so that the
        receiver refuses them.
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

        Raises Undecodable, with the reason to refuse the bytes; the model's values are then
        undefined. The decoded values may be not finite: the caller must check them.
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
            case "mask":
                words.unpack(data[begin:], self.word_bits, into.parameters.view(np.uint32))
            case "topk":
                sparse.decode(data[begin:], self.share, into.parameters)


F32 = Format()


def most_bytes(layout: Layout) -> int:
    """The most bytes of a model of this layout in any format."""
    return max(Format(kind, zstd=True).sizes(layout)[1] for kind in ENCODINGS)


@lru_cache(64)
def format_of(name: str) -> Format:
    """Parse a format's name. Raises Undecodable for an unknown name."""
    if masked := _MASKED.fullmatch(name):
        bits = next(bits for bits in words.WORD_BITS if str(bits) == masked[1])
        return Format("mask", word_bits=bits)
    found = _NAME.fullmatch(name)
    share = float(found[2] or 1) if found else math.nan
    if found is None or not share > 0:
        raise Undecodable(
            reasons.WIRE_FORMAT, f"{name:.40} is none of ours: {', '.join(ENCODINGS)}"
        )
    kind = next(kind for kind in ENCODINGS if found[1].startswith(kind))
    return Format(kind, share, found[3] is not None)


def _as_it_is(layout: Layout) -> int:
    """Bytes of the parts that are never encoded: integers, buffers and controls."""
    return 8 * layout.integers + 4 * (layout.floats - layout.parameters)


class FedBack(NamedTuple):
    """An encoded update, and its error feedback."""

    data: npt.NDArray[np.uint8]
    lost: Floats  # accumulated encoding error, for the device's next update
    dropped: bool  # whether the previous feedback was too large to be added


def fed_back(update: Model, memory: Floats | None, how: Format) -> FedBack:
    """Encode an update with error feedback: add the device's accumulated encoding error first.

    *Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), algorithm 1, lines 4 to 6.

    ``update``: its parameters are replaced by the decoded ones. ``memory``: accumulated error, one
    value per parameter; None: zero. The memory is dropped if it is far larger than the update. If
    the update is not finite, its receiver refuses it, and the memory stays unchanged.
    """
    known = memory
    if memory is not None and not _norm(memory) <= _MOST / how.share * _norm(update.parameters):
        memory = None
    dropped = known is not memory
    if memory is not None:
        update.parameters[:] += memory
    wanted = update.parameters.copy()
    data = how.encoded(update)
    if np.isfinite(wanted).all():
        how.decode(data, update)
        lost = np.subtract(wanted, update.parameters, out=wanted)
        if np.isfinite(lost).all():  # else the receiver refuses an infinite value
            return FedBack(data, lost, dropped)
    return FedBack(data, memory if memory is not None else np.zeros_like(wanted), dropped)


def _norm(values: Floats) -> float:
    return float(np.linalg.norm(values))
