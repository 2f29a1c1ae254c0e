"""Answers in HTTP/1.1, as they come: whole, in pieces, and wrong."""

from __future__ import annotations

import hashlib

import pytest

from fedstream.broker.digest import Digester
from fedstream.load.answer import AnswerReader

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "x"\r\n\r\nhello'


def read(data: bytes, *, is_head: bool = False, size: int | None = None) -> AnswerReader:
    """What is read of these bytes, ``size`` at a time."""
    found = AnswerReader(is_head=is_head)
    size = size or len(data)
    for at in range(0, len(data), size):
        found.feed(data[at : at + size])
    return found


@pytest.mark.parametrize("size", [1, 7, None])
def test_answer_is_read_in_any_pieces(size: int | None) -> None:
    found = read(OK, size=size)
    assert (found.status, found.body, found.size) == (200, b"hello", 5)
    assert found.headers == {"content-length": "5", "etag": '"x"'}
    assert found.is_whole
    assert found.keeps_open


@pytest.mark.parametrize("size", [1, None])
def test_body_in_chunks_is_put_together(size: int | None) -> None:
    chunks = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    )
    found = read(chunks, size=size)
    assert (found.body, found.is_whole, found.keeps_open) == (b"hello", True, True)


def test_body_is_digested_in_place_of_kept() -> None:
    digest = Digester("sha256")
    found = AnswerReader(is_head=False, digest=digest)
    found.feed(OK)
    assert (found.body, found.size) == (b"", 5)
    assert digest.digest() == hashlib.sha256(b"hello").hexdigest()


def test_body_of_a_refusal_is_kept_all_the_same() -> None:
    found = AnswerReader(is_head=False, digest=Digester("sha256"))
    found.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone")
    assert (found.status, found.body) == (404, b"gone")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n"]
)
def test_answer_without_a_body_ends_with_its_headers(head: bytes) -> None:
    assert read(head + b"\r\n").is_whole


def test_answer_to_a_head_has_no_body_whatever_its_length() -> None:
    found = read(b"HTTP/1.1 200 OK\r\nContent-Length: 247000\r\n\r\n", is_head=True)
    assert (found.is_whole, found.keeps_open, found.body) == (True, True, b"")


def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 104 Upload Resumption Supported\r\nUpload-Limit: max-size=9\r\n\r\n"
    found = read(interim + b"HTTP/1.1 100 Continue\r\n\r\n" + OK, size=10)
    assert (found.status, found.body, found.is_whole) == (200, b"hello", True)
    assert "upload-limit" not in found.headers


def test_answer_that_says_close_closes() -> None:
    found = read(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert (found.is_whole, found.keeps_open) == (True, False)


def test_body_without_a_length_lasts_until_the_end() -> None:
    found = read(b"HTTP/1.1 200 OK\r\n\r\nhel")
    found.feed(b"lo")
    assert not found.is_whole
    assert found.end()
    assert (found.body, found.keeps_open) == (b"hello", False)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nETag", OK[:-1]])
def test_answer_that_breaks_off_is_not_whole(data: bytes) -> None:
    assert not read(data, size=len(data) + 1).end()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        OK + OK,
    ],
    ids=["no-http", "negative", "two-lengths", "differing", "upgrade", "two"],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        read(data)


def test_bytes_after_an_answer_are_refused() -> None:
    found = read(OK)
    with pytest.raises(ConnectionError, match="more than an answer"):
        found.feed(b"x")
    found = AnswerReader(is_head=True)
    with pytest.raises(ConnectionError):
        found.feed(OK)
