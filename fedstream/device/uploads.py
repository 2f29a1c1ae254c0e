"""Delivering an update in parts, with resumption after cuts, until there is a receipt.

The protocol is draft-ietf-httpbis-resumable-upload. A part is a few of the gateway's chunks, so
that a cut loses little and requests stay below proxies' limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstream.core.errors import FedstreamError
from fedstream.device.connection import NotNow, retry_after
from fedstream.protocol import headers as names
from fedstream.protocol.headers import BadHeader, as_boolean, integer
from fedstream.protocol.messages import BadBody, Receipt, WrongOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedstream.device.connection import Reply
    from fedstream.device.folder import FinishedUpdate
    from fedstream.device.gateway import OwnGateway

PART = 4 * ((1 << 20) - 64)  # bytes: four of the gateway's chunks
_DECIDES_S = 10.0  # more than a gateway waits for the coordinator's decision
_ASK_S = 1.0  # default time between two requests for a receipt
_WHAT = "the update"


class UpdateUpload:
    """The upload of one update, which an earlier process may have begun."""

    def __init__(
        self,
        gateway: OwnGateway,
        update: FinishedUpdate,
        show: Callable[[str], None],
        *,
        part: int = PART,
    ) -> None:
        """``show``: called with a short status. ``part``: most bytes of a request."""
        self._gateway = gateway
        self._update = update
        self._show = show
        self._part = part
        self._data = update.data.data
        self._offset: int | None = None  # None: the gateway doesn't know of the upload

    async def receipt(self, *, begun: bool = False) -> Receipt | None:
        """Send the missing bytes, and return the receipt.

        ``begun``: whether the gateway may have a part of the update. Returns None if the gateway
        has forgotten update and task. Raises TurnedAway.
        """
        connection = self._gateway.connection
        if begun:
            await self._find()
        while True:
            before = self._offset
            try:
                reply = await self._sent()
                if reply.status in (404, 410) and before is None:
                    return None
                receipt = self._heard(reply)
            except NotNow as error:
                await connection.wait(error)
                await self._find()
                continue
            if receipt is None:
                if self._offset is not None and self._offset <= (before or 0) and self._data:
                    await connection.pause(_ASK_S)
            elif receipt.state == "received":
                self._show("waiting for the receipt")
                after_s = retry_after(reply.headers)
                await connection.pause(_ASK_S if after_s is None else after_s)
            else:
                return receipt

    async def _sent(self) -> Reply:
        """Send the next part; after the last part, repeat the last request without bytes."""
        size, at = len(self._data), self._offset or 0
        part = self._data[at : at + self._part]
        complete = at + len(part) == size
        self._show(f"uploading the update: {at / size:.0%}" if size else "uploading the update")
        headers = {names.COMPLETE: as_boolean(complete), "Content-Type": names.PARTIAL}
        if self._offset is None:
            headers |= {
                names.LENGTH: str(size),
                names.REPORT: self._update.report.encode().decode(),
            }
        else:
            headers |= {names.OFFSET: str(at)}
        return await self._gateway.once(
            "POST" if self._offset is None else "PATCH",
            self._update.url,
            body=part,
            headers=headers,
            wait_s=_DECIDES_S if complete else 0.0,
        )

    def _heard(self, reply: Reply) -> Receipt | None:
        """Process an answer: a receipt, or the upload's offset. Raises TurnedAway."""
        if reply.status in (200, 202) or (reply.status == 422 and _is_receipt(reply)):
            receipt = reply.read(Receipt.decode, _WHAT)
            if receipt.state == "received":
                self._offset = len(self._data)
            return receipt
        if reply.status in (201, 204):
            self._offset = self._counted(reply)
        elif reply.status == 409:
            if not reply.headers.get("content-type", "").startswith(names.PROBLEM):
                raise NotNow(str(reply.refusal(_WHAT)))  # an earlier request is still being read
            self._offset = self._within(reply.read(WrongOffset.decode, _WHAT).expected)
        elif reply.status in (404, 410):
            self._offset = None  # the upload has expired: begin anew
        else:
            raise reply.refusal(_WHAT)
        return None

    async def _find(self) -> None:
        """Ask for the upload's offset."""

        async def look() -> Reply:
            reply = await self._gateway.once("HEAD", self._update.url)
            if reply.status == 409:  # a newer request has replaced it, perhaps a copy of an old one
                raise NotNow("the gateway was asked about the update twice at once")
            return reply

        reply = await self._gateway.connection.answered(look)
        if reply.status == 204:
            complete = reply.headers.get(names.COMPLETE.lower()) == as_boolean(True)
            self._offset = len(self._data) if complete else self._counted(reply)
        elif reply.status == 410:  # finished: sending its end again returns the outcome
            self._offset = len(self._data)
        elif reply.status == 404:
            self._offset = None
        else:
            raise reply.refusal(_WHAT)

    def _counted(self, reply: Reply) -> int:
        try:
            return self._within(integer(names.OFFSET, reply.headers.get(names.OFFSET.lower(), "")))
        except BadHeader as error:
            raise FedstreamError(
                f"the gateway's answer to {_WHAT} can't be read: {error}"
            ) from error

    def _within(self, offset: int) -> int:
        if offset > len(self._data):
            raise FedstreamError(
                f"the gateway has {offset} bytes of an update of {len(self._data)}: it must be "
                "another one's"
            )
        return offset


def _is_receipt(reply: Reply) -> bool:
    """Whether the body is a receipt, as a refusal may have the same status."""
    try:
        Receipt.decode(reply.body)
    except BadBody:
        return False
    return True
