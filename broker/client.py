"""The only contact with redis-py: connections, commands, pipelines, scripts.

redis-py's ``Redis`` object retries commands whose reply was lost, which would repeat an ``XADD``
and strand entries that an ``XREADGROUP`` delivered. So this client drives redis-py's *connections*
directly: each command is sent once, a missing reply raises :class:`Unavailable`, and the caller
decides whether a retry is safe. Replies have RESP2 shapes, always as bytes.

With sentinels or a cluster (:mod:`fedstream.broker.discovery`), the client asks which node to use
before it connects, and again after a failure. The client resends a command to another node only if
the first node said that it had not executed the command.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from redis import exceptions
from redis.asyncio.connection import Connection, DefaultParser, parse_url
from redis.crc import key_slot

from fedstream.broker.clock import Clock, uptime
from fedstream.broker.commands import ASKING, Argument, Command, asking, encoded
from fedstream.broker.discovery import Address, Cluster, Discovery, Sentinels
from fedstream.broker.failures import is_elsewhere, meaning, said_by_redis
from fedstream.broker.link import READ, BulkPlace, Link, Started
from fedstream.broker.settings import (
    RedisSettings,
    SentinelSettings,
    check_files,
    check_password_file,
    passwords,
)
from fedstream.core.errors import (
    BrokerError,
    ConfigError,
    Distrusted,
    LoginRefused,
    ReplyTooLarge,
    Unavailable,
)

__all__ = ["Client", "RedisSettings"]

_ASKED_S = 2.0  # time-out for asking one sentinel or cluster node
_BROKEN = (exceptions.RedisError, OSError, TimeoutError)  # errors of a failed connection
_HOPS = 4  # redirects to follow before giving up
_CLOCK_S = 2.0  # then the next pipeline also sends TIME
_TIME: Command = ("TIME",)
# Options allowed in a URL. redis-py also accepts options whose value is an object, keeps the text
# instead, and fails later with a traceback.
_OPTIONS = {
    "connection_class",
    "host",
    "port",
    "path",
    "db",
    "username",
    "password",
    "client_name",
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "retry_on_timeout",
    "health_check_interval",
    "decode_responses",
    "protocol",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ciphers",
}
_OF_THE_URL = {"connection_class", "host", "port"}  # redis-py accepts them as options too


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A node for one exchange: the owner of another slot, or one importing our slot."""

    place: Address
    asking: bool  # commands must be preceded by ASKING


class Client:
    """Client for one Redis that runs each command at most once.

    Safe for concurrent tasks on one event loop.
    """

    def __init__(
        self, settings: RedisSettings, name: str = "", *, loads_scripts: bool = True
    ) -> None:
        """``loads_scripts``: whether this user may load scripts; a trainer waits for a service."""
        self.loads_scripts = loads_scripts
        options = _options(settings)
        self._make = options.pop("connection_class")
        self._options = options | {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": None,  # one time-out covers the whole exchange instead
            "socket_connect_timeout": settings.timeout_s,
            "driver_info": None,
            "client_name": name or None,
        }
        self._timeout_s = settings.timeout_s
        self._idle: list[Link] = []
        self._buffer = memoryview(bytearray(READ))  # shared: each link uses it only within a call
        self._closed = False
        self._lost = False  # Redis was lost and is not connected again
        self.reconnects = 0  # reconnections after Redis was lost
        # When the certificates of Redis and the Sentinels expire, in seconds since 1970.
        self.certificates: dict[Address, float] = {}
        self.clock = Clock()  # corrected by new connections and pipelines
        self._asked = 0.0  # when Redis was last asked for its time; uptime
        self.warn: Callable[[str], object] | None = None  # called once if Redis refuses TIME
        place = (str(options.get("host", "localhost")), int(options.get("port", 6379)))
        self._place: Address | None = place  # None: ask sentinels or cluster
        self._path = options.get("path")
        self.database = int(options.get("db") or 0)
        self._guide: Discovery | None = None
        self._guide_options: dict[str, Any] = {}
        self._login = settings
        self._guide_login: RedisSettings | SentinelSettings = settings
        self._was_let_in = False
        check_password_file("redis.password_file", settings)
        if settings.sentinel is not None:
            sentinel = settings.sentinel
            self._guide_login = sentinel
            check_password_file("redis.sentinel.password_file", sentinel)
            self._guide = Sentinels(sentinel)
            self._guide_options = {"username": sentinel.username, "password": None, "db": 0}
        elif settings.cluster:
            if options.get("db"):
                raise ConfigError(
                    f"redis.url: database {options['db']}, but a cluster (redis.cluster = true) "
                    "has only 0"
                )
            self._guide = Cluster(place)
        if self._guide is not None:
            self._place = None
        self._generation = 0  # connections of earlier generations lead to a stale node

    @property
    def address(self) -> str:
        """Redis's address without credentials, for messages."""
        if self._path is not None:
            return str(self._path)
        return f"{self._place[0]}:{self._place[1]}" if self._place else str(self._guide)

    @property
    def places(self) -> list[Address]:
        """Configured addresses: Redis's, each Sentinel's, or those of a cluster's known nodes."""
        if self._guide is not None:
            return list(self._guide.nodes)
        return [self._place] if self._place is not None else []

    def tls_context(self) -> ssl.SSLContext | None:
        """A new TLS context from the current certificate files; None: no TLS."""
        found = getattr(self._make(**self._options), "ssl_context", None)
        return cast(ssl.SSLContext, found.get()) if found is not None else None

    def bind(self, key: str) -> None:
        """Use the node of this key's slot from now on; only matters in a cluster."""
        if isinstance(self._guide, Cluster) and self._guide.slot != key_slot(key.encode()):
            self._guide.slot = key_slot(key.encode())
            self._forget()

    async def call(self, *command: Argument, wait_s: float = 0.0) -> Any:
        """Send one command and return its reply.

        ``wait_s``: seconds the command itself may block.
        """
        return (await self._exchange((command,), wait_s))[0]

    async def time(self) -> float:
        """Redis's time at this moment, in seconds since 1970."""
        sent = uptime()
        at = _seconds(await self.call(*_TIME))
        self.clock.read(at, sent)
        return at

    def pipeline(
        self,
        commands: Sequence[Command],
        *,
        wait_s: float = 0.0,
        most: float = inf,
        into: Sequence[BulkPlace] | None = None,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Send several commands in one write and return their replies.

        Raises the first error among the replies. ``wait_s``: seconds the commands may block.
        ``most``: limit in bytes on all replies together, accurate to one read of 256 KiB, for
        replies whose length a site controls. Beyond the limit, this raises ReplyTooLarge although
        Redis executes every command. ``into``: a buffer for each command's reply, which must be a
        bulk string or nil; the returned reply is then the length in bytes. Replies in a row with
        the same buffer are appended to each other, and bytes beyond the buffer's end are dropped.
        None: the reply is returned.
        """
        return self._exchange(commands, wait_s, most, into)

    async def start(
        self, commands: Sequence[Command], *, wait_s: float, most: float = inf, late: int = 1
    ) -> Started:
        """Send several commands in one write, of which the last ``late`` may block for ``wait_s``.

        Returns once the replies to the first commands are there; :meth:`Started.rest` waits for the
        last ones. ``most`` is as for :meth:`pipeline`. If one of the first commands fails, this
        raises its error at once and closes the connection, and the outcome of the last commands is
        unknown. If another node must execute the commands, this waits for all replies and resends
        the commands to that node.
        """
        generation = self._generation
        early: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        seconds = self._timeout_s
        link = self._rested()
        if link is None:
            link, seconds = await self._new(seconds)
        try:
            whole = link.exchange(
                encoded(commands),
                len(commands),
                seconds=seconds,
                most=most,
                early=early,
                late=late,
                wait_s=wait_s,
            )
            replies = await early
            if link.has_erred:
                _raise_passing(replies)
        except BaseException as error:
            self._give_up(link, error, commands, most, generation)
            raise

        async def rest() -> list[Any]:
            try:
                replies = await whole
                if link.has_erred:
                    _raise_passing(replies)
            except BaseException as error:
                self._give_up(link, error, commands, most, generation)
                raise
            self._put_back(link, generation)
            if link.has_erred:
                return await self._corrected(commands, replies, wait_s, most)
            return replies

        failure = _first_error(replies) if link.has_erred else None
        if failure is None:
            return Started(replies, link, rest)
        if self._guide is None or not isinstance(failure, exceptions.AskError):
            link.abort()
            raise self._failed(failure) from failure
        replies = await rest()  # raises, or another node has executed them

        async def known() -> list[Any]:
            return replies

        return Started(replies[:-late], None, known)

    async def _corrected(
        self,
        commands: Sequence[Command],
        replies: list[Any],
        wait_s: float,
        most: float,
        into: Sequence[BulkPlace] | None = None,
        hops: int = 0,
    ) -> list[Any]:
        """Raise the first error among replies, or resend to the right node for its replies."""
        failure = _first_error(replies)
        if failure is None:  # or it is within a reply
            return replies
        undone = not any(_is_done(c, r) for c, r in zip(commands, replies, strict=True))
        # MovedError is a subclass of AskError
        if undone and isinstance(failure, exceptions.AskError) and self._guide and hops < _HOPS:
            once = self._sent_on(failure)
            return await self._exchange(commands, wait_s, most, into, once, hops + 1)
        raise self._failed(failure) from failure

    def _failed(self, failure: exceptions.ResponseError) -> BrokerError:
        """Translate an error reply, and forget the node if it is the wrong one."""
        translated = self._translated(failure)
        if is_elsewhere(failure):
            # Without sentinels or a cluster, the host name may resolve to another node by now: a
            # Kubernetes Service, a managed Redis.
            self._lost = True
            self._forget(None if self._guide else self._place)
        return translated

    def _sent_on(self, failure: exceptions.AskError) -> _Elsewhere | None:
        """Follow a redirect: return the node for this exchange alone.

        Returns None if the slot has moved: its new node is the current one from now on.
        """
        # A node that doesn't know its own name sends an empty host: it means itself.
        here = self._place[0] if self._place else ""
        place = (failure.host or here, failure.port)
        if not isinstance(failure, exceptions.MovedError):
            return _Elsewhere(place, asking=True)
        if isinstance(self._guide, Cluster):
            if self._guide.slot not in (None, failure.slot_id):
                return _Elsewhere(place, asking=False)
            self._guide.slot = failure.slot_id
        self._forget(place)
        return None

    async def _exchange(
        self,
        commands: Sequence[Command],
        wait_s: float = 0.0,
        most: float = inf,
        into: Sequence[BulkPlace] | None = None,
        once: _Elsewhere | None = None,
        hops: int = 0,
    ) -> list[Any]:
        """Send commands and return the replies.

        Also sends TIME if a correction of the clock is due, unless the commands block or bound
        their replies.

        ``once``: a node for this exchange alone. ``hops``: redirects followed so far.
        """
        sent = tuple(asking(commands)) if once and once.asking else commands
        generation = self._generation
        seconds = self._timeout_s + wait_s
        link = None if once else self._rested()
        if link is None:
            link, seconds = await self._new(seconds, once)
        began = uptime()
        asks = not (once or into or wait_s) and began - self._asked >= _CLOCK_S
        if asks:
            self._asked, sent = began, (_TIME, *commands)
        try:
            replies = await link.exchange(
                encoded(sent), len(sent), seconds=seconds, most=most, into=into
            )
            if link.has_erred:
                _raise_passing(replies)
        except BaseException as error:
            self._give_up(link, error, sent, most, generation)
            raise
        self._put_back(link, generation, once)
        if asks:
            first, *replies = replies
            self._read_clock(first, began)
        elif sent is not commands:
            kept = zip(sent, replies, strict=True)
            replies = [reply for command, reply in kept if command is not ASKING]
        if link.has_erred:
            return await self._corrected(commands, replies, wait_s, most, into, hops)
        return replies

    def _read_clock(self, reply: Any, sent: float) -> None:
        """Correct the clock by the reply to a TIME command sent at ``sent`` (uptime)."""
        if not isinstance(reply, Exception):
            self.clock.read(_seconds(reply), sent)
        elif isinstance(reply, exceptions.NoPermissionError) and self.warn is not None:
            self.warn(
                "Redis refuses TIME, so this machine's own clock is used: make Redis's users again "
                "(fedstream acl)"
            )
            self.warn = None

    def _rested(self) -> Link | None:
        """An idle connection that is still open; None if there is none."""
        while self._idle:
            link = self._idle.pop()
            if link.is_open:
                return link
            link.abort()
        return None

    async def _new(self, seconds: float, once: _Elsewhere | None = None) -> tuple[Link, float]:
        """Connect within ``seconds``; return the link and the seconds left.

        ``once``: a node for one exchange, instead of the current one.
        """
        began = time.monotonic()
        generation = self._generation
        try:
            async with asyncio.timeout(seconds):
                link = await self._connected(once.place if once else None)
        except (*_BROKEN, LoginRefused) as error:
            meant = self._lost_redis(error, generation)
            # Errors of Sentinels are translated already.
            login = self._guide_login if meant is error else self._login
            if isinstance(meant, LoginRefused) and self._may_pass(meant, login):
                meant = Unavailable(f"{meant}; waiting for files that Redis accepts")
            raise meant from error
        self._was_let_in = True
        return link, seconds - (time.monotonic() - began)

    def _may_pass(self, refusal: LoginRefused, login: RedisSettings | SentinelSettings) -> bool:
        """Whether a refused login may succeed later, with a replaced password or certificate.

        A refusal before the first successful login is a mistake in the configuration.
        """
        if not self._was_let_in:
            return False
        if isinstance(refusal, Distrusted):
            return self._options.get("ssl_ca_certs") is not None
        return login.password_file is not None and login.password is None

    def _put_back(self, link: Link, generation: int, once: _Elsewhere | None = None) -> None:
        """Keep a link after its exchange, or close it if it leads to an earlier node."""
        if self._closed or once is not None or generation != self._generation:
            link.abort()
        else:
            self._idle.append(link)

    def _give_up(
        self,
        link: Link,
        error: BaseException,
        sent: Sequence[Command],
        most: float,
        generation: int,
    ) -> None:
        """Close a link whose exchange failed, at once, and raise the translated error.

        Returns without raising if the exchange was cancelled. Discards unsent data, as the caller
        may reuse its memory, and late replies, which must not reach the next caller.
        """
        link.abort()
        if isinstance(error, ReplyTooLarge):
            asked = sent[link.received][0]
            raise ReplyTooLarge(f"more than {most} bytes with the reply to {asked!r}") from error
        if isinstance(error, _BROKEN):
            raise self._lost_redis(error, generation) from error

    def _lost_redis(self, error: Exception, generation: int) -> BrokerError:
        """Translate the failure of a connection.

        Forgets the current node, unless the connection is of an earlier ``generation``.
        """
        translated = self._translated(error)
        self._lost = True
        if self._guide is not None and generation == self._generation:
            self._forget()
        return translated

    async def _connected(self, place: Address | None = None) -> Link:
        """Connect to ``place``, by default to the current node."""
        if place is None and self._guide is not None:
            place = self._place = self._place or await self._guide.find(self._ask)
        connection = await self._logged_in(place, self._options, self._login)
        try:
            if isinstance(self._guide, Sentinels):
                await _check_role(connection)
            link = self._taken_over(connection)
        except BaseException:
            await _disconnect(connection)
            raise
        sent = self._asked = uptime()
        try:
            [reply] = await link.exchange(encoded([_TIME]), 1, seconds=self._timeout_s)
        except BaseException:
            link.abort()
            raise
        self._read_clock(reply, sent)  # another error recurs with the first command
        if self._lost:
            self._lost = False
            self.reconnects += 1
        return link

    def _taken_over(self, connection: Connection) -> Link:
        """Make a link from the transport of a connection, after redis-py's handshake."""
        reader, writer = connection._reader, connection._writer  # noqa: SLF001
        if reader is None or writer is None or reader.at_eof() or writer.transport.is_closing():
            raise exceptions.ConnectionError("Connection closed by server.")  # or reset
        link = Link(writer, DefaultParser.parse_error, self._buffer)
        connection._reader = connection._writer = None  # noqa: SLF001
        return link

    async def _logged_in(
        self,
        place: Address | None,
        options: dict[str, Any],
        login: RedisSettings | SentinelSettings,
    ) -> Connection:
        """Connect, and log in with the first password that Redis accepts."""
        tries: list[str | None] = [*passwords(login)] or [options.get("password")]
        *others, last = tries
        for password in others:
            try:
                return await self._opened(place, options | {"password": password})
            except exceptions.RedisError as error:
                if not isinstance(said_by_redis(error), exceptions.AuthenticationError):
                    raise
        return await self._opened(place, options | {"password": last})

    async def _opened(self, place: Address | None, options: dict[str, Any]) -> Connection:
        if place is not None and self._path is None:
            options = options | {"host": place[0], "port": place[1]}
        opened: list[asyncio.WriteTransport] = []

        async def greet(connection: Connection) -> None:
            opened.append(_transport(connection))  # redis-py drops its reference on failure
            await connection.on_connect()

        connection = self._make(**options, redis_connect_func=greet)
        try:
            await connection.connect()
        except BaseException:
            await _disconnect(connection, *opened)
            raise
        return cast(Connection, connection)

    async def read_certificates(self) -> None:
        """Update :attr:`certificates` by new handshakes: open connections may have older ones.

        An untrusted server's earlier entry stays; an unreachable server's entry is removed.
        """
        current = () if self._place is None else (self._place,)
        places = {*self.places, *current, *self.certificates}
        await asyncio.gather(*map(self._read_certificate, places))

    async def _read_certificate(self, place: Address) -> None:
        try:
            async with asyncio.timeout(min(self._timeout_s, _ASKED_S)):
                if (context := self.tls_context()) is None:
                    return
                shown = await shown_certificate(place, context)
        except ssl.SSLError:
            return
        except (OSError, TimeoutError):
            self.certificates.pop(place, None)
            return
        if shown:
            self.certificates[place] = _ends(shown, context)

    async def _ask(self, node: Address, question: tuple[str, ...]) -> Any:
        """Ask a node for the current address and return its reply. Raises BrokerError."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(min(self._timeout_s, _ASKED_S)):
                connection = await self._logged_in(
                    node, self._options | self._guide_options, self._guide_login
                )
                await connection.send_command(*question, check_health=False)
                return await connection.read_response(disconnect_on_error=False)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise self._translated(error, f"{node[0]}:{node[1]}") from error
        finally:
            if connection is not None:
                await _disconnect(connection)

    def _forget(self, place: Address | None = None) -> None:
        """Use ``place`` from now on, and close idle connections.

        None: ask the sentinels or the cluster, if there are any.
        """
        self._place = place
        self._generation += 1
        for link in self._idle:
            link.abort()
        self._idle.clear()

    def _translated(self, error: Exception, address: str = "") -> BrokerError:
        return meaning(error, address or self.address, is_guided=self._guide is not None)

    def hurry(self, seconds: float) -> None:
        """Cap the time-out at ``seconds`` from now on: a last message must not delay shutdown."""
        self._timeout_s = min(self._timeout_s, seconds)

    async def close(self) -> None:
        """Close idle connections now, and busy ones once their replies are read."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


def _options(settings: RedisSettings) -> dict[str, Any]:
    """Build the keyword arguments for redis-py's connections. Raises ConfigError."""
    shown = re.sub(r"//.*@", "//...@", settings.url)  # without credentials
    try:
        options: dict[str, Any] = {"connection_class": Connection, **parse_url(settings.url)}
    except ValueError as error:
        # Don't show the error: it quotes the port, which may be part of a password.
        unquoted = "special characters of a password must be percent-encoded, or in redis.password"
        why = unquoted if "@" in settings.url else error
        raise ConfigError(f"redis.url: {shown!r} is not allowed: {why}") from error
    url = urlsplit(settings.url)
    path = url.path.strip("/")
    if "path" not in options and path and not path.isdecimal():  # redis-py would ignore it
        raise ConfigError(f"redis.url: {shown!r}: {path!r} is not a database number")
    said = parse_qs(url.query, keep_blank_values=True).keys()
    for option in sorted((options.keys() - _OPTIONS) | (said & _OF_THE_URL)):
        raise ConfigError(f"redis.url: {shown!r}: unknown option {option!r}")
    try:
        made = dict(options)
        made.pop("connection_class")(**made)  # connects to nothing
    except TypeError as error:
        name = re.search(r"argument '(\w+)'", str(error))
        other = f"option {name[1] if name else ''!r} does not work with this scheme"
        raise ConfigError(f"redis.url: {shown!r}: {other}") from error
    except exceptions.RedisError as error:  # an invalid TLS option
        raise ConfigError(f"redis.url: {shown!r}: {error}") from error
    if settings.username is not None:
        options["username"] = settings.username
    if settings.tls is not None:
        check_files(settings.tls)
        options |= {
            "ssl_ca_certs": settings.tls.ca,
            "ssl_certfile": settings.tls.cert,
            "ssl_keyfile": settings.tls.key,
        }
    return options


async def shown_certificate(place: Address, context: ssl.SSLContext) -> Mapping[str, Any]:
    """Read a server's certificate; {} if the context verifies no certificates. Raises OSError."""
    _, writer = await asyncio.open_connection(*place, ssl=context)
    shown: Mapping[str, Any] | None = writer.get_extra_info("peercert")
    writer.transport.abort()
    return shown or {}


def _ends(shown: Mapping[str, Any], context: ssl.SSLContext) -> float:
    """The time (seconds since 1970) at which a certificate or its trusted authority expires."""
    chain = [shown, *(one for one in context.get_ca_certs() if one["subject"] == shown["issuer"])]
    return min(ssl.cert_time_to_seconds(one["notAfter"]) for one in chain)


def _transport(connection: Connection) -> asyncio.WriteTransport:
    """The transport of an open connection."""
    return connection._writer.transport  # type: ignore[union-attr]  # noqa: SLF001


async def _disconnect(
    connection: Connection, transport: asyncio.WriteTransport | None = None
) -> None:
    """Close a connection at once, without waiting for a TLS shutdown."""
    if transport is None and connection.is_connected:
        transport = _transport(connection)
    if transport is not None:
        transport.abort()
    await connection.disconnect(nowait=True)


async def _check_role(connection: Connection) -> None:
    """Raise ReadOnlyError unless the node is a master: a sentinel's answer may be stale."""
    await connection.send_command("ROLE", check_health=False)
    role, *_ = await connection.read_response(disconnect_on_error=False)
    if role != b"master":
        raise exceptions.ReadOnlyError(f"it is not a master but a {role.decode()} now")


def _seconds(reply: Sequence[bytes]) -> float:
    """Seconds since 1970 in the reply to TIME."""
    whole, micros = reply
    return int(whole) + int(micros) / 1e6


def _first_error(replies: Sequence[Any]) -> exceptions.ResponseError | None:
    return next((r for r in replies if isinstance(r, exceptions.ResponseError)), None)


def _raise_passing(replies: Sequence[Any]) -> None:
    """Raise the first error that redis-py counts as a connection error, such as LOADING."""
    for reply in replies:
        if isinstance(reply, exceptions.ConnectionError):
            raise reply


def _is_done(command: Command, reply: Any) -> bool:
    """Whether a command took effect, by its reply: MULTI and commands only queued did not."""
    failed = isinstance(reply, exceptions.ResponseError)
    return not failed and command[0] != "MULTI" and reply != b"QUEUED"
