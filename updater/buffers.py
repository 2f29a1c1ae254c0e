"""Reusable memory for models and for payloads in a wire format.

New memory costs more: the system fills each page with zeros at the first write.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedstream.core.layout import Layout, Model, Payload

# Encoded payloads kept: two updates, the version being published, and the one being made.
_ENCODED = 4


class BufferPool:
    """Pool of reusable models and encoded payloads. Only one thread at a time may take from it."""

    def __init__(self) -> None:
        self.models: list[Model] = []
        self.encoded: list[Payload] = []  # the most recently returned is the last

    def model(self, layout: Layout) -> Model:
        """Take a model to write into."""
        return self.models.pop() if self.models else Model(layout)

    def room(self, size: int) -> Payload:
        """Take a payload of ``size`` bytes."""
        for at, one in enumerate(self.encoded):
            if one.buffer.nbytes == size:
                return self.encoded.pop(at)
        return Payload.empty(size)

    def give_back(self, one: Payload) -> None:
        """Return a payload that is no longer used."""
        if isinstance(one, Model):
            self.models.append(one)
        else:
            self.encoded.append(one)
            del self.encoded[:-_ENCODED]

    def take_back(self, used: Iterable[Payload], in_use: Iterable[Payload]) -> None:
        """Return the ``used`` payloads that are not ``in_use``."""
        kept = {id(one) for one in in_use}
        for one in {id(one): one for one in used if id(one) not in kept}.values():
            self.give_back(one)
