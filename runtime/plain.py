"""Plain requests: HTTP/1.1 as most clients write it, recognised without a doubt. No I/O.

What is recognised is a small part of what HTTP allows, and means the same to any parser: one
spelling of the request line, each header once, ASCII, a Content-Length or no body. Whatever else
comes is not plain, and neither is anything behind it on the same connection: then nobody here knows
any more where requests begin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

_END = b"\r\n\r\n"
_MOST = 1 << 13  # bytes before a body
_HEADERS = 64
_LINE = re.compile(r"(GET|HEAD|POST|PATCH|DELETE) (/[!-~]{0,2000}) HTTP/1\.1")
_HEADER = re.compile(r"([A-Za-z0-9-]+): ?([!-~](?:[ -~]*[!-~])?)")
_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}")
# They decide where a message or a connection ends, or what its bytes are.
_NOT_PLAIN = frozenset({
    "content-encoding", "proxy-connection", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_BODILESS: Final = (204, 304)


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request, perhaps without the end of its body."""

    method: str
    target: str  # as it was sent
    headers: Mapping[str, str]  # by name, in small letters
    body: bytes  # as far as it came with the rest
    missing: int = 0  # bytes of it that are still to come


class PlainReader:
    """Follows where the requests of a connection begin and end, for as long as all are plain."""

    __slots__ = ("_is_plain", "_rest")

    def __init__(self) -> None:
        self._is_plain = True
        self._rest = 0  # bytes of a body that are still to come

    def take(self, data: bytes) -> PlainRequest | None:
        """The request that these bytes are, or begin; None if they are anything else.

        They must be all that was received since the last call.
        """
        if not self._is_plain:
            return None
        if self._rest:
            self._rest -= len(data)
            self._is_plain = self._rest >= 0  # else another request begins amid these bytes
            return None
        end = data.find(_END, 0, _MOST)
        found = None if end < 0 else _parsed(data[:end].decode("latin-1"))
        if found is None:
            self._is_plain = False
            return None
        method, target, headers, length = found
        body = data[end + len(_END) :]
        self._rest = length - len(body)
        self._is_plain = self._rest >= 0
        if not self._is_plain or "expect" in headers:
            return None
        return PlainRequest(method, target, headers, body, self._rest)

    def skip(self, size: int) -> None:
        """Note that so many bytes of a body have come."""
        self._rest -= size


def _parsed(head: str) -> tuple[str, str, dict[str, str], int] | None:
    """A plain request's method, target, headers and length of its body."""
    first, *rest = head.split("\r\n")
    line = _LINE.fullmatch(first)
    if line is None or len(rest) > _HEADERS:
        return None
    headers: dict[str, str] = {}
    for one in rest:
        header = _HEADER.fullmatch(one)
        if header is None:
            return None
        name = header[1].lower()
        if name in headers or name in _NOT_PLAIN:
            return None
        headers[name] = header[2]
    if "host" not in headers or headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    length = headers.get("content-length", "0")
    if not _LENGTH.fullmatch(length):
        return None
    return line[1], line[2], headers, int(length)


def response(status: int, headers: Mapping[str, str], body: bytes = b"", *, more: int = 0) -> bytes:
    """A response, with the headers that aiohttp adds too. ``headers``: the others. ``more``: bytes
    of its body that are sent behind it.
    """
    lines = [f"HTTP/1.1 {status} {_PHRASES[status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status not in _BODILESS:
        lines.append(f"Content-Length: {len(body) + more}")
    lines += [f"Date: {rfc822_formatted_time()}", f"Server: {SERVER_SOFTWARE}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


_PHRASES = {one.value: one.phrase for one in HTTPStatus}
