"""Signed requests: the RFC's own signatures, our round trip, and that nothing else passes."""

from __future__ import annotations

import base64
import string

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    EllipticCurvePublicKey,
    derive_private_key,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from fedstream.protocol import signatures
from fedstream.protocol.signatures import (
    BadKey,
    BadSignature,
    PrivateKey,
    Signature,
    content_digest,
    pem_of,
    public_key,
    read,
    sign,
)

# RFC 9421, appendix B.1.3 and B.1.4: the example keys.
RFC_P256 = """-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEqIVYZVLCrPZHGHjP17CTW0/+D9Lf
w0EkjqF7xB4FivAxzic30tMM4GF+hR6Dxh71Z50VGGdldkkDXZCnTNnoXQ==
-----END PUBLIC KEY-----
"""
RFC_ED25519 = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs=
-----END PUBLIC KEY-----
"""
RFC_SEED = base64.urlsafe_b64decode("n4Ni-HpISpVObnQMW0wOhCKROaIKqKtW_2ZYb2p9KcU=")

ED25519 = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
P256 = derive_private_key(0xFED57EA4, SECP256R1())
KEYS: dict[str, PrivateKey] = {"ed25519": ED25519, "ecdsa-p256-sha256": P256}
NOW = 1_763_884_800
HOST = "gateway.example:8443"
BODY = b'{"invite": "abc"}'
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256

nonces = st.text(string.ascii_letters + string.digits + "-_", min_size=22, max_size=64)


def signed(key: PrivateKey, body: bytes = BODY) -> dict[str, str]:
    """Headers in lower case, as a server finds them."""
    headers = sign(
        key,
        method="POST",
        authority=HOST,
        path="/v1/token",
        body=body,
        keyid="17",
        created=NOW,
        nonce="n" * 22,
    )
    return {name.lower(): value for name, value in headers.items()}


def check(key: PrivateKey, headers: dict[str, str], body: bytes = BODY) -> Signature:
    found = read(headers)
    found.verify(key.public_key(), method="POST", authority=HOST, path="/v1/token", body=body)
    return found


# known answers


def test_a_digest_is_rfc_9530s() -> None:
    """Appendix B.1 and B.2: a body with a line feed, and an empty one."""
    assert content_digest(b'{"hello": "world"}\n') == (
        "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    )
    assert content_digest(b"") == "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"


def test_rfc_9421s_signature_of_ecdsa_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.2.4 signs a response, so its signature base is given; the rest is ours: key, r and s."""
    base = (
        '"@status": 200\n"content-type": application/json\n'
        '"content-digest": sha-512=:mEWXIS7MaLRuGgxOBdODa3xqM1XdEvxoYhvlCFJ4'
        "1QJgJc4GTsPp29l5oGX69wWdXymyU0rjJuahq4l5aGgfLQ==:\n"
        '"content-length": 23\n'
        '"@signature-params": ("@status" "content-type" "content-digest" "content-length")'
        ';created=1618884473;keyid="test-key-ecc-p256"'
    )
    value = (
        "wNmSUAhwb5LxtOtOpNa6W5xj067m5hFrj0XQ4fvpaCLx0NKocgPquLgyahnzDnDAUy5eCdlYUEkLIj+32oiasw=="
    )
    monkeypatch.setattr(signatures, "signature_base", lambda *_: base.encode())
    found = Signature(
        1618884473,
        "n" * 22,
        "17",
        "ecdsa-p256-sha256",
        content_digest(b""),
        base64.b64decode(value),
    )
    found.verify(public_key(RFC_P256), method="POST", authority=HOST, path="/", body=b"")
    with pytest.raises(BadSignature):
        found.verify(P256.public_key(), method="POST", authority=HOST, path="/", body=b"")


def test_rfc_9421s_signature_of_ed25519_is_made_and_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B.2.6, whose signature is the same each time."""
    base = (
        '"date": Tue, 20 Apr 2021 02:07:55 GMT\n"@method": POST\n"@path": /foo\n'
        '"@authority": example.com\n"content-type": application/json\n"content-length": 18\n'
        '"@signature-params": ("date" "@method" "@path" "@authority" "content-type" '
        '"content-length");created=1618884473;keyid="test-key-ed25519"'
    )
    value = (
        "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
    )
    monkeypatch.setattr(signatures, "signature_base", lambda *_: base.encode())
    key = Ed25519PrivateKey.from_private_bytes(RFC_SEED)
    assert pem_of(key.public_key()) == RFC_ED25519
    headers = signed(key)
    assert headers["signature"] == f"fedstream=:{value}:"
    check(key, headers)


def test_a_request_is_signed_in_the_documented_form() -> None:
    """The bytes that a device in another language must sign."""
    assert signed(ED25519)["signature-input"] == (
        'fedstream=("@method" "@authority" "@path" "content-digest");created=1763884800;'
        'nonce="nnnnnnnnnnnnnnnnnnnnnn";keyid="17";alg="ed25519"'
    )
    about = signatures.parameters(NOW, "n" * 22, "17", "ed25519")
    base = signatures.signature_base(about, "POST", HOST, "/v1/token", content_digest(BODY))
    assert base.decode().splitlines() == [
        '"@method": POST',
        '"@authority": gateway.example:8443',
        '"@path": /v1/token',
        f'"content-digest": {content_digest(BODY)}',
        f'"@signature-params": {about}',
    ]
    assert signed(ED25519)["signature-input"] == f"fedstream={about}"
    value = base64.b64decode(signed(ED25519)["signature"].split(":")[1])
    ED25519.public_key().verify(value, base)


# round trips


@given(
    alg=st.sampled_from(sorted(KEYS)),
    body=st.binary(max_size=200),
    device=st.integers(0, 10**9),
    created=st.integers(0, 10**11),
    nonce=nonces,
    path=st.text(string.ascii_letters + string.digits + "._~/-", max_size=40),
)
def test_what_was_signed_is_verified(
    alg: str, body: bytes, device: int, created: int, nonce: str, path: str
) -> None:
    where = {"method": "POST", "authority": HOST, "path": f"/{path}", "body": body}
    headers = sign(KEYS[alg], keyid=str(device), created=created, nonce=nonce, **where)  # type: ignore[arg-type]
    found = read({name.lower(): value for name, value in headers.items()})
    assert (found.created, found.nonce, found.device, found.alg) == (created, nonce, device, alg)
    found.verify(KEYS[alg].public_key(), **where)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_survives_its_text(key: PrivateKey) -> None:
    found = public_key(pem_of(key.public_key()))
    assert found == key.public_key()
    check(key, signed(key)).verify(
        found, method="POST", authority=HOST, path="/v1/token", body=BODY
    )


# attacks


@given(
    alg=st.sampled_from(sorted(KEYS)),
    name=st.sampled_from(["content-digest", "signature-input", "signature"]),
    at=st.integers(0, 300),
    change=st.sampled_from(["replace", "insert", "delete"]),
    character=st.characters(max_codepoint=0x2FF),
)
def test_a_header_changed_in_one_character_is_refused(
    alg: str, name: str, at: int, change: str, character: str
) -> None:
    headers = signed(KEYS[alg])
    value = headers[name]
    at %= len(value) + (change == "insert")
    rest = value[at:] if change == "insert" else value[at + 1 :]
    headers[name] = value[:at] + ("" if change == "delete" else character) + rest
    assume(headers[name] != value)
    with pytest.raises(BadSignature):
        check(KEYS[alg], headers)


@pytest.mark.parametrize(
    "other",
    [
        {"method": "PUT"},
        {"method": "post"},
        {"authority": "gateway.example"},
        {"authority": "another.example:8443"},
        {"authority": 'gateway.example:8443\n"@path": /x'},
        {"path": "/v1/devices"},
        {"path": "/v1/token/"},
        {"path": "/v1/token?x=1"},
        {"path": '/v1/token\n"content-digest": x'},
        {"body": BODY + b" "},
        {"body": b""},
    ],
    ids=str,
)
def test_another_request_with_the_same_headers_is_refused(other: dict[str, str | bytes]) -> None:
    where = {"method": "POST", "authority": HOST, "path": "/v1/token", "body": BODY, **other}
    with pytest.raises(BadSignature):
        read(signed(P256)).verify(P256.public_key(), **where)  # type: ignore[arg-type]


def test_a_key_decides_which_algorithm_it_is_for() -> None:
    """Else a signature could be checked as one that the attacker finds easier."""
    headers = signed(ED25519)
    headers["signature-input"] = headers["signature-input"].replace("ed25519", "ecdsa-p256-sha256")
    with pytest.raises(BadSignature, match="alg is ecdsa-p256-sha256, but the key is for ed25519"):
        check(ED25519, headers)
    with pytest.raises(BadSignature, match="alg is ed25519, but the key"):
        check(P256, signed(ED25519))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"@path" "content-digest"', '"content-digest" "@path"'),
        ('"@authority" ', ""),
        ('nonce="nnnnnnnnnnnnnnnnnnnnnn";', ""),
        ('nonce="nnnnnnnnnnnnnnnnnnnnnn"', 'nonce="short"'),
        (';alg="ed25519"', ""),
        ("=1763884800", "=01763884800"),
        ('"17"', '"017"'),
        ("fedstream=", "sig1="),
        (';alg="ed25519"', ';alg="ed25519";expires=1'),
        (';alg="ed25519"', ';alg="ed25519"\n'),
        (';alg="ed25519"', ';alg="ed25519", other=();created=1'),
    ],
)
def test_another_form_is_refused(old: str, new: str) -> None:
    headers = signed(ED25519)
    assert old in headers["signature-input"]
    headers["signature-input"] = headers["signature-input"].replace(old, new)
    with pytest.raises(BadSignature, match="not of the form"):
        read(headers)


@pytest.mark.parametrize("name", ["content-digest", "signature-input", "signature"])
def test_a_request_without_a_signature_is_refused(name: str) -> None:
    headers = signed(ED25519)
    del headers[name]
    with pytest.raises(BadSignature, match="must be signed"):
        read(headers)


@pytest.mark.parametrize("value", [b"\0" * 64, b"\xff" * 64, b"\0" * 32 + b"\1" * 32], ids=repr)
@pytest.mark.parametrize("alg", KEYS)
def test_degenerate_signatures_are_refused(alg: str, value: bytes) -> None:
    """r or s of zero, and above the group's order."""
    headers = signed(KEYS[alg])
    headers["signature"] = f"fedstream=:{base64.b64encode(value).decode()}:"
    with pytest.raises(BadSignature):
        check(KEYS[alg], headers)


def test_the_other_s_of_ecdsa_needs_the_same_nonce() -> None:
    """(r, n - s) verifies too, as RFC 9421 has it; it is no second request: its nonce is used."""
    headers = signed(P256)
    raw = base64.b64decode(headers["signature"].split(":")[1])
    other = (ORDER - int.from_bytes(raw[32:])).to_bytes(32)
    headers["signature"] = f"fedstream=:{base64.b64encode(raw[:32] + other).decode()}:"
    assert check(P256, headers).nonce == "n" * 22


def test_what_a_gateway_would_refuse_is_not_signed() -> None:
    for wrong in (
        {"method": "post"},
        {"authority": "Gateway.example"},
        {"path": "/v1/token?x"},
        {"keyid": "me"},
        {"nonce": "short"},
        {"created": -1},
    ):
        where = {
            "method": "POST",
            "authority": HOST,
            "path": "/",
            "body": b"",
            "keyid": "1",
            "created": 1,
            **wrong,
        }
        with pytest.raises(ValueError, match=r"can't be signed|not of the form"):
            sign(ED25519, **where)  # type: ignore[arg-type]


# keys


@pytest.mark.parametrize(
    "key",
    [generate_private_key(SECP384R1()).public_key(), generate_rsa(65537, 2048).public_key()],
    ids=["another curve", "RSA"],
)
def test_other_keys_are_refused(key: EllipticCurvePublicKey | RSAPublicKey) -> None:
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(BadKey):
        public_key(pem)


@pytest.mark.parametrize(
    "pem",
    [
        "ssh-ed25519 AAAA",
        RFC_ED25519 + RFC_P256,
        "hello\n" + RFC_ED25519,
        RFC_P256.replace("AEqIVY", "AEqIVZ"),  # a point that is not on the curve
        "x" * 401,
        "\ud800",
    ],
    ids=range(6),
)
def test_what_is_no_public_key_is_refused(pem: str) -> None:
    with pytest.raises(BadKey):
        public_key(pem)


def test_a_private_key_is_refused() -> None:
    """A device that sends its private key by mistake must not be enrolled with it."""
    pem = ED25519.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with pytest.raises(BadKey):
        public_key(pem)
