"""Flower's objects: what a message consists of on the wire, each named by its SHA-256. Pure.

An object is ``b"<kind> <ids of its parts> <length>\\0<body>"``. A message has one part, a
RecordDict; that has records by name; an ArrayRecord has arrays by name, and an Array has chunks of
a file in numpy's format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fedstream.core.errors import DataError

CHUNK: Final = 5 << 20  # bytes of an array in one object, as Flower has it
_HEAD: Final = 1 << 20  # longest that a head may be, in bytes


@dataclass(frozen=True)
class FlowerObject:
    """An object as it travels, and its parts, each once."""

    id: str
    pieces: tuple[bytes | memoryview, ...]  # of its content; views are a model's own bytes
    parts: tuple[FlowerObject, ...] = ()

    @property
    def content(self) -> bytes:
        """What travels, made anew."""
        return b"".join(self.pieces)

    def every(self) -> Iterator[FlowerObject]:
        """The object and all that it consists of."""
        for part in self.parts:
            yield from part.every()
        yield self


def packed(
    kind: str, body: bytes | Sequence[bytes | memoryview], parts: Sequence[FlowerObject] = ()
) -> FlowerObject:
    """An object of this kind; ``body``: all of it, or in pieces, which are kept as they are."""
    pieces = (body,) if isinstance(body, bytes) else tuple(body)
    once = {part.id: part for part in parts}
    size = sum(len(piece) for piece in pieces)
    head = b"%s %s %d\0" % (kind.encode(), ",".join(once).encode(), size)
    digest = hashlib.sha256(head)
    for piece in pieces:
        digest.update(piece)
    return FlowerObject(digest.hexdigest(), (head, *pieces), tuple(once.values()))


def refers(kind: str, parts: Mapping[str, FlowerObject]) -> FlowerObject:
    """An ArrayRecord or a RecordDict: parts by name."""
    return packed(
        kind, json.dumps({n: one.id for n, one in parts.items()}).encode(), [*parts.values()]
    )


@dataclass
class Received:
    """Objects as they arrived: nothing about them is known but their names."""

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
        """An object's body, which is JSON. Raises DataError."""
        _, _, body = self.body(id_, kind)
        try:
            found = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise DataError(f"object {id_} of kind {kind}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"object {id_} of kind {kind}: no JSON object")
        return found

    def array(self, id_: str, most: int) -> bytes:
        """The bytes of an Array, from its chunks. Raises DataError if there are more than ``most``.

        A chunk may be there many times, so few bytes can stand for any number.
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
