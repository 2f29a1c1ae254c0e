"""Quick routes, from the other end of a socket: beside aiohttp, on the same connections."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import structlog
import uvloop
from aiohttp import web
from prometheus_client import Counter as Metric

from fedstream.runtime.crowd import Crowd
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.plain import PlainRequest, response
from fedstream.runtime.quick import Exchange, Idle, IncomingBody, QuickRoute
from tests.support import wait_until

QUICK = b"GET /ask HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = b"GET /ask HTTP/1.1\r\nHost: localhost\r\nSlow: yes\r\n\r\n"
LONG = b"POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"


@dataclass
class Counter:
    """A service with one quick route, which leaves to the handler what says `slow`."""

    port: int = 0
    taken: list[Exchange] = field(default_factory=list)

    def quick(self, request: PlainRequest, exchange: Exchange, _names: Mapping[str, str]) -> bool:
        if "slow" in request.headers:
            return False
        self.taken.append(exchange)
        if "broken" in request.headers:
            if request.headers["broken"] == "late":
                self.answer()
            raise ValueError("broken")
        return True

    def answer(self, *, is_last: bool = False) -> None:
        self.taken.pop().answer(response(200, {}, b"quick"), is_last=is_last)

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def wait(self) -> None:
        await wait_until(lambda: self.taken, what="a request that was taken")

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ask until the request is taken: aiohttp may not have ended the one before."""
        while True:
            writer.write(QUICK)
            answered = asyncio.create_task(body(reader))
            await wait_until(lambda: self.taken or answered.done())  # noqa: B023  (ends here)
            if self.taken:
                self.answer()
                assert await answered == b"quick"
                return
            assert await answered == b"slowly"


@asynccontextmanager
async def served(idle_s: float = 15.0, refused: Metric | None = None) -> AsyncIterator[Counter]:
    counter = Counter()

    async def slow(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"slowly")

    routes = [
        QuickRoute("GET", "/ask", counter.quick),
        web.get("/ask", slow),
        web.post("/ask", slow),
    ]
    app = application(routes, lambda: False)
    http = HttpSettings(idle_s=idle_s)
    log = structlog.get_logger()
    async with listening(app, http, 0, Crowd(100), log, refused=refused) as counter.port:
        yield counter


async def body(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    [length] = [one for one in head.split(b"\r\n") if one.startswith(b"Content-Length")]
    return await asyncio.wait_for(reader.readexactly(int(length.split()[1])), 30)


async def test_quick_route_and_handler_take_turns_on_a_connection() -> None:
    async with served() as counter:
        reader, writer = await counter.connected()
        for _ in range(3):
            await counter.ask(reader, writer)
            writer.write(SLOW)
            assert await body(reader) == b"slowly"
            writer.write(LONG)
            writer.write(b"abc")
            assert await body(reader) == b"slowly"
        writer.close()


async def test_requests_behind_one_that_waits_are_answered_in_order() -> None:
    async with served() as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        writer.write(SLOW + LONG + b"abc" + SLOW)
        counter.answer()
        assert await body(reader) == b"quick"
        assert [await body(reader) for _ in range(3)] == [b"slowly"] * 3
        writer.close()


async def test_who_asks_behind_without_end_is_not_read() -> None:
    async with served() as counter:
        _, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        writer.write(bytes(1 << 26))
        try:
            async with asyncio.timeout(0.5):
                await writer.drain()
        except TimeoutError:
            pass
        else:
            raise AssertionError("64 MiB were taken")
        writer.transport.abort()
        counter.answer()  # then it is read again


async def test_requests_at_once_are_no_matter_for_a_quick_route() -> None:
    async with served() as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK + QUICK)
        assert [await body(reader) for _ in range(2)] == [b"slowly"] * 2
        writer.write(QUICK)
        assert await body(reader) == b"slowly", "nobody knows any more where requests begin"
        writer.close()


async def test_connection_is_closed_once_idle_after_a_quick_answer() -> None:
    async with served(idle_s=0.2) as counter:
        for begun in (b"", b"GET /a", SLOW[:-2]):
            reader, writer = await counter.connected()
            writer.write(QUICK)
            await counter.wait()
            counter.answer()
            assert await body(reader) == b"quick"
            writer.write(begun)
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()


async def test_waiting_for_a_quick_answer_is_not_idle() -> None:
    async with served(idle_s=0.1) as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        closing = asyncio.create_task(reader.read(1))
        done, _ = await asyncio.wait([closing], timeout=0.5)
        assert not done
        counter.answer()
        assert await closing == b"H"
        writer.close()


@pytest.mark.parametrize("behind", [b"", b"G", SLOW])
async def test_hang_up_is_noticed_and_an_answer_goes_nowhere(behind: bytes) -> None:
    async with served() as counter:
        _, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        assert counter.taken[0].remote == "127.0.0.1"
        writer.write(behind)
        writer.close()
        await wait_until(lambda: not counter.taken[0].is_open)
        counter.answer()


async def test_last_answer_closes_the_connection() -> None:
    async with served() as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        counter.answer(is_last=True)
        assert await body(reader) == b"quick"
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_what_a_quick_route_has_taken_is_answered_before_the_end() -> None:
    async with served() as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK)
        await counter.wait()
        asyncio.get_running_loop().call_later(0.2, counter.answer)  # it is ending by then
    assert await body(reader) == b"quick"
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_end_does_not_wait_for_ever_for_a_quick_answer() -> None:
    async with asyncio.timeout(30):
        async with served() as counter:
            reader, writer = await counter.connected()
            writer.write(QUICK)
            await counter.wait()
        assert await reader.read() == b""
    counter.answer()  # nobody hears it
    writer.close()


@pytest.mark.parametrize(
    ("when", "said"), [("at once", b'"reason": "internal"'), ("late", b"quick")]
)
async def test_failure_of_a_quick_route_is_answered_counted_and_ends(
    when: str, said: bytes
) -> None:
    refused = Metric("refused", "requests", ["reason"], registry=None)
    async with served(refused=refused) as counter:
        reader, writer = await counter.connected()
        writer.write(QUICK[:-2] + b"Broken: " + when.encode() + b"\r\n\r\n")
        assert said in await asyncio.wait_for(reader.read(), 30)
        writer.close()
        sample = next(iter(refused.collect())).samples[0]
    assert (sample.labels, sample.value) == ({"reason": "internal"}, 1)


class Watched:
    def __init__(self) -> None:
        self.expired = 0

    def expire(self) -> None:
        self.expired += 1


async def test_idle_connections_share_a_timer() -> None:
    idle, all_ = Idle(0.1), [Watched() for _ in range(10)]
    for one in all_:
        idle.begin(one)
    idle.begin(all_[3])  # again
    idle.end(all_[5])
    idle.end(all_[5])
    await wait_until(lambda: all_[3].expired)
    assert [one.expired for one in all_] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("is_new", [False, True])
def test_lateness_of_a_busy_loop_is_nobodys_idleness(*, is_new: bool) -> None:
    """uvloop runs timers before it reads what has come while it was busy. ``is_new``: the
    connection, so that its timer is aiohttp's.
    """

    async def busy() -> None:
        async with served(idle_s=0.2) as counter:
            reader, writer = await counter.connected()
            if not is_new:
                writer.write(QUICK)
                await counter.wait()
                counter.answer()
                assert await body(reader) == b"quick"
            wire = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))

            def block() -> None:
                loop.remove_reader(another)
                wire.send(QUICK)  # in time
                time.sleep(0.5)

            loop = asyncio.get_running_loop()
            one, another = socket.socketpair()
            loop.add_reader(another, block)
            one.send(b"x")
            await asyncio.wait_for(counter.wait(), 10)
            counter.answer()
            assert await body(reader) == b"quick"
            for each in (writer, wire, one, another):
                each.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(busy())


@dataclass
class Library:
    """A service with quick routes for the pages of a book, one sent and one taken."""

    page: bytes = b"page"
    port: int = 0
    numbers: list[str] = field(default_factory=list)
    bodies: list[IncomingBody] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    sent: int = 0

    def send(self, _request: PlainRequest, exchange: Exchange, names: Mapping[str, str]) -> bool:
        self.numbers.append(names["number"])
        exchange.answer(response(200, {}, more=len(self.page)), memoryview(self.page), then=self.ok)
        return True

    def ok(self) -> None:
        self.sent += 1

    def take(self, request: PlainRequest, exchange: Exchange, _names: Mapping[str, str]) -> bool:
        self.bodies.append(exchange.incoming(request))
        self.exchanges.append(exchange)
        return True

    async def comes(self) -> IncomingBody:
        await wait_until(lambda: self.bodies, what="a request with a body")
        return self.bodies.pop()

    def answer(self, *, is_last: bool = False) -> None:
        self.exchanges.pop().answer(response(200, {}, b"taken"), is_last=is_last)


@asynccontextmanager
async def library(page: bytes = b"page") -> AsyncIterator[Library]:
    its = Library(page)

    async def slow(_request: web.Request) -> web.Response:
        return web.Response(body=b"slowly")

    routes = [
        QuickRoute("GET", "/pages/{number}", its.send),
        QuickRoute("POST", "/pages/{number}/text", its.take, in_parts=True),
        web.route("*", "/{path:.*}", slow),
    ]
    app = application(routes, lambda: False)
    async with listening(app, HttpSettings(), 0, Crowd(100), structlog.get_logger()) as its.port:
        yield its


def posting(length: int) -> bytes:
    start = "POST /pages/7/text HTTP/1.1\r\nHost: localhost\r\n"
    return f"{start}Content-Length: {length}\r\n\r\n".encode()


def getting(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def amid_a_body(
    its: Library, length: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, IncomingBody]:
    """A connection on which two bytes of a body, ``ab``, were sent and read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
    writer.write(posting(length) + b"ab")
    incoming = await its.comes()
    assert await incoming.readany() == b"ab"
    return reader, writer, incoming


async def test_quick_route_is_found_by_the_parts_of_its_path() -> None:
    async with library() as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        for path, said in {
            "/pages/a-9_Z": b"page", "/pages/": b"slowly", "/pages/..": b"slowly",
            "/pages/%37": b"slowly", "/pages/1?2": b"slowly", "/pages/1/2": b"slowly",
        }.items():  # fmt: skip
            writer.write(getting(path))
            assert await body(reader) == said, path
        assert its.numbers == ["a-9_Z"]
        writer.close()


async def test_body_is_read_as_it_comes_and_what_is_behind_is_another_request() -> None:
    async with library() as its:
        reader, writer, incoming = await amid_a_body(its, 6)
        coming = asyncio.create_task(incoming.readany())
        writer.write(b"cdef" + getting("/pages/1"))
        assert await coming == b"cdef"
        assert await incoming.readany() == b""
        its.answer()
        assert [await body(reader), await body(reader)] == [b"taken", b"page"]
        writer.close()


@pytest.mark.parametrize("behind", [b"", getting("/pages/1")])
async def test_rest_of_a_body_whose_request_was_answered_is_passed_over(behind: bytes) -> None:
    async with library() as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(posting(1 << 20) + bytes(1000))
        await its.comes()
        its.answer()
        assert await body(reader) == b"taken"
        writer.write(bytes((1 << 20) - 1000) + behind)
        if not behind:
            await writer.drain()
            writer.write(getting("/pages/1"))
        assert await body(reader) == b"page"
        writer.close()


async def test_request_that_does_not_end_is_closed_after_its_answer() -> None:
    async with library() as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(posting(9))
        await its.comes()
        its.answer()
        assert await body(reader) == b"taken"
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_who_goes_away_amid_a_body_is_heard_of() -> None:
    async with library() as its:
        _, writer, incoming = await amid_a_body(its, 9)
        writer.close()
        with pytest.raises(ConnectionError, match="went away"):
            await incoming.readany()
        its.answer()  # nobody hears it


async def test_body_that_nobody_reads_is_not_taken() -> None:
    async with library() as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(posting(1 << 26) + bytes(1 << 26))
        incoming = await its.comes()
        try:
            async with asyncio.timeout(0.5):
                await writer.drain()
        except TimeoutError:
            pass
        else:
            raise AssertionError("64 MiB were taken")
        assert incoming.size < 1 << 20
        size = 0
        while part := await incoming.readany():
            size += len(part)
        assert size == 1 << 26
        its.answer()
        assert await body(reader) == b"taken"
        writer.close()


async def test_answer_that_is_being_taken_is_taken_before_the_end() -> None:
    page = bytes(1 << 24)
    async with library(page) as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(getting("/pages/1"))
        await wait_until(lambda: its.numbers)
        taken = asyncio.create_task(body(reader))
    assert await taken == page
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_answer_ends_when_its_reader_has_taken_it() -> None:
    page = bytes(1 << 24)
    async with library(page) as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(getting("/pages/1"))
        await wait_until(lambda: its.numbers)
        assert its.sent == 0, "16 MiB fit into no socket"
        writer.write(getting("/pages/2"))
        assert await body(reader) == page
        assert await body(reader) == page
        await wait_until(lambda: its.sent == 2)
        writer.write(getting("/pages/3"))
        await wait_until(lambda: len(its.numbers) == 3)
        writer.transport.abort()
        await wait_until(lambda: its.sent == 3, what="the end of an answer that nobody takes")
