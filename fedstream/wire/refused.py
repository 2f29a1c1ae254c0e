"""Why bytes are not what their format says."""

from __future__ import annotations

from fedstream.broker.errors import BrokerError


class Undecodable(BrokerError):
    """Bytes that are not in the format they were announced in.

    ``reason`` is one of :data:`fedstream.broker.reasons.REFUSED`, by which it is counted.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason = reason
