"""The table [gateway]: what fits together, and TLS files that can't be used."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError

from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"site": "pool"}, "not trusted"),
        ({"site": "a b"}, "not a valid name"),
        ({"retry_s": (5.0, 1.0)}, "the first is the shorter"),
        ({"retry_s": (5.0, 60.0)}, "must be above gateway.retry_s"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"devices": 50_001}, "50000"),
        ({"poll_s": 51.0}, "50"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GatewaySettings(**given)


def test_certificate_and_key_are_loaded(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(cert, append=True)
    context = GatewaySettings(tls_cert=str(cert), tls_key=str(key)).tls()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert GatewaySettings().tls() is None
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    for wrong, said in (
        (tmp_path / "absent.pem", "No such file"),
        (other, "not a certificate in PEM and its key"),
        (cert, "not a certificate in PEM and its key"),
    ):
        with pytest.raises(ConfigError, match=said):
            GatewaySettings(tls_cert=str(cert), tls_key=str(wrong)).tls()
