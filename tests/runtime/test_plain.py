"""What is recognised as a plain request, against aiohttp's own parser."""

from __future__ import annotations

import asyncio
from random import Random
from unittest.mock import Mock

import pytest
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser

from fedstream.runtime.plain import PlainReader, PlainRequest, response
from tests.coordinator.gateway.attacks import HIDDEN, SMUGGLED, TRICKS
from tests.coordinator.gateway.raw import request
from tests.fuzz.mutation import mutated_bytes

BODY = b'{"nonce": "0123456789012345678901"}'
ASKS = request("POST", "/v1/check-in", "Accept: */*", body=BODY)
LOOKS = request("GET", "/v1/models/" + "0" * 64)
LATER = request("POST", "/v1/tasks/a/updates/b", "Expect: 100-continue", "Content-Length: 9")


def test_plain_request_is_taken_apart() -> None:
    assert PlainReader().take(ASKS) == PlainRequest(
        "POST", "/v1/check-in",
        {"host": "gateway", "device": "3", "accept": "*/*", "content-length": str(len(BODY))},
        BODY,
    )  # fmt: skip


def test_request_is_taken_apart_while_its_body_comes() -> None:
    reader = PlainReader()
    begun = reader.take(ASKS[:-5])
    assert begun is not None
    assert (begun.body, begun.missing) == (BODY[:-5], 5)
    reader.skip(2)
    assert reader.take(ASKS[-3:]) is None
    assert reader.take(LOOKS) is not None


@pytest.mark.parametrize(
    "parts",
    [
        [LATER, b"123456789"],
        [ASKS[:-5], ASKS[-5:]],
        [ASKS[:-5], ASKS[-5:-4], ASKS[-4:]],
        [ASKS, LOOKS],
    ],
)
def test_what_comes_after_a_request_is_plain_too(parts: list[bytes]) -> None:
    reader = PlainReader()
    for part in parts:
        reader.take(part)
    assert reader.take(LOOKS) is not None


@pytest.mark.parametrize(
    "data",
    [
        ASKS[:20],  # the head is not all there
        ASKS + LOOKS,
        LOOKS + LOOKS[:9],
        LOOKS.replace(b"\r\n", b"\n"),
        LOOKS.replace(b"HTTP/1.1", b"HTTP/1.0"),
        request("GET", "/v1/a", "Connection: close"),
        request("GET", "/v1/a", "Upgrade: h2c"),
        request("GET", "/v1/a", "X-Empty:"),
        request("GET", "/v1/a", "X-Long: " + "a" * 9000),
        request("GET", "/v1/a", *(f"X{n}: a" for n in range(64))),
        request("GET", "/v1/ä"),
        request("GET", "http://gateway/v1/a"),
        request("PUT", "/v1/a"),
        *SMUGGLED.values(),
    ],
)
def test_nothing_is_plain_after_what_is_not(data: bytes) -> None:
    reader = PlainReader()
    assert reader.take(data) is None or data in SMUGGLED.values()
    assert reader.take(LOOKS) is None or reader.take(HIDDEN) is not None


class Parser:
    """aiohttp's, fed the same bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._parser = HttpRequestParser(
            Mock(), loop, 1 << 16, max_line_size=8190, max_headers=64, max_field_size=8190,
            auto_decompress=False,
        )  # fmt: skip

    def feed(self, data: bytes) -> list[PlainRequest | None]:
        """The requests that begin in these bytes; None: its body is not all there."""
        found: list[PlainRequest | None] = []
        for message, payload in self._parser.feed_data(data)[0]:
            self._parser.message_consumed()
            body = payload.read_nowait() if payload.is_eof() else None
            names = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message.raw_headers
            }
            found.append(
                None if body is None
                else PlainRequest(message.method, message.path, names, body)
            )  # fmt: skip
        return found


async def test_aiohttp_reads_the_same_in_what_is_plain() -> None:
    """Whatever comes, and however it is cut: else requests could be hidden from a proxy."""
    rng, loop = Random(7), asyncio.get_running_loop()
    valid = [ASKS, LOOKS, LATER + b"123456789"] * 20 + [*SMUGGLED.values()]
    valid += [request("GET", target) for target in TRICKS]
    taken = 0
    for _ in range(4000):
        reader, parser = PlainReader(), Parser(loop)
        stream = b"".join(rng.choice(valid) for _ in range(rng.randint(1, 4)))
        if rng.random() < 0.7:
            stream = mutated_bytes(stream, rng)
        cuts = sorted(rng.choice(_cuts(stream, rng)) for _ in range(rng.randint(0, 5)))
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            part = stream[begin:end]
            if not part:
                continue
            plain = reader.take(part)
            try:
                found = parser.feed(part)
            except HttpProcessingError:
                assert plain is None, part
                break
            if plain is not None:
                assert found == [None if plain.missing else plain], (stream, part)
                taken += 1
    assert taken > 300, "else hardly anything was compared"


def _cuts(stream: bytes, rng: Random) -> list[int]:
    """Places where a part may end: between requests, at their bodies, and anywhere."""
    found = [at for at in range(1, len(stream)) if stream[at:].startswith((b"POST ", b"GET "))]
    found += [at + 4 for at in range(len(stream)) if stream[at:].startswith(b"\r\n\r\n")]
    return [*found, rng.randrange(len(stream) + 1)]


def test_response_says_how_long_it_is() -> None:
    said = response(200, {"Content-Type": "text/plain"}, b"well")
    head, _, body = said.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[:3] == ["HTTP/1.1 200 OK", "Content-Type: text/plain", "Content-Length: 4"]
    assert body == b"well"
    assert b"Content-Length" not in response(204, {"Retry-After": "3"})
