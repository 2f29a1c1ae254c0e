"""What can become of a request to a gateway, other than the answer that was asked for."""

from __future__ import annotations

from fedstream.core.errors import FedstreamError


class NotNow(FedstreamError):
    """No answer, or one that asks for another try: the same request may work later."""

    retriable = True

    def __init__(self, why: str, after_s: float | None = None) -> None:
        """``after_s``: how long the gateway asks to wait; None: it doesn't say."""
        super().__init__(why)
        self.after_s = after_s


class TurnedAway(FedstreamError):
    """The gateway refused a request for good."""

    def __init__(self, what: str, status: int, reason: str, text: str) -> None:
        """``reason``: of the protocol's closed set, or '' if the answer has none."""
        said = f"{text} ({reason})" if reason else text
        super().__init__(f"the gateway refused {what}: {said}")
        self.status = status
        self.reason = reason
