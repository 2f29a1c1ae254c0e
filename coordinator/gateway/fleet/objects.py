"""Flower's objects, the parts of a message on the wire, each named by its SHA-256. Pure.

An object is ``b"<kind> <ids of its parts> <length>\\0<body>"``. A message has one part, a
RecordDict, which has records by name. An ArrayRecord has arrays by name, and an Array has the
chunks of a file in numpy's format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fedstream.core.errors import DataError

CHUNK: Final = 5 << 20  # bytes of an array per object, as in Flower
_HEAD: Final = 1 << 20  # most bytes of a head


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
        """An object's kind, the ids of its parts, and its body. Raises DataError."""
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
