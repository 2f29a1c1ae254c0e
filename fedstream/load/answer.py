"""An answer while it is read: HTTP/1.1 by llhttp (httptools). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

if TYPE_CHECKING:
    from fedstream.broker.digest import Digester

_OK = 200


class AnswerReader:
    """One answer, as its bytes come.

    Its body is kept, or, if the status is 200 and there is a ``digest``, only digested.
    """

    __slots__ = (
        "_digest", "_has_end", "_is_head", "_keeps_open", "_parser", "_pieces", "headers",
        "is_whole", "size", "status",
    )  # fmt: skip

    def __init__(self, *, is_head: bool, digest: Digester | None = None) -> None:
        """``is_head``: it is to a HEAD, so it has no body whatever its headers say."""
        self._is_head = is_head
        self._digest = digest
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_end = False
        self._keeps_open = False
        self.status = 0  # until its headers are there
        self.headers: dict[str, str] = {}  # names in lower case
        self.size = 0  # bytes of its body so far
        self.is_whole = False

    @property
    def body(self) -> bytes:
        """What was kept of the body."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    @property
    def keeps_open(self) -> bool:
        """Whether the connection may be used again, once the answer is whole."""
        return self._keeps_open

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises ConnectionError if they are no HTTP, or too many."""
        if self._parser is None:
            raise ConnectionError("more than an answer")
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._parser = None
            raise ConnectionError(f"not an answer in HTTP/1.1: {error}") from error
        if self.is_whole:
            self._parser = None  # which refers to this

    def end(self) -> bool:
        """Hear that no more bytes come; whether the answer is whole by that."""
        if self.status and not self._has_end:  # its body has no length: it lasts until now
            self.is_whole = True
        self._parser = None
        return self.is_whole

    # what the parser says

    def on_message_begin(self) -> None:
        """Forget an interim answer, such as 104."""
        if self.is_whole:
            raise ConnectionError("more than an answer")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  (it calls)
        status = self._parser.get_status_code()
        if status < _OK:
            return
        self.status = status
        self._has_end = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self._is_head:
            self._end(keeps_open=self._parser.should_keep_alive())

    def on_body(self, data: bytes) -> None:
        if self._is_head:
            raise ConnectionError("a body where there is none")
        self.size += len(data)
        if self._digest is not None and self.status == _OK:
            self._digest.update(data)
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        assert self._parser is not None  # noqa: S101  (it calls)
        if self.status and not self.is_whole:
            self._end(keeps_open=self._parser.should_keep_alive())

    def _end(self, *, keeps_open: bool) -> None:
        self.is_whole = self._has_end = True
        self._keeps_open = keeps_open
