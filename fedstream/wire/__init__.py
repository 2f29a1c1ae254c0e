"""What a model or an update looks like on the wire and in the journal.

A format turns a model into bytes (:meth:`Format.encoded`) and bytes into a model
(:meth:`Format.decode`). Only the parameters are encoded; integers, floating-point buffers and
SCAFFOLD's control variates are sent as they are:

    int64[integers] ++ float32[buffers and controls] ++ the parameters, encoded

little-endian, all of it in one Zstandard frame if the format's name ends in ``+zstd``. The format
``f32`` without ``+zstd`` is the model's own bytes, with the parameters before the buffers.

Decoding is element-wise float32 arithmetic in a fixed order: the same bytes give the same bits on
every machine. Whatever a device sends is checked against the layout before it is used.
"""

from fedstream.wire.feedback import fed_back
from fedstream.wire.formats import ENCODINGS, F32, Encoding, Format, format_of, most_bytes
from fedstream.wire.refused import Undecodable

__all__ = [
    "ENCODINGS", "F32", "Encoding", "Format", "Undecodable", "fed_back", "format_of", "most_bytes",
]  # fmt: skip
