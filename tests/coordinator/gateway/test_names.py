"""A signature is for one gateway: it cannot be passed on to another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from fedstream.coordinator.gateway.auth import AcceptedNames
from fedstream.coordinator.gateway.certificate import ServedCertificate
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.protocol.messages import TOKEN_ROUTE
from tests.coordinator.gateway.phones import NAME, Phone, Replica, invite, said
from tests.support import Hand


async def test_a_signature_for_another_gateway_is_refused(phone: Phone) -> None:
    """Whatever Host says, and although both know the device's key."""
    await phone.join()
    led_astray = Phone(phone.http, phone.key, authority="evil.example")
    for host in ("evil.example", NAME):
        headers = led_astray.signing(TOKEN_ROUTE, b"{}") | {"Host": host}
        refused = await phone.signed(TOKEN_ROUTE, b"{}", headers=headers)
        assert await said(refused) == (401, "signature")
    assert await said(await led_astray.enrol()) == (401, "signature")
    assert (await phone.ask_token()).status == 200


async def test_a_gateway_may_have_several_names(replica: Replica, hand: Hand) -> None:
    phone = await replica(names=("gateway.example:8443", NAME))
    await invite(hand)
    assert (await phone.enrol()).status == 201
    phone.authority = "gateway.example:8443"
    assert (await phone.ask_token()).status == 200


async def test_without_names_the_header_says_it(replica: Replica, hand: Hand) -> None:
    phone = await replica(names=())
    await invite(hand)
    assert await said(await phone.enrol()) == (401, "signature")
    phone.authority = phone.http.make_url("/").authority
    assert (await phone.enrol()).status == 201


def _as_said(name: str) -> x509.GeneralName:
    """Capitals stay: trustme would write small letters."""
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def names_of(folder: Path, *names: str) -> AcceptedNames:
    """Of a gateway with a certificate for these."""
    key, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    nobody = x509.Name([])
    certificate = (
        x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([_as_said(name) for name in names]), True)
        .sign(key, None)
    )
    file = folder / "cert.pem"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(certificate.public_bytes(Encoding.PEM) + secret)
    settings = GatewaySettings(tls_cert=str(file), tls_key=str(file))
    return AcceptedNames(settings, ServedCertificate(settings))


@pytest.mark.parametrize(
    ("host", "signed_for"),
    [
        ("gateway.example", "gateway.example"),
        ("Gateway.Example:443", "gateway.example"),
        ("gateway.example:8443", "gateway.example:8443"),
        ("a.phones.example", "a.phones.example"),
        ("127.0.0.1:8443", "127.0.0.1:8443"),
        ("[::1]:8443", "[::1]:8443"),
        ("[2001:DB8:0:0::0001]:8443", "[2001:db8:0:0::0001]:8443"),
        ("[::ffff:10.0.0.1]", "[::ffff:10.0.0.1]"),
        ("capitals.example", "capitals.example"),
        ("a.tablets.example", "a.tablets.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ],
)
def test_names_of_the_certificate_count(tmp_path: Path, host: str, signed_for: str) -> None:
    found = names_of(
        tmp_path,
        "gateway.example",
        "*.phones.example",
        "127.0.0.1",
        "::1",
        "2001:db8::1",
        "::ffff:a00:1",
        "Capitals.Example",
        "*.Tablets.Example",
        "xn--bcher-kva.example",
    )
    assert found.of(host) == (signed_for,)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "gateway.example.evil.example",
        "phones.example",
        "b.a.phones.example",
        "gateway.example:x",
        "[::1",
        "gateway.example@evil.example",
    ],
)
def test_other_hosts_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(Refusal, match=r"gateway\.names"):
        names_of(tmp_path, "gateway.example", "*.phones.example", "127.0.0.1", "::1").of(host)


def test_a_name_is_as_devices_sign_it() -> None:
    for wrong in ("Gateway.example", "https://gateway.example", ""):
        with pytest.raises(ValidationError):
            GatewaySettings(names=(wrong,))
