"""Requests to a gateway: tries, waits, tokens, clocks, certificates, and what is final."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import trustme

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.device.connection import (
    Connection,
    GatewayAddress,
    NotNow,
    TurnedAway,
    date_of,
    retry_after,
)
from fedstream.device.gateway import OwnGateway
from fedstream.protocol.messages import CheckIn, Surrender
from tests.device.fake import FakeGateway

ASKS = CheckIn(nonce="n" * 22, wait_s=0.0)
CHECK_IN, TOKEN = "POST /v1/check-in", "POST /v1/token"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The waits between tries, which take no time: None is the back-off's."""
    found: list[float | None] = []

    async def pause(_self: Connection, seconds: float | None) -> None:
        found.append(seconds)

    monkeypatch.setattr(Connection, "pause", pause)
    return found


async def test_without_a_task_the_answer_is_when_to_ask_again(
    own: OwnGateway, gateway: FakeGateway
) -> None:
    assert await own.check_in(ASKS) == 0.0


async def test_token_is_renewed_before_it_expires(
    own: OwnGateway, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("fedstream.device.gateway.time.monotonic", lambda: now)
    await own.check_in(ASKS)
    now += 479
    await own.check_in(ASKS)
    assert gateway.asked.count(TOKEN) == 1
    now += 2
    await own.check_in(ASKS)
    assert gateway.asked.count(TOKEN) == 2, "with a fifth of its 600 s left"


async def test_refused_token_is_asked_for_anew_once(own: OwnGateway, gateway: FakeGateway) -> None:
    await own.check_in(ASKS)
    gateway.tokens.clear()  # such as after a change of the gateway's secret
    await own.check_in(ASKS)
    assert gateway.asked == [TOKEN, CHECK_IN, CHECK_IN, TOKEN, CHECK_IN]


async def test_token_is_asked_for_anew_where_nothing_says_that_it_was_refused(
    own: OwnGateway, gateway: FakeGateway
) -> None:
    """An answer to HEAD has no body. The one to the request for a token tells who is revoked."""
    path = "/v1/tasks/t/updates/a"
    gateway.fails("HEAD", path, status=401, reason="token")
    assert (await own.once("HEAD", path)).status == 404, "it has not begun, but is known"
    assert gateway.asked == [TOKEN, f"HEAD {path}", TOKEN, f"HEAD {path}"]
    gateway.fails("HEAD", path, status=401, reason="revoked")
    gateway.fails("POST", "/v1/token", status=401, reason="revoked")
    with pytest.raises(TurnedAway, match="revoked"):
        await own.once("HEAD", path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/v1/check-in", "token"), ("/v1/token", "unknown device"), ("/v1/token", "clock")],
)
async def test_refusal_of_a_known_device_is_final_after_minutes(
    own: OwnGateway,
    gateway: FakeGateway,
    waits: list[float | None],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    reason: str,
) -> None:
    now = 1000.0
    monkeypatch.setattr("fedstream.device.gateway.time.monotonic", lambda: now)

    def refuse(times: int) -> None:
        gateway.tokens.clear()
        for _ in range(times):
            gateway.fails("POST", path, status=401, reason=reason)

    await own.check_in(ASKS)
    refuse(6)
    await own.check_in(ASKS)
    assert len(waits) in (3, 6), "with a new token, or for one"
    refuse(2)
    with pytest.raises(NotNow, match=reason):
        await own.once("POST", "/v1/check-in", body=ASKS.encode())
    now += 301
    refuse(2)
    with pytest.raises(FedstreamError, match=reason) as final:
        await own.check_in(ASKS)
    assert not isinstance(final.value, NotNow)


async def test_revoked_device_is_turned_away(own: OwnGateway, gateway: FakeGateway) -> None:
    gateway.fails("POST", "/v1/token", status=401, reason="revoked")
    with pytest.raises(TurnedAway, match="refused this device's key: it is revoked") as refused:
        await own.check_in(ASKS)
    assert refused.value.reason == "revoked"


async def test_device_with_a_wrong_clock_signs_by_its_gateways(
    own: OwnGateway, gateway: FakeGateway
) -> None:
    gateway.clock_s = -7410.0
    await own.check_in(ASKS)
    assert gateway.asked == [TOKEN, TOKEN, CHECK_IN]
    await own.token(fresh=True)
    assert gateway.asked == [TOKEN, TOKEN, CHECK_IN, TOKEN]
    gateway.clock_s = 0.0  # or this device's was set
    await own.token(fresh=True)
    assert gateway.asked[4:] == [TOKEN, TOKEN]


async def test_lost_answer_is_asked_for_with_the_same_nonce(
    own: OwnGateway, gateway: FakeGateway, model: Model, waits: list[float | None], said: list[str]
) -> None:
    offer = gateway.offer(model)
    gateway.fails("POST", "/v1/check-in")
    assert await own.check_in(ASKS) == offer
    assert [one.nonce for one in gateway.check_ins] == [ASKS.nonce] * 2
    assert waits == [None]
    assert len(said) == 2
    assert said[0].startswith("cannot reach http://")
    assert said[1].startswith("the gateway answers again after")


async def test_signed_request_is_signed_anew_for_each_try(
    own: OwnGateway, gateway: FakeGateway, waits: list[float | None]
) -> None:
    gateway.fails("POST", "/v1/token")  # the gateway has taken the nonce
    await own.check_in(ASKS)
    assert len(gateway.nonces) == 2


async def test_signed_request_that_was_repeated_on_the_way_is_signed_anew(
    own: OwnGateway, gateway: FakeGateway, waits: list[float | None], said: list[str]
) -> None:
    gateway.fails("POST", "/v1/token", status=401, reason="nonce")
    await own.check_in(ASKS)
    assert gateway.asked == [TOKEN, TOKEN, CHECK_IN]
    assert len(waits) == 1
    assert "nonce" in said[0]


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_gateway_says_how_long_to_wait(
    own: OwnGateway, gateway: FakeGateway, waits: list[float | None], status: int
) -> None:
    gateway.fails("POST", "/v1/check-in", status=status, headers={"Retry-After": "17"})
    await own.check_in(ASKS)
    assert waits == [17.0]


async def test_wait_is_jittered_and_bounded(
    own: OwnGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("fedstream.device.connection.asyncio.sleep", sleep)
    for _ in range(50):
        await own.connection.pause(10.0)
    assert 10.0 <= min(slept) < max(slept) <= 11.0
    await own.connection.pause(1e9)
    assert slept[-1] <= 3600 * 1.1


async def test_other_refusals_are_final(own: OwnGateway, gateway: FakeGateway) -> None:
    gateway.fails("POST", "/v1/tasks/t/give-up", status=404, reason="unknown task")
    with pytest.raises(TurnedAway) as refused:
        await own.give_up("t", Surrender(attempt="0" * 12, reason="dropped out"))
    assert (refused.value.status, refused.value.reason) == (404, "unknown task")
    assert str(refused.value) == "the gateway refused giving up: it is unknown task (unknown task)"


def test_retry_after_is_seconds_or_a_time() -> None:
    said = {"retry-after": "Fri, 27 Nov 2026 04:00:10 GMT"}  # of a clock that this one differs from
    assert retry_after(said | {"date": "Fri, 27 Nov 2026 04:00:00 GMT"}) == 10.0
    at = datetime.now(UTC) + timedelta(seconds=90)
    assert retry_after({"retry-after": "5"}) == 5.0
    assert retry_after({"retry-after": format_datetime(at, usegmt=True)}) == pytest.approx(
        89, abs=2
    )
    assert retry_after({"retry-after": "Mon, 23 Nov 2020 08:00:00 GMT"}) == 0.0
    for nonsense in ("", "soon", "-1", "9" * 12, "\u0662"):
        assert retry_after({"retry-after": nonsense}) is None
    assert date_of("nonsense") is None


async def test_redirects_are_not_followed(own: OwnGateway, gateway: FakeGateway) -> None:
    gateway.fails("POST", "/v1/check-in", status=307, headers={"Location": "/v1/elsewhere"})
    with pytest.raises(TurnedAway) as refused:
        await own.check_in(ASKS)
    assert refused.value.status == 307
    assert "POST /v1/elsewhere" not in gateway.asked


async def test_endless_answer_is_not_read(own: OwnGateway, gateway: FakeGateway) -> None:
    gateway.models["d" * 64] = bytes(1 << 20)
    with pytest.raises(NotNow, match="of more than 65536 bytes"):
        await own.once("GET", f"/v1/models/{'d' * 64}")


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def secured(
    gateway: FakeGateway, certificate: trustme.LeafCert, asks: trustme.CA | None = None
) -> AsyncIterator[str]:
    """The gateway's address, with this certificate; ``asks``: for one by this authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    if asks is not None:
        asks.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    server = gateway.server()
    await server.start_server(ssl=context)
    yield f"https://localhost:{server.port}"
    await server.close()


async def test_renewed_files_are_used_by_the_next_request(
    gateway: FakeGateway, authority: trustme.CA, tmp_path: Path, said: list[str]
) -> None:
    """Of the authority that is trusted, and of the device's own certificate."""
    ca, cert = tmp_path / "ca.pem", tmp_path / "cert.pem"
    stranger = trustme.CA()

    def writes(trusted: trustme.CA, signer: trustme.CA) -> None:
        ca.write_bytes(trusted.cert_pem.bytes())
        cert.write_bytes(signer.issue_cert("d").private_key_and_cert_chain_pem.bytes())

    writes(authority, authority)
    async with (
        secured(gateway, authority.issue_cert("localhost"), authority) as url,
        Connection(GatewayAddress(url, ca=ca, cert=cert), said.append) as connection,
    ):
        assert (await connection.once("GET", "/")).status == 404
        cert.write_text("no certificate")
        assert (await connection.once("GET", "/")).status == 404
        assert len(said) == 1
        assert said[0].startswith(f"--cert {cert}: expected a certificate and its unencrypted")
        for trusted, signer in ((stranger, authority), (authority, stranger)):
            writes(trusted, signer)
            with pytest.raises(NotNow):
                await connection.once("GET", "/")
        writes(authority, authority)
        assert (await connection.once("GET", "/")).status == 404


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("localhost", "local issuer certificate.*name the authority that signed it with --ca FILE"),
        ("elsewhere.example", "is not for localhost: issue one that names localhost"),
    ],
)
async def test_certificate_that_is_not_trusted_ends_it_with_advice(
    gateway: FakeGateway,
    authority: trustme.CA,
    tmp_path: Path,
    said: list[str],
    name: str,
    advice: str,
) -> None:
    trusted = trustme.CA() if name == "localhost" else authority
    trusted.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with (
        secured(gateway, authority.issue_cert(name)) as url,
        Connection(GatewayAddress(url, ca=tmp_path / "ca.pem"), said.append) as connection,
    ):
        with pytest.raises(FedstreamError, match=rf"is not trusted: .*{advice}$") as refused:
            await connection.once("GET", "/")
    assert not isinstance(refused.value, NotNow)


async def test_proxy_of_the_environment_carries_tls(
    gateway: FakeGateway,
    authority: trustme.CA,
    own: OwnGateway,
    tmp_path: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode())
        host, _, port = asked[-1].split()[1].partition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, back), pump(there, writer))

    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with (
        secured(gateway, authority.issue_cert("localhost")) as url,
        await asyncio.start_server(carry, "127.0.0.1", 0) as proxy,
    ):
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        address = GatewayAddress(url, ca=tmp_path / "ca.pem")
        async with Connection(address, said.append) as connection:
            assert await OwnGateway(connection, own._key, 7).check_in(ASKS) == 0.0
    assert asked == [f"CONNECT {url.removeprefix('https://')} HTTP/1.1"]


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carries bytes to their end."""
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()
