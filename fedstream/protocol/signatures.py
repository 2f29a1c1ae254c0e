"""Signed requests: RFC 9421 (HTTP Message Signatures) in the one form that we send and accept.

A request is signed over its method, the gateway that it is for, its path, and the digest of its
body:

    Content-Digest: sha-256=:...:
    Signature-Input: fedstream=("@method" "@authority" "@path" "content-digest");
        created=1763884800;nonce="...";keyid="17";alg="ed25519"     (one line)
    Signature: fedstream=:...:

Label, components, parameters and their order are fixed, and any other form is refused, so nothing
ambiguous is parsed. The path is the request's; a signed request has no query. ``authority`` is the
gateway's host as the signer knows it, in lower case, with its port unless it is the scheme's
default (RFC 9421, 2.2.3): so a gateway can't forward a signature to another gateway that knows the
same key.

A verifier must also compare ``created`` with its clock, accept each nonce only once, and look the
key up by ``keyid``; :func:`read` therefore comes before :meth:`Signature.verify`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding as KeyEncoding,
)
from cryptography.hazmat.primitives.serialization import (
    PublicFormat,
    load_pem_public_key,
)

from fedstream.core.errors import FedstreamError
from fedstream.protocol.messages import AUTHORITY, KEY_CHARS

PrivateKey: TypeAlias = EllipticCurvePrivateKey | Ed25519PrivateKey
PublicKey: TypeAlias = EllipticCurvePublicKey | Ed25519PublicKey
Algorithm: TypeAlias = Literal["ecdsa-p256-sha256", "ed25519"]

P256: Final = "ecdsa-p256-sha256"
ED25519: Final = "ed25519"
NEW: Final = "new"  # the keyid of a device without a number
WINDOW_S: Final = 60  # largest difference between ``created`` and the verifier's clock

_COORDINATE = 32  # bytes of r and of s, big-endian
_COMPONENTS = '("@method" "@authority" "@path" "content-digest")'
_INPUT = re.compile(
    r'fedstream=\("@method" "@authority" "@path" "content-digest"\);created=(0|[1-9][0-9]{0,11})'
    r';nonce="([A-Za-z0-9_-]{22,64})";keyid="(new|0|[1-9][0-9]{0,9})"'
    r';alg="(ecdsa-p256-sha256|ed25519)"'
)
_SIGNATURE = re.compile(r"fedstream=:([A-Za-z0-9+/]{86}==):")
_METHOD = re.compile(r"[A-Z]{1,20}")
_AUTHORITY = re.compile(AUTHORITY)
_PATH = re.compile(r"/[A-Za-z0-9._~/-]{0,400}")


class BadSignature(FedstreamError):
    """A request without a signature, in another form, or signed by another key."""


class BadKey(FedstreamError):
    """A public key that is neither of P-256 nor of Ed25519."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A request's signature, not trusted before :meth:`verify`."""

    created: int  # seconds since 1970, by the signer's clock
    nonce: str
    keyid: str  # a device's number, or NEW
    alg: Algorithm
    digest: str  # the header Content-Digest
    value: bytes  # 64 bytes: r and s of ECDSA (RFC 9421, 3.3.4), or Ed25519's (RFC 8032)

    @property
    def device(self) -> int | None:
        """The claimed number of the signing device; None for a new one."""
        return None if self.keyid == NEW else int(self.keyid)

    def verify(
        self, key: PublicKey, *, method: str, authority: str, path: str, body: bytes
    ) -> None:
        """Check that ``key`` signed this request. Raises BadSignature."""
        if self.digest != content_digest(body):
            raise BadSignature("Content-Digest is not the digest of the body")
        if self.alg != algorithm_of(key):
            raise BadSignature(f"alg is {self.alg}, but the key is for {algorithm_of(key)}")
        try:
            base = signature_base(self._parameters(), method, authority, path, self.digest)
        except ValueError as error:
            raise BadSignature(str(error)) from error
        try:
            if isinstance(key, Ed25519PublicKey):
                key.verify(self.value, base)
            else:
                r, s = (int.from_bytes(one) for one in _halves(self.value))
                key.verify(encode_dss_signature(r, s), base, ECDSA(SHA256()))
        except InvalidSignature as error:
            raise BadSignature(
                f"the signature is not that of the request to {authority} by this key"
            ) from error

    def _parameters(self) -> str:
        return parameters(self.created, self.nonce, self.keyid, self.alg)


def read(headers: Mapping[str, str]) -> Signature:
    """The signature in a request's headers. Raises BadSignature.

    ``headers``: by names in lower case, or a mapping that ignores case. Each header must occur
    once; values joined by commas are refused here, but a list of headers must be checked by the
    caller.
    """
    values = [headers.get(name) for name in ("content-digest", "signature-input", "signature")]
    digest, given, signature = values
    if digest is None or given is None or signature is None:
        raise BadSignature(
            "this request must be signed: Content-Digest, Signature-Input and Signature"
        )
    found, value = _INPUT.fullmatch(given), _SIGNATURE.fullmatch(signature)
    if found is None:
        raise BadSignature(
            f"Signature-Input is not of the form fedstream={_COMPONENTS};created=...;"
            'nonce="...";keyid="...";alg="..."'
        )
    if value is None or (raw := _decoded(value[1])) is None:
        raise BadSignature("Signature is not of the form fedstream=:...:, with 64 bytes in base64")
    alg: Algorithm = P256 if found[4] == P256 else ED25519
    return Signature(int(found[1]), found[2], found[3], alg, digest, raw)


def sign(
    key: PrivateKey,
    *,
    method: str,
    authority: str,
    path: str,
    body: bytes,
    keyid: str,
    created: int,
    nonce: str | None = None,
) -> dict[str, str]:
    """The headers that sign a request: Content-Digest, Signature-Input and Signature.

    ``keyid``: the device's number, or NEW. ``created``: seconds since 1970. ``nonce``: None for a
    fresh one. Raises ValueError for invalid values.
    """
    about = parameters(created, nonce or new_nonce(), keyid, algorithm_of(key.public_key()))
    if not _INPUT.fullmatch(f"fedstream={about}"):
        raise ValueError(f"not of the form that a gateway accepts: {about}")
    digest = content_digest(body)
    base = signature_base(about, method, authority, path, digest)
    if isinstance(key, Ed25519PrivateKey):
        value = key.sign(base)
    else:
        r, s = decode_dss_signature(key.sign(base, ECDSA(SHA256())))
        value = r.to_bytes(_COORDINATE) + s.to_bytes(_COORDINATE)
    return {
        "Content-Digest": digest,
        "Signature-Input": f"fedstream={about}",
        "Signature": f"fedstream=:{base64.b64encode(value).decode()}:",
    }


def signature_base(parameters: str, method: str, authority: str, path: str, digest: str) -> bytes:
    """The signed bytes (RFC 9421, 2.5). Raises ValueError for values that don't fit our form.

    ``parameters``: as :func:`parameters` writes them.
    """
    if not _METHOD.fullmatch(method):
        raise ValueError(f"method {method[:20]!r} can't be signed: expected capital letters")
    if not _AUTHORITY.fullmatch(authority):
        raise ValueError(
            f"authority {authority[:80]!r} can't be signed: expected a host in lower case, and "
            "perhaps a port"
        )
    if not _PATH.fullmatch(path):
        raise ValueError(f"path {path[:80]!r} can't be signed: only letters, digits and ._~/- may")
    return (
        f'"@method": {method}\n"@authority": {authority}\n"@path": {path}\n'
        f'"content-digest": {digest}\n'
        f'"@signature-params": {parameters}'
    ).encode()


def parameters(created: int, nonce: str, keyid: str, alg: Algorithm) -> str:
    """The components and parameters of a signature, without its label."""
    return f'{_COMPONENTS};created={created};nonce="{nonce}";keyid="{keyid}";alg="{alg}"'


def content_digest(body: bytes) -> str:
    """The header Content-Digest (RFC 9530) of a body: its SHA-256 in base64."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def new_nonce() -> str:
    """128 random bits as 22 characters of base64url."""
    return secrets.token_urlsafe(16)


def algorithm_of(key: PublicKey) -> Algorithm:
    """The algorithm of a key."""
    return ED25519 if isinstance(key, Ed25519PublicKey) else P256


def public_key(pem: str) -> PublicKey:
    """The public key in a PEM of a SubjectPublicKeyInfo. Raises BadKey.

    Accepts only the form that :func:`pem_of` writes, so that each key has one text.
    """
    if len(pem) > KEY_CHARS:
        raise BadKey(f"a public key of {len(pem)} characters: {KEY_CHARS} are enough")
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadKey("not a public key in PEM (SubjectPublicKeyInfo)") from error
    other_curve = isinstance(key, EllipticCurvePublicKey) and not isinstance(key.curve, SECP256R1)
    if other_curve or not isinstance(key, EllipticCurvePublicKey | Ed25519PublicKey):
        raise BadKey("a public key must be of P-256 or Ed25519")
    if pem.strip() != pem_of(key).strip():
        raise BadKey("a public key must be one PEM block of 64 characters a line, uncompressed")
    return key


def pem_of(key: PublicKey) -> str:
    """A public key as PEM of its SubjectPublicKeyInfo."""
    return key.public_bytes(KeyEncoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _decoded(text: str) -> bytes | None:
    """Decode 64 bytes from canonical base64; None for any other text."""
    raw = base64.b64decode(text)
    return raw if base64.b64encode(raw).decode() == text else None


def _halves(value: bytes) -> tuple[bytes, bytes]:
    return value[:_COORDINATE], value[_COORDINATE:]
