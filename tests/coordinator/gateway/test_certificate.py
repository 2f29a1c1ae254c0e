"""A gateway's certificate is renewed while it runs, over real TLS."""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs
from yarl import URL

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.certificate import certificate_in
from fedstream.protocol.messages import ENROL_ROUTE, Enrolment
from fedstream.protocol.signatures import pem_of, sign
from tests.coordinator.gateway.phones import INVITE, invite
from tests.coordinator.gateway.places import Place, serving
from tests.support import Hand, counted, wait_until

ENDS = "fedstream_certificate_ends_timestamp_seconds"
OWN = {"certificate": "gateway.tls_cert"}


class Secret:
    """Two files, which the kubelet replaces together, by swapping a link to their folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._versions = 0
        self.trusting = ssl.create_default_context()
        self._authority.configure_trust(self.trusting)
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        for file in (self.cert, self.key):
            file.symlink_to(Path("..data") / file.name)

    def issued(self, *names: str) -> tuple[bytes, bytes]:
        """A new certificate, also for these names, and its key."""
        one = self._authority.issue_cert("127.0.0.1", "localhost", *names)
        return one.cert_chain_pems[0].bytes(), one.private_key_pem.bytes()

    def put(self, cert: bytes, key: bytes) -> None:
        self._versions += 1
        folder = self._folder / f"..{self._versions}"
        folder.mkdir()
        (folder / "tls.crt").write_bytes(cert)
        (folder / "tls.key").write_bytes(key)
        link = self._folder / "..data_tmp"
        link.symlink_to(folder.name)
        link.rename(self._folder / "..data")

    @property
    def settings(self) -> dict[str, Any]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path)


class Connection:
    """A connection over TLS, to a server that is named or not (SNI)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def certificate(self) -> x509.Certificate:
        """The server's."""
        shown = self._writer.get_extra_info("ssl_object").getpeercert(True)
        return x509.load_der_x509_certificate(shown)

    async def answers(self) -> bool:
        self._writer.write(b"GET /v1/none HTTP/1.1\r\nHost: gateway\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        await self._reader.readexactly(size)
        return head.startswith(b"HTTP/1.1 404")

    def close(self) -> None:
        self._writer.close()


async def connected(place: Place, secret: Secret, name: str = "127.0.0.1") -> Connection:
    port = URL(place.url).port
    return Connection(
        *await asyncio.open_connection("127.0.0.1", port, ssl=secret.trusting, server_hostname=name)
    )


async def shown(place: Place, secret: Secret, name: str = "127.0.0.1") -> x509.Certificate:
    """The certificate of a new connection."""
    one = await connected(place, secret, name)
    one.close()
    return one.certificate


async def test_new_connections_get_the_renewed_certificate(
    redis: RedisSettings, hand: Hand, secret: Secret
) -> None:
    """And those that are open go on."""
    await hand.create()
    (first, first_key), (second, second_key) = secret.issued(), secret.issued()
    secret.put(first, first_key)
    async with serving(hand, redis, **secret.settings) as place:
        open_ = await connected(place, secret)
        assert open_.certificate == x509.load_pem_x509_certificate(first)
        secret.put(second, second_key)
        renewed = x509.load_pem_x509_certificate(second)

        async def is_shown() -> bool:
            return await shown(place, secret) == renewed

        await wait_until(is_shown)
        assert await shown(place, secret, "localhost") == renewed
        assert counted(place.context, ENDS, **OWN) == certificate_in(second).ends
        assert await open_.answers()
        open_.close()


async def test_renewed_certificate_says_which_names_the_gateway_has(
    redis: RedisSettings, hand: Hand, secret: Secret
) -> None:
    """Signatures for a name that it has no more are worth nothing, those for a new one count."""
    await hand.create()
    await invite(hand)
    secret.put(*secret.issued("old.example"))
    key = Ed25519PrivateKey.generate()
    body = Enrolment(invite=INVITE, public_key=pem_of(key.public_key())).encode()
    async with serving(hand, redis, **secret.settings) as place:

        async def enrols(name: str) -> int:
            signed = sign(
                key,
                method="POST",
                authority=name,
                path=ENROL_ROUTE,
                body=body,
                keyid="new",
                created=int(time.time()),
            )
            async with place.session.post(
                f"https://127.0.0.1:{URL(place.url).port}{ENROL_ROUTE}",
                data=body,
                headers={**signed, "Host": name},
                ssl=secret.trusting,
            ) as answer:
                return answer.status

        assert (await enrols("new.example"), await enrols("old.example")) == (401, 201)
        secret.put(*secret.issued("new.example"))

        async def is_known() -> bool:
            return await enrols("new.example") == 200

        await wait_until(is_known)
        assert await enrols("old.example") == 401


async def test_certificate_is_renewed_before_there_is_a_run(
    redis: RedisSettings, hand: Hand, secret: Secret
) -> None:
    first, second = secret.issued(), secret.issued()
    secret.put(*first)
    with capture_logs() as lines:
        async with serving(hand, redis, is_open=False, **secret.settings) as place:
            assert await shown(place, secret) == x509.load_pem_x509_certificate(first[0])
            assert not any("certificate" in line["event"] for line in lines)
            secret.put(*second)

            async def is_shown() -> bool:
                return await shown(place, secret) == x509.load_pem_x509_certificate(second[0])

            await wait_until(is_shown)


async def test_files_that_do_not_fit_are_reported_once_and_not_served(
    redis: RedisSettings, hand: Hand, secret: Secret
) -> None:
    await hand.create()
    first, second = secret.issued(), secret.issued()
    secret.put(*first)
    with capture_logs() as lines:

        def told() -> list[str]:
            return [line["event"] for line in lines if line["log_level"] == "error"]

        def has_told(times: int) -> bool:
            return len(told()) == times

        async with serving(hand, redis, **secret.settings) as place:
            for number, broken in enumerate(((second[0], first[1]), (b"", b"")), 1):
                secret.put(*broken)
                await wait_until(partial(has_told, number))
                assert await shown(place, secret) == x509.load_pem_x509_certificate(first[0])
            secret.key.unlink()
            await wait_until(partial(has_told, 3))
            secret.key.symlink_to("..data/tls.key")
            secret.put(*second)

            async def is_shown() -> bool:
                return await shown(place, secret) == x509.load_pem_x509_certificate(second[0])

            await wait_until(is_shown)
    assert told() == ["the new certificate can't be used: the one before stays"] * 3
    reasons = [line["reason"] for line in lines if line["log_level"] == "error"]
    assert "not a certificate in PEM and its key" in reasons[0]
    assert "No such file" in reasons[2]
