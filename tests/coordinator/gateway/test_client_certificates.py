"""Client certificates: a device without one of the authority's gets no further than TLS."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError
from yarl import URL

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.certificate import authorities_in
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.errors import ConfigError
from fedstream.device.connection import Connection, GatewayAddress, NotNow
from tests.coordinator.gateway.places import Place, serving
from tests.support import Hand, counted, wait_until

REFUSED = "fedstream_http_refused_total"


class Authorities:
    """One that signs the gateway's certificate, one that signs devices', and a stranger's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of_gateway, self.of_devices, self.other = (trustme.CA() for _ in range(3))
        issued = self.of_gateway.issue_cert("127.0.0.1")
        self.ca, self.client_ca = folder / "ca.pem", folder / "devices.pem"
        issued.private_key_pem.write_to_path(str(folder / "key.pem"))
        issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        self.of_gateway.cert_pem.write_to_path(str(self.ca))
        self.of_devices.cert_pem.write_to_path(str(self.client_ca))

    @property
    def settings(self) -> dict[str, Any]:
        tls = {"tls_cert": self.folder / "cert.pem", "tls_key": self.folder / "key.pem"}
        return {name: str(path) for name, path in (tls | {"client_ca": self.client_ca}).items()}

    def issued(self, by: trustme.CA, *, days: float = 1, seconds: float = 0) -> Path:
        """A device's certificate with its key."""
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, seconds=seconds)
        file = self.folder / "device.pem"
        made = by.issue_cert("device-3.example", not_after=ends)
        made.private_key_and_cert_chain_pem.write_to_path(str(file))
        return file


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


async def asked(url: str, authorities: Authorities, cert: Path | None) -> int:
    """A device's first request: the answer's status. Raises as the device does."""
    address = GatewayAddress(url, authorities.ca, cert)
    async with Connection(address, lambda _line: None) as connection:
        return (await connection.once("POST", "/v1/none")).status


def https(place: Place) -> str:
    return f"https://127.0.0.1:{URL(place.url).port}"


async def test_device_with_a_certificate_comes_through(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    await hand.create()
    own = authorities.issued(authorities.of_devices)
    async with serving(hand, redis, **authorities.settings) as place:
        assert await asked(https(place), authorities, own) == 404  # by the gateway's routes
        assert counted(place.context, REFUSED, reason="certificate") == 0
        [authority] = authorities_in(authorities.client_ca.read_bytes())
        name = "fedstream_certificate_ends_timestamp_seconds"
        assert counted(place.context, name, certificate="gateway.client_ca") == authority.ends


async def test_device_without_one_is_told_what_it_may_need(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    await hand.create()
    async with serving(hand, redis, **authorities.settings) as place:
        with pytest.raises(NotNow, match=r"asks? for a certificate .*: name yours with --cert"):
            await asked(https(place), authorities, None)
        assert counted(place.context, REFUSED, reason="certificate") == 1
        assert counted(place.context, "fedstream_gateway_refused_total", reason="token") == 0


@pytest.mark.parametrize("whose", ["a stranger's", "the gateway's own", "one that has ended"])
async def test_other_certificates_are_refused(
    redis: RedisSettings, hand: Hand, authorities: Authorities, whose: str
) -> None:
    await hand.create()
    if whose == "one that has ended":
        cert = authorities.issued(authorities.of_devices, days=-1)
    else:
        by = {"a stranger's": authorities.other, "the gateway's own": authorities.of_gateway}
        cert = authorities.issued(by[whose])
    async with serving(hand, redis, **authorities.settings) as place:
        with pytest.raises(NotNow, match=r"may not accept that of --cert .*device\.pem"):
            await asked(https(place), authorities, cert)
        assert counted(place.context, REFUSED, reason="certificate") == 1


async def test_issuing_authority_is_enough(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    """Its root would let in everybody whom the institution ever gave a certificate."""
    issuing = authorities.other.create_child_ca()
    issuing.cert_pem.write_to_path(str(authorities.client_ca))
    await hand.create()
    async with serving(hand, redis, **authorities.settings) as place:
        assert await asked(https(place), authorities, authorities.issued(issuing)) == 404
        with pytest.raises(NotNow, match="may not accept"):
            await asked(https(place), authorities, authorities.issued(authorities.other))


class Resuming:
    """A client that begins as many connections as it can with the session of the one before."""

    def __init__(self, place: Place, authorities: Authorities, cert: Path) -> None:
        self._port = URL(place.url).port
        self._context = ssl.create_default_context(cafile=authorities.ca)
        self._context.load_cert_chain(cert)
        self._session: ssl.SSLSession | None = None

    async def is_answered(self) -> bool:
        """Whether a new connection is let in."""
        return await asyncio.to_thread(self._asks)

    def _asks(self) -> bool:
        address = "127.0.0.1", self._port
        try:
            with (
                socket.create_connection(address, 30) as raw,
                self._context.wrap_socket(
                    raw, server_hostname=address[0], session=self._session
                ) as wire,
            ):
                wire.sendall(b"GET /v1/none HTTP/1.1\r\nHost: gateway\r\n\r\n")
                if not wire.recv(1 << 12).startswith(b"HTTP/1.1 404"):
                    return False
                self._session = wire.session  # with what the gateway gave to resume it with
                return True
        except (ssl.SSLError, ConnectionError):
            return False


async def test_session_of_an_authority_that_was_replaced_is_not_resumed(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    await hand.create()
    async with serving(hand, redis, **authorities.settings) as place:
        old = Resuming(place, authorities, authorities.issued(authorities.of_devices))
        assert await old.is_answered()
        assert await old.is_answered()
        new = Resuming(place, authorities, authorities.issued(authorities.other))
        authorities.other.cert_pem.write_to_path(str(authorities.client_ca))
        await wait_until(new.is_answered)
        assert not await old.is_answered()


async def test_session_does_not_outlast_its_certificate(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    await hand.create()
    async with serving(hand, redis, **authorities.settings) as place:
        brief = authorities.issued(authorities.of_devices, days=0, seconds=3)
        device = Resuming(place, authorities, brief)
        assert await device.is_answered()

        async def is_out() -> bool:
            return not await device.is_answered()

        await wait_until(is_out)
        assert counted(place.context, REFUSED, reason="certificate") == 1


async def test_tls_1_2_which_would_resume_without_tickets_is_not_spoken(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    """Unless no certificates are asked for: then nothing is lost by resuming."""
    await hand.create()
    own = authorities.issued(authorities.of_devices)
    for asks in (True, False):
        settings = authorities.settings | ({} if asks else {"client_ca": None})
        async with serving(hand, redis, **settings) as place:
            device = Resuming(place, authorities, own)
            device._context.maximum_version = ssl.TLSVersion.TLSv1_2
            assert await device.is_answered() is not asks
            assert counted(place.context, REFUSED, reason="tls") == asks


async def test_gateway_that_asks_for_none_takes_any(
    redis: RedisSettings, hand: Hand, authorities: Authorities
) -> None:
    await hand.create()
    settings = authorities.settings | {"client_ca": None}
    async with serving(hand, redis, **settings) as place:
        for cert in (None, authorities.issued(authorities.other)):
            assert await asked(https(place), authorities, cert) == 404


def test_settings_that_would_let_nobody_or_anybody_in(authorities: Authorities) -> None:
    with pytest.raises(ValidationError, match=r"client_ca needs gateway\.tls_cert"):
        GatewaySettings(client_ca="devices.pem")
    flower: dict[str, Any] = {"flower_app": "a.fab", "flower_keys": "keys"}
    with pytest.raises(ValidationError, match="supernodes have no certificates"):
        GatewaySettings(**authorities.settings, **flower)
    authorities.client_ca.write_text("nothing")
    with pytest.raises(ConfigError, match=r"client_ca = .*devices.pem': no certificates in PEM"):
        GatewaySettings(**authorities.settings).tls()
    authorities.client_ca.unlink()
    with pytest.raises(ConfigError, match=r"client_ca = .*devices.pem': No such file"):
        GatewaySettings(**authorities.settings).tls()
