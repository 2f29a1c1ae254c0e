"""What devices send to a gateway: JSON, signed requests and tokens."""

from __future__ import annotations

import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.protocol import headers
from fedstream.protocol.messages import BadBody, Body, CheckIn, Enrolment, Surrender, UpdateReport
from fedstream.protocol.signatures import PrivateKey, pem_of, public_key, read, sign
from tests.fuzz.harness import Target

_DIGEST = "ab" * 32
_KEYS: tuple[PrivateKey, ...] = (
    Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
    derive_private_key(7, SECP256R1()),
)
_BODIES: dict[type[Body], dict[str, Any]] = {
    Enrolment: {"invite": "3-" + "i" * 32, "public_key": pem_of(_KEYS[0].public_key())},
    CheckIn: {
        "nonce": "n" * 22,
        "eligible": True,
        "wait_s": 50,
        "formats": ["f32", "topk:0.1+zstd"],
        "has": _DIGEST,
    },
    Surrender: {"attempt": "0123456789ab", "reason": "raised ValueError"},
    UpdateReport: {
        "digest": _DIGEST,
        "samples": 5,
        "steps": 10,
        "lr": 0.1,
        "loss": 0.5,
        "seconds": 1.5,
        "tau": 3,
        "base": _DIGEST,
        "layout": _DIGEST,
        "format": "f32",
    },
}
_HEADERS = {"Upload-Offset": "17", "Upload-Complete": "?1", "Authorization": "Bearer a.b.c"}


def targets() -> tuple[Target, ...]:
    """All of them."""
    return (
        Target("body", _body, values=list(_BODIES.values()), encode=_json),
        Target("signature", _signature, values=_SIGNED, encode=_json),
        Target("header", _header, texts=[f"{n}: {v}".encode() for n, v in _HEADERS.items()]),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode(errors="surrogatepass")


def _body(data: bytes) -> None:
    """A gateway reads a body. What it takes for a message, it reads the same again."""
    found = 0
    for kind in _BODIES:
        try:
            said = kind.decode(data)
        except BadBody as error:
            last = error
            continue
        found += 1
        assert kind.decode(said.encode()) == said
    if not found:
        raise last


def _signed(key: PrivateKey) -> dict[str, Any]:
    where = {"method": "POST", "authority": "gateway", "path": "/v1/token"}
    given = sign(key, **where, body=b"{}", keyid="17", created=1_763_884_800, nonce="n" * 22)
    return {
        **where,
        "body": "{}",
        "pem": pem_of(key.public_key()),
        "headers": {name.lower(): value for name, value in given.items()},
    }


_SIGNED = [_signed(key) for key in _KEYS]
_ABOUT = ("method", "path", "body", "headers")


def _signature(data: bytes) -> None:
    """A gateway verifies a request with a key from its body. Nothing but what was signed passes."""
    try:
        said = json.loads(data)
        method, path, body, pem = (said[name] for name in ("method", "path", "body", "pem"))
        given = {name: str(value) for name, value in said["headers"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return  # no request
    if not all(isinstance(one, str) for one in (method, path, body, pem)):
        return
    key = public_key(pem)
    read(given).verify(
        key, method=method, authority="gateway", path=path, body=body.encode(errors="surrogatepass")
    )
    about = {name: said[name] for name in _ABOUT[:3]} | {
        "headers": {name: given[name] for name in _SIGNED[0]["headers"]}
    }
    assert about in [{name: one[name] for name in _ABOUT} for one in _SIGNED]


def _header(data: bytes) -> None:
    """A gateway reads a header with a syntax of its own. What it accepts, it would write so."""
    name, _, value = data.decode("latin-1").partition(": ")
    match name:
        case "Upload-Offset":
            assert str(headers.integer(name, value)) == value
        case "Upload-Complete":
            assert headers.as_boolean(headers.boolean(name, value)) == value
        case _:
            assert headers.as_bearer(headers.bearer(value)) == value
