"""A gateway's URL and certificates: what can't work is refused before anything is sent."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from fedstream.core.errors import ConfigError
from fedstream.device.connection import GatewayAddress


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("https://gateway.example", "https://gateway.example"),
        ("https://gateway.example:8443/", "https://gateway.example:8443"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://localhost", "http://localhost"),
    ],
)
def test_url_is_a_host_and_a_port(url: str, base: str) -> None:
    assert str(GatewayAddress(url).base) == base


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gateway.example", "expected https://HOST"),
        ("https://", "expected https://HOST"),
        ("https://gateway.example:99999", "99999"),
        ("https://gateway.example/fed", "a gateway has no folder of its own"),
        ("https://me:secret@gateway.example", "a gateway has no folder of its own"),
        ("http://gateway.example", "use https://"),
    ],
)
def test_other_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url ") as refused:
        _ = GatewayAddress(url).base
    assert why in str(refused.value)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    none, junk = tmp_path / "none.pem", tmp_path / "junk.pem"
    junk.write_text("junk")
    url = "https://gateway.example"
    with pytest.raises(ConfigError, match=r"--ca .*none.pem: cannot be read: No such file"):
        GatewayAddress(url, ca=none).tls()
    with pytest.raises(ConfigError, match=r"--ca .*junk.pem: expected certificates in PEM"):
        GatewayAddress(url, ca=junk).tls()
    with pytest.raises(ConfigError, match=r"--cert .*junk.pem: expected a certificate and its"):
        GatewayAddress(url, cert=junk).tls()
    with pytest.raises(ConfigError, match="--cert-key needs --cert"):
        GatewayAddress(url, cert_key=junk).tls()


def test_certificate_of_the_device_is_loaded_and_an_encrypted_key_refused(tmp_path: Path) -> None:
    pair = tmp_path / "device.pem"
    issued = trustme.CA().issue_cert("device")
    issued.private_key_and_cert_chain_pem.write_to_path(str(pair))
    url = "https://gateway.example"
    assert GatewayAddress(url, cert=pair).tls().verify_mode is ssl.CERT_REQUIRED
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="and its unencrypted private key"):
        GatewayAddress(url, cert=pair, cert_key=locked).tls()


def test_proxy_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert GatewayAddress("https://gateway.example").proxy() == "http://proxy.example:3128"
    assert GatewayAddress("https://inside.example").proxy() is None
    assert GatewayAddress("http://localhost").proxy() is None
