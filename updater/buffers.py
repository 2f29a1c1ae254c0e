"""Memory to reuse, for models and for what is encoded in a wire format.

The system fills new memory with zeros, page by page, as it is first written to.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedstream.core.layout import Layout, Model, Payload

# Encoded ones kept: two updates, the version being published, and the one being made.
_ENCODED = 4


class BufferPool:
    """Models and encoded ones that nobody uses. Only one thread at a time may take any."""

    def __init__(self) -> None:
        self.models: list[Model] = []
        self.encoded: list[Payload] = []  # the one given back last is the last

    def model(self, layout: Layout) -> Model:
        """A model to write into."""
        return self.models.pop() if self.models else Model(layout)

    def room(self, size: int) -> Payload:
        """Room for ``size`` bytes in a wire format."""
        for at, one in enumerate(self.encoded):
            if one.buffer.nbytes == size:
                return self.encoded.pop(at)
        return Payload.empty(size)

    def give_back(self, one: Payload) -> None:
        """Keep what is no longer used."""
        if isinstance(one, Model):
            self.models.append(one)
        else:
            self.encoded.append(one)
            del self.encoded[:-_ENCODED]

    def take_back(self, used: Iterable[Payload], in_use: Iterable[Payload]) -> None:
        """Keep those of the ``used`` ones that are not in use any more."""
        kept = {id(one) for one in in_use}
        for one in {id(one): one for one in used if id(one) not in kept}.values():
            self.give_back(one)
