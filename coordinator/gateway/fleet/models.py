"""Models as Flower's objects, and supernodes' replies as models and numbers. Pure.

Objects are the parts of a message on the wire. An object's name is the SHA-256 of its bytes:
``b"<kind> <ids of its parts> <length>\\0<body>"``. A message has one part, a RecordDict, which has
records by name. An ArrayRecord has arrays by name, and an Array has the chunks of a file in numpy's
format.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from fedstream.coordinator.gateway.fleet import protobuf
from fedstream.coordinator.gateway.fleet.files import ConfigScalar
from fedstream.core.errors import DataError
from fedstream.core.layout import Model
from fedstream.core.messages import METRIC_CHARS, METRICS
from fedstream.protocol.flower import loss_of, metrics_of, samples_of

if TYPE_CHECKING:
    from fedstream.core.layout import Layout, Tensor
    from fedstream.core.messages import Sum


RECORDS: Final = 64  # most records of a reply
_WIDENED = {"bfloat16": "float32"}  # numpy has no bfloat16
_NUMBERS = ("double", "sint64", "uint64")
_WIDEST = 16  # bytes of numpy's largest number type
_HEADER = 16 << 10  # most bytes before an array's numbers; numpy reads no more than 10,000
_ERROR = re.compile(r"<class '(?:[\w.]*\.)?(\w{1,80})'>")
CHUNK: Final = 5 << 20  # bytes of an array per object, as in Flower
_HEAD: Final = 1 << 20  # most bytes of a head


# objects


@dataclass(frozen=True)
class FlowerObject:
    """An object in its wire form, and its parts, each once."""

    id: str
    pieces: tuple[bytes | memoryview, ...]  # content; views share a model's bytes
    parts: tuple[FlowerObject, ...] = ()

    @property
    def content(self) -> bytes:
        """The object's bytes on the wire, as a copy."""
        return b"".join(self.pieces)

    def every(self) -> Iterator[FlowerObject]:
        """The object and all its parts, recursively."""
        for part in self.parts:
            yield from part.every()
        yield self


def packed(
    kind: str, body: bytes | Sequence[bytes | memoryview], parts: Sequence[FlowerObject] = ()
) -> FlowerObject:
    """Make an object; ``body``: whole, or in pieces that are not copied."""
    pieces = (body,) if isinstance(body, bytes) else tuple(body)
    once = {part.id: part for part in parts}
    size = sum(len(piece) for piece in pieces)
    head = b"%s %s %d\0" % (kind.encode(), ",".join(once).encode(), size)
    digest = hashlib.sha256(head)
    for piece in pieces:
        digest.update(piece)
    return FlowerObject(digest.hexdigest(), (head, *pieces), tuple(once.values()))


def refers(kind: str, parts: Mapping[str, FlowerObject]) -> FlowerObject:
    """Make an ArrayRecord or a RecordDict, with parts by name."""
    return packed(
        kind, json.dumps({n: one.id for n, one in parts.items()}).encode(), [*parts.values()]
    )


@dataclass
class Received:
    """Received objects by name, with unchecked content."""

    contents: dict[str, bytes] = field(default_factory=dict)

    def body(self, id_: str, *kinds: str) -> tuple[str, list[str], memoryview]:
        """Split an object into its kind, the ids of its parts, and its body. Raises DataError."""
        content = self.contents.get(id_)
        if content is None:
            raise DataError(f"object {id_[:64]!r} is missing")
        end = content.find(b"\0", 0, _HEAD)
        head = content[: max(end, 0)].decode("utf-8", "replace").split(" ")
        if len(head) != 3 or head[0] not in kinds:
            raise DataError(f"object {id_} is no {' or '.join(kinds)} of Flower's")
        return head[0], head[1].split(",") if head[1] else [], memoryview(content)[end + 1 :]

    def named(self, id_: str, kind: str) -> dict[str, str]:
        """The ids of the parts of an ArrayRecord or a RecordDict, by name. Raises DataError."""
        found = self.json(id_, kind)
        if not all(isinstance(one, str) for one in found.values()):
            raise DataError(f"object {id_}: its parts are not named")
        return found

    def json(self, id_: str, kind: str) -> dict[str, Any]:
        """Parse an object's body as JSON. Raises DataError."""
        _, _, body = self.body(id_, kind)
        try:
            found = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise DataError(f"object {id_} of kind {kind}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"object {id_} of kind {kind}: no JSON object")
        return found

    def array(self, id_: str, most: int) -> bytes:
        """Join the chunks of an Array. Raises DataError above ``most`` bytes.

        The limit is needed because an array may name the same chunk many times.
        """
        places = self.json(id_, "Array").get("arraychunk_ids")
        _, chunks, _ = self.body(id_, "Array")
        if not isinstance(places, list) or not all(
            isinstance(one, int) and 0 <= one < len(chunks) for one in places
        ):
            raise DataError(f"array {id_}: its chunks can't be put in order")
        bodies = [self.body(one, "ArrayChunk")[2] for one in chunks]
        size = sum(bodies[one].nbytes for one in places)
        if size > most:
            raise DataError(f"array {id_} has {size} bytes: expected at most {most}")
        return b"".join(bodies[one] for one in places)


# sent to a supernode


def is_in_order(layout: Layout) -> bool:
    """Whether the layout has the order of ``state_dict()``, as clients without names need."""
    return not layout.integers and layout.floats == layout.parameters


def memory_of(layout: Layout) -> int:
    """The approximate bytes of a model with its Flower objects.

    Objects are views of the model's bytes, except arrays that Flower gets in another dtype.
    """
    copied = 0
    for tensor in layout.tensors:
        own = np.float32 if _is_float(tensor) else np.int64
        dtype = _given_as(tensor)
        copied += 0 if dtype == own else tensor.count * dtype.itemsize
    return layout.nbytes + copied


def arrays_of(model: Model) -> FlowerObject:
    """A model as an ArrayRecord of views of the model, which must not change."""
    return refers(
        "ArrayRecord", {tensor.name: _array(tensor, values) for tensor, values in _views(model)}
    )


def _views(model: Model) -> Iterator[tuple[Tensor, npt.NDArray[Any]]]:
    """Each tensor's values, as views into the model."""
    at = {True: 0, False: 0}
    for tensor in model.layout.tensors:
        is_float = _is_float(tensor)
        vector: npt.NDArray[Any] = model.floats if is_float else model.integers
        begin = at[is_float]
        at[is_float] = begin + tensor.count
        yield tensor, vector[begin : begin + tensor.count].reshape(tensor.shape)


def _given_as(tensor: Tensor) -> np.dtype[Any]:
    return np.dtype(_WIDENED.get(tensor.dtype, tensor.dtype))


def _is_float(tensor: Tensor) -> bool:
    return tensor.kind in ("parameter", "buffer", "control")


def _cut(file: list[memoryview]) -> Iterator[list[memoryview]]:
    """Split a file into chunks of Flower's length, each a list of pieces."""
    chunk: list[memoryview] = []
    room = CHUNK
    for part in file:
        rest = part
        while rest:
            chunk.append(rest[:room])
            room -= len(chunk[-1])
            rest = rest[len(chunk[-1]) :]
            if not room:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


def _array(tensor: Tensor, values: npt.NDArray[Any]) -> FlowerObject:
    dtype = _given_as(tensor)
    given = np.asarray(values, dtype)
    file = io.BytesIO()
    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(given))
    data = given.reshape(-1).view(np.uint8).data
    if given.dtype != values.dtype:
        data = memoryview(data.tobytes())
    pieces = list(_cut([memoryview(file.getvalue()), data]))
    chunks = [packed("ArrayChunk", piece) for piece in pieces]
    places = {one: number for number, one in enumerate(dict.fromkeys(one.id for one in chunks))}
    about = {
        "dtype": str(dtype),
        "shape": list(tensor.shape),
        "stype": "numpy.ndarray",
        "arraychunk_ids": [places[one.id] for one in chunks],
    }
    return packed("Array", json.dumps(about).encode(), chunks)


def content_of(
    arrays: FlowerObject, config: Mapping[str, ConfigScalar], *, ins: str, unnamed: bool
) -> FlowerObject:
    """The content of a message to a client, a RecordDict. ``ins``: "fitins" or "evaluateins".

    ``unnamed``: also include the records under the names that a NumPyClient expects; such a client
    gets arrays without names. Objects that occur twice are sent once.
    """
    items = [protobuf.message("Item", key=key, value=_value(one)) for key, one in config.items()]
    settings = packed("ConfigRecord", protobuf.message("Values", items=items).SerializeToString())
    records = {"arrays": arrays, "config": settings}
    if unnamed:
        records |= {f"{ins}.parameters": arrays, f"{ins}.config": settings}
    return refers("RecordDict", records)


def _value(value: ConfigScalar) -> Any:
    if isinstance(value, bool):
        return protobuf.message("Value", bool=value)
    kinds = {int: "sint64", float: "double", str: "string"}
    return protobuf.message("Value", **{kinds[type(value)]: value})


# replied by a supernode


@dataclass(frozen=True)
class FlowerReply:
    """A supernode's reply to a train message."""

    model: Model
    samples: int
    loss: float | None


def reply_of(received: Received, message: str, layout: Layout, who: str) -> FlowerReply:
    """Parse a reply from its received objects; ``message``: id of the topmost object.

    Raises DataError, naming ``who``, if the reply is no update of a model with this layout. Accepts
    values that are not finite: the updater refuses and counts them.
    """
    arrays, numbers = _records(received, message, who)
    if "arrays" not in arrays and len(arrays) != 1:
        raise DataError(f"{who} returned {len(arrays)} array records: expected one, named 'arrays'")
    record = arrays["arrays"] if "arrays" in arrays else next(iter(arrays.values()))
    model = Model(layout)
    _fill(model, received, record, who)
    loss = loss_of(numbers)
    samples = _samples(numbers, who)
    return FlowerReply(model, samples, loss if loss is not None and math.isfinite(loss) else None)


def metrics_of_reply(received: Received, message: str, who: str) -> tuple[int, dict[str, Sum]]:
    """Parse a reply to an evaluate message: the samples, and each metric's sum and weight.

    Raises DataError, naming ``who``.
    """
    _, numbers = _records(received, message, who)
    samples = _samples(numbers, who)
    metrics = metrics_of(numbers)
    if len(metrics) > METRICS or not all(1 <= len(name) <= METRIC_CHARS for name in metrics):
        raise DataError(
            f"{who} returned {len(metrics)} metrics: expected at most {METRICS}, with names of at "
            f"most {METRIC_CHARS} characters"
        )
    return samples, {name: (mean * samples, float(samples)) for name, mean in metrics.items()}


def _samples(numbers: Mapping[str, float], who: str) -> int:
    samples = samples_of(numbers, who)
    if samples >= 1 << 53:
        raise DataError(f"{who} reported num-examples = {samples}: that is no number of examples")
    return samples


def _records(received: Received, message: str, who: str) -> tuple[dict[str, str], dict[str, float]]:
    """The ids of a reply's array records by name, and its numbers by name. Raises DataError."""
    _, contents, _ = received.body(message, "Message")
    if len(contents) != 1:
        raise DataError(f"{who} replied without content")
    records = received.named(contents[0], "RecordDict")
    if len(records) > RECORDS:
        raise DataError(f"{who} returned {len(records)} records: expected at most {RECORDS}")
    arrays: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for name, id_ in records.items():
        kind, _, body = received.body(id_, "ArrayRecord", "MetricRecord", "ConfigRecord")
        if kind == "ArrayRecord":
            arrays[name] = id_
        elif not name.endswith("res.status"):
            numbers |= _numbers(body)
        elif code := _numbers(body).get("code"):  # status code of a NumPyClient; 0 is OK
            raise DataError(f"{who} answered with status {code}")
    return arrays, numbers


def _numbers(body: memoryview) -> dict[str, float]:
    """All single numbers of a MetricRecord or a ConfigRecord, by name."""
    found: dict[str, float] = {}
    for item in protobuf.parsed("Values", body).items:
        for kind in _NUMBERS:
            if item.value.HasField(kind):
                found[item.key] = getattr(item.value, kind)
    return found


def _fill(model: Model, received: Received, record: str, who: str) -> None:
    """Copy arrays into a model by name, or by position if they are only numbered."""
    given = received.named(record, "ArrayRecord")
    names = [tensor.name for tensor in model.layout.tensors]
    if [*given] == [str(n) for n in range(len(given))] and [*given] != names:
        if len(given) != len(names) or not is_in_order(model.layout):
            raise DataError(
                f"{who} returned {len(given)} arrays without names, for a model of {len(names)}"
            )
        given = dict(zip(names, given.values(), strict=True))
    if missing := [name for name in names if name not in given]:
        raise DataError(f"{who} returned no array {missing[0]!r}, which the model has")
    if unknown := given.keys() - {*names}:
        raise DataError(f"{who} returned an array {min(unknown)[:80]!r}, which the model lacks")
    for tensor, values in _views(model):
        most = tensor.count * _WIDEST + _HEADER
        values[...] = _read(received.array(given[tensor.name], most), tensor, who)


def _read(data: bytes, tensor: Tensor, who: str) -> npt.NDArray[Any]:
    """Parse an array in numpy's format, checking its header before allocating anything."""
    what = f"{who}: array {tensor.name!r}"
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = header(file)
    except (ValueError, TypeError, EOFError) as error:
        raise DataError(f"{what} cannot be read: {error}") from error
    if shape != tensor.shape:
        raise DataError(f"{what} has shape {shape}, in the model it has {tensor.shape}")
    is_float = _is_float(tensor)
    if dtype.kind not in "fiub" or (dtype.kind == "f") != is_float:
        raise DataError(f"{what} is of dtype {dtype}, in the model it is of {tensor.dtype}")
    if len(data) - file.tell() != tensor.count * dtype.itemsize:
        raise DataError(f"{what} has {len(data)} bytes, which do not fit its shape")
    flat: npt.NDArray[Any] = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def error_of(reason: str) -> str:
    """The reason to give up a task, from the reason in an error reply."""
    found = _ERROR.match(reason)
    return f"raised {found[1] if found else 'ClientAppError'}"
