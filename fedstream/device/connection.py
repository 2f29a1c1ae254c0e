"""HTTPS to one gateway: its address, single requests, their failures, and waits between tries.

A try ends with an answer (:class:`Reply`), with NotNow, after which another try may succeed, or
with a permanent error. :meth:`Connection.answered` retries until there is an answer.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from fedstream.core.errors import ConfigError, FedstreamError, distrust
from fedstream.protocol import headers as wire_headers
from fedstream.protocol.messages import BODY, BadBody, Body, Problem
from fedstream.runtime.backoff import Backoff
from fedstream.runtime.tls import RenewedFiles


@dataclass(frozen=True)
class GatewayAddress:
    """A gateway's URL, and the files for TLS with it."""

    url: str
    ca: Path | None = None  # PEM; None: the system's authorities
    cert: Path | None = None  # PEM, of the device, for gateways that ask for one
    cert_key: Path | None = None  # PEM; None: it is in ``cert``

    @property
    def base(self) -> URL:
        """The parsed and checked URL. Raises ConfigError."""
        try:
            url = URL(self.url)
            port = url.port
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or port is None:
            raise ConfigError(f"--url {self.url}: expected https://HOST or https://HOST:PORT")
        if url.path not in ("", "/") or url.query_string or url.fragment or url.user:
            raise ConfigError(
                f"--url {self.url}: expected https://HOST or https://HOST:PORT alone: requests are "
                "signed with their paths, so a gateway has no folder of its own"
            )
        if url.scheme == "http" and not _is_here(url.host):
            raise ConfigError(
                f"--url {self.url}: over http:// anybody on the way could read and change "
                "everything: use https:// (http:// is only for this machine)"
            )
        return url.origin()

    @property
    def files(self) -> list[Path]:
        """The files that :meth:`tls` reads, except the system's."""
        return [one for one in (self.ca, self.cert, self.cert_key) if one is not None]

    def tls(self) -> ssl.SSLContext:
        """The TLS context of connections. Raises ConfigError, naming the file."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca {self.ca}: {_file_trouble(error, 'certificates')}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.cert_key, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                what = _file_trouble(error, "a certificate and its unencrypted private key")
                raise ConfigError(f"--cert {self.cert}: {what}") from error
        elif self.cert_key is not None:
            raise ConfigError("--cert-key needs --cert, the certificate that it belongs to")
        return context

    def proxy(self) -> str | None:
        """The proxy named by the environment (HTTPS_PROXY, NO_PROXY), if any."""
        base = self.base
        if proxy_bypass(base.host or ""):
            return None
        return getproxies().get(base.scheme)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    return ""  # else OpenSSL asks for one at the terminal


def _file_trouble(error: OSError, expected: str) -> str:
    if isinstance(error, ssl.SSLError):
        return f"expected {expected} in PEM"
    return f"cannot be read: {error.strerror}"


class NotNow(FedstreamError):
    """No answer, or an answer that asks for another try later."""

    retriable = True

    def __init__(self, why: str, after_s: float | None = None) -> None:
        """``after_s``: the wait that the gateway asks for; None: unstated."""
        super().__init__(why)
        self.after_s = after_s


class TurnedAway(FedstreamError):
    """The gateway permanently refused a request."""

    def __init__(self, what: str, status: int, reason: str, text: str) -> None:
        """``reason``: of the protocol's closed set, or '' if the answer has none."""
        said = f"{text} ({reason})" if reason else text
        super().__init__(f"the gateway refused {what}: {said}")
        self.status = status
        self.reason = reason


T = TypeVar("T")
B = TypeVar("B", bound=Body)

_CONNECT_S = 15.0
_IDLE_S = 10.0  # of a kept connection, shorter than servers' limits
_ANSWER_S = 30.0  # for an answer's next bytes
_SLOWEST = 16 << 10  # bytes per second of an upload
_MOST_WAIT_S = 60.0  # between tries, unless the gateway asks for more
_LONGEST_WAIT_S = 3600.0  # limit on the wait that the gateway asks for
_PIECE = 1 << 16  # bytes
_CLOSED = (ConnectionResetError, aiohttp.ServerDisconnectedError)
_ABOUT_CERTIFICATES = re.compile("CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE")  # alerts
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, read to its end."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def read(self, decode: Callable[[bytes], T], what: str) -> T:
        """Decode the body, as the method ``decode`` of a message does. Raises FedstreamError."""
        try:
            return decode(self.body)
        except BadBody as error:
            raise FedstreamError(
                f"the gateway's answer to {what} can't be read: {error}: is it of another release?"
            ) from error

    def refusal(self, what: str) -> TurnedAway:
        """The error for an answer that refuses a request."""
        try:
            problem = Problem.decode(self.body)
        except BadBody:
            return TurnedAway(what, self.status, "", f"status {self.status}")
        return TurnedAway(what, self.status, problem.reason, problem.error)


class Connection:
    """Connections to one gateway, as a context manager. ``say``: called when they break."""

    def __init__(self, address: GatewayAddress, say: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self.base, self._proxy = address.base, address.proxy()
        self._address = address
        self._tls = RenewedFiles(address.files, address.tls)
        self._say = say
        self._backoff = Backoff(0.5, _MOST_WAIT_S, rng=random.Random())
        self._trouble_since: float | None = None
        self._has_worked = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, keepalive_timeout=_IDLE_S),
            auto_decompress=False,  # digests cover the sent bytes
            headers={"User-Agent": "fedstream-device", "Accept-Encoding": "identity"},
            trust_env=False,  # True would also send credentials of ~/.netrc
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def once(
        self,
        method: str,
        path: str,
        *,
        body: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Reply:
        """Send one request. ``wait_s``: additional time for the answer.

        Raises NotNow, also if the answer asks for another try.
        """
        send_s = len(body) / _SLOWEST
        async with self.opened(
            method,
            path,
            body=body,
            headers=headers,
            wait_s=wait_s,
            within_s=_CONNECT_S + send_s + wait_s + 2 * _ANSWER_S,
        ) as response:
            return await replied(response, f"{method} {path}")

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        *,
        body: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        within_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and read its answer inside the block.

        ``within_s``: time limit for everything; None: as long as bytes arrive. Raises NotNow, and
        FedstreamError for an untrusted certificate.
        """
        times = aiohttp.ClientTimeout(
            total=within_s, sock_connect=_CONNECT_S, sock_read=_ANSWER_S + wait_s
        )
        try:
            async with self._session.request(
                method,
                self.base.with_path(path),
                data=io.BytesIO(body) if len(body) else None,
                headers={"Content-Type": wire_headers.CONTENT_TYPE, **(headers or {})},
                timeout=times,
                proxy=self._proxy,
                allow_redirects=False,
                ssl=self._newest_tls(),
            ) as response:
                self._has_worked = True
                yield response
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError) as error:
            if not self._has_worked:
                raise FedstreamError(self._untrusted(error)) from error
            raise NotNow(self._untrusted(error)) from error
        except TimeoutError as error:
            raise NotNow(f"{self.base} did not answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._unreachable(error) from error

    def _newest_tls(self) -> ssl.SSLContext:
        """The TLS context for a request: reload renewed files, ignoring unusable ones.

        Connections with an earlier context are not used again.
        """
        return self._tls.look(lambda error: self._say(f"{error}; the files before it stay in use"))

    async def answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call ``ask`` until it succeeds, waiting after each NotNow."""
        while True:
            try:
                return await ask()
            except NotNow as error:
                await self.wait(error)

    async def wait(self, trouble: NotNow) -> None:
        """Wait before the next try: the time that the gateway asks for, or a jittered back-off."""
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
            self._say(f"{trouble}; trying again")
        await self.pause(trouble.after_s)

    async def pause(self, seconds: float | None) -> None:
        """Wait ``seconds`` plus up to a tenth; None: a jittered back-off."""
        if seconds is None:
            seconds = self._backoff.next()
        else:
            seconds = min(seconds, _LONGEST_WAIT_S) * random.uniform(1.0, 1.1)
        await asyncio.sleep(seconds)

    def settled(self) -> None:
        """Note that a request was answered, which resets the back-off."""
        self._backoff.reset()
        if self._trouble_since is not None:
            away_s = time.monotonic() - self._trouble_since
            self._trouble_since = None
            self._say(f"the gateway answers again after {away_s:.1f} s")

    def _unreachable(self, error: Exception) -> FedstreamError:
        """The error for a failed connection, which may be due to a required client certificate.

        A server then sends an alert, or just closes the connection.
        """
        inner = getattr(error, "os_error", None) or error.__cause__ or error
        why, asked = f"cannot reach {self.base}: {_in_words(error)}", ""
        if isinstance(inner, ssl.SSLError) and _ABOUT_CERTIFICATES.search(inner.reason or ""):
            asked = "asks for a certificate of the device"
        elif self.base.scheme == "https" and isinstance(inner, _CLOSED):
            asked = "may ask for a certificate of the device"
        if self._has_worked or not asked:
            return NotNow(why)
        cert = self._address.cert
        if cert is None:
            return NotNow(f"{why}: it {asked}: name yours with --cert FILE")
        return NotNow(f"{why}: it {asked}, and may not accept that of --cert {cert}")

    def _untrusted(self, error: Exception) -> str:
        why = getattr(error, "certificate_error", error)
        said = getattr(why, "verify_message", "") or str(why)
        unsigned = "name the authority that signed it with --ca FILE"
        return f"{self.base} is not trusted: {distrust(said, unsigned)}"


async def replied(response: aiohttp.ClientResponse, what: str) -> Reply:
    """Read an answer to its end. Raises NotNow if it asks for another try at ``what``."""
    data = bytearray()
    async for piece in response.content.iter_chunked(_PIECE):
        data += piece
        if len(data) > BODY:
            raise NotNow(f"an answer to {what} of more than {BODY} bytes")
    found = {name.lower(): value for name, value in response.headers.items()}
    reply = Reply(response.status, found, bytes(data))
    if reply.status in _AGAIN:
        raise NotNow(str(reply.refusal(what)), retry_after(found))
    return reply


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Parse Retry-After, in seconds or a time, into seconds; None without it.

    A time is compared with the answer's Date, as this device's clock may differ.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    if (at := date_of(value)) is not None:
        now = date_of(headers.get("date", "")) or datetime.now(UTC)
        return max(0.0, (at - now).total_seconds())
    return None


def date_of(value: str) -> datetime | None:
    """Parse the time in a header such as Date; None if invalid."""
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _in_words(error: Exception) -> str:
    """The cause of a failed connection, in words and without the address."""
    inner = getattr(error, "os_error", None) or error.__cause__ or error
    number = getattr(inner, "errno", None)
    if isinstance(number, int) and number > 0 and not isinstance(inner, ssl.SSLError):
        return os.strerror(number)
    return str(getattr(inner, "strerror", None) or inner) or type(error).__name__
