"""Authentication of devices: invites, enrolment, tokens, and the device of each request.

A device signs one request every ten minutes with its enrolled key, and gets a token (JWT, HS256)
for its other requests. A token is valid for one device and key, one run and one gateway; the token
ends early if the device is revoked or enrols with another key.

An invite begins with the device's number, followed by 192 random bits. Redis has only its digest.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from email.utils import formatdate
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

import jwt
from aiohttp import hdrs, web
from yarl import URL

from fedstream.coordinator.gateway.attestation import Newcomer, NotAttested
from fedstream.coordinator.gateway.refusals import Quota, Refusal, body_of, json_answer
from fedstream.coordinator.gateway.registry import Registry
from fedstream.core.digest import digest_of
from fedstream.protocol import headers
from fedstream.protocol.headers import BadHeader
from fedstream.protocol.messages import (
    ENROL_ROUTE,
    TOKEN_ROUTE,
    Access,
    Enrolled,
    Enrolment,
    Nothing,
)
from fedstream.protocol.signatures import (
    WINDOW_S,
    BadKey,
    BadSignature,
    PublicKey,
    Signature,
    pem_of,
    public_key,
    read,
)

if TYPE_CHECKING:
    from fedstream.broker.ledger.gateway import Enrolling, GatewayLedger, Registration
    from fedstream.coordinator.gateway.attestation import Doubt
    from fedstream.coordinator.gateway.certificate import ServedCertificate
    from fedstream.coordinator.gateway.refusals import RefusalReason
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.protocol.messages import Attestation

_FORM = re.compile(r"(0|[1-9][0-9]{0,9})-[A-Za-z0-9_-]{22,53}")


def new_invite(device: int) -> str:
    """Make an unguessable invite."""
    return f"{device}-{secrets.token_urlsafe(24)}"


def device_in(invite: str) -> int | None:
    """The device number in an invite; None if the invite is malformed."""
    found = _FORM.fullmatch(invite)
    return int(found[1]) if found else None


class AcceptedNames:
    """The host names that signed requests may be for: configured ones, or the certificate's.

    Without this check, a server that devices talk to by mistake could forward their signed requests
    and get their tokens. Without names and certificate, any name is accepted: then the proxy in
    front decides.
    """

    def __init__(self, settings: GatewaySettings, served: ServedCertificate | None) -> None:
        """``served``: None for plain HTTP."""
        self._names = settings.names
        self._served = served

    def of(self, host: str) -> Sequence[str]:
        """The names that a request may be signed for. ``host``: the header Host. Raises Refusal."""
        if self._names:
            return self._names
        said = host.lower().removesuffix(":443")
        if self._served is not None and not _is_for(self._served.certificate.names, said):
            raise Refusal(
                401,
                "signature",
                f"the request is for {said[:80]!r}, which is none of this gateway's names: its "
                "operator can add it to gateway.names",
            )
        return (said,)


def _is_for(names: Sequence[str], said: str) -> bool:
    """Whether a certificate with these names covers a host, given with or without a port."""
    try:
        # The form in certificates: international names in ASCII, canonical addresses.
        host = URL(f"https://{said}").raw_host or ""
    except ValueError:
        return False
    return host in names or f"*.{host.partition('.')[2]}" in names


TOKEN_S: Final = 600
ALGORITHM: Final = "HS256"

# As long as a request is acceptable: the device's clock may be ahead or behind.
_NONCE_S = 2 * WINDOW_S + 10.0
_VERIFY_S = 10.0  # time limit of an attestation's verification
_RETRY_S = 10.0  # Retry-After if the verifier fails
_LOG = logging.getLogger("fedstream.gateway")
_DEVICE = re.compile(r"0|[1-9][0-9]{0,9}")
_REMEMBERED = 50_000  # cached tokens; the oldest are dropped
_SIGNED = ("Content-Digest", "Signature-Input", "Signature")

_UNSTORED: Final[dict[str, str]] = {hdrs.CACHE_CONTROL: "no-store"}

_DOUBTS: dict[Doubt, RefusalReason] = {
    "missing": "attestation missing",
    "format": "attestation format",
    "forged": "attestation forged",
    "key": "attestation key",
    "expired": "attestation expired",
    "denied": "attestation denied",
}
_WHY_NOT: dict[Enrolling, str] = {
    "unknown": "no such invite: it was for another run, or a newer one took its place",
    "expired": "this invite has expired: ask for another",
    "used": "this invite was used, with another key: ask for another",
}


class _Claims(NamedTuple):
    device: int
    key: object
    ends: float  # seconds since 1970


class VerifiedTokens:
    """A cache of verified tokens for one run and gateway.

    Verifying a token takes a sixth of a task's processor time. Each request also looks the device
    up in the registry, as a token can't tell whether its device is still enrolled.
    """

    def __init__(self, audience: str) -> None:
        self._audience = audience
        self._secret = b""
        self._known: dict[bytes, _Claims] = {}  # by SHA-256, so that no usable token is kept

    def claims(self, token: str, secret: bytes, now: float) -> tuple[int, object]:
        """The device and key of a valid token. Raises Refusal.

        ``now``: seconds since 1970.
        """
        if secret != self._secret:
            self._known.clear()
            self._secret = secret
        name = sha256(token.encode()).digest()
        found = self._known.get(name)
        if found is None or now >= found.ends:
            self._known.pop(name, None)
            found = self._verify(token)
            if now >= found.ends:
                raise _untrusted("the token has expired: ask for another at /v1/token")
            self._known[name] = found
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return found.device, found.key

    def _verify(self, token: str) -> _Claims:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[ALGORITHM],
                audience=self._audience,
                options={
                    "require": ["sub", "aud", "iat", "exp", "key"],
                    "strict_aud": True,
                    # Not checked by the library, whose clock may differ from the issuing replica's.
                    "verify_exp": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidTokenError as error:
            raise _untrusted("not a token of this gateway and run") from error
        if not _DEVICE.fullmatch(claims["sub"]):
            raise _untrusted("not a token of a device")
        return _Claims(int(claims["sub"]), claims["key"], float(claims["exp"]))


def _untrusted(text: str) -> Refusal:
    """The refusal of a request without a valid token."""
    return Refusal(401, "token", text, headers={hdrs.WWW_AUTHENTICATE: 'Bearer realm="fedstream"'})


class Auth:
    """The routes of enrolment and tokens, and the authentication of all other requests."""

    def __init__(
        self,
        ledger: GatewayLedger,
        settings: GatewaySettings,
        served: ServedCertificate | None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``served``: None for plain HTTP. ``clock``: seconds since 1970; None: Redis's clock,
        which all replicas share."""
        secret = settings.secret
        self._ledger = ledger
        self._registry = Registry(
            ledger, secret=None if secret is None else secret.get_secret_value().encode()
        )
        self._run = ledger.keys.name
        self._audience = f"{self._run}/{settings.site}"
        self._verified = VerifiedTokens(self._audience)
        self._names = AcceptedNames(settings, served)
        self._body_s = settings.body_s
        self._verifier = settings.attestation
        self._clock = clock or ledger.now
        self._of_device = Quota("device", settings.device_rate)  # each stores a nonce

    def routes(self) -> Sequence[web.RouteDef]:
        """The two routes that need no token."""
        return web.post(ENROL_ROUTE, self.enrol), web.post(TOKEN_ROUTE, self.token)

    # signed requests

    async def enrol(self, request: web.Request) -> web.Response:
        """Enrol the invited device with its public key. Raises Refusal."""
        signature, body = await self._signed(request, ENROL_ROUTE)
        if signature.device is not None:
            raise Refusal(401, "signature", 'a device that enrols signs with keyid="new"')
        said = Enrolment.decode(body)
        try:
            key = public_key(said.public_key)
        except BadKey as error:
            raise Refusal(400, "key", str(error)) from error
        self._verify(request, signature, key, body)
        device, digest = device_in(said.invite), digest_of(said.invite.encode())
        if device is None:
            raise Refusal(403, "invite", "not an invite of `fedstream devices invite`")
        await self._attested(said.attestation, Newcomer(device, self._run, pem_of(key)))
        verdict = await self._ledger.enrol(
            device, digest, pem_of(key), signature.nonce, nonce_s=_NONCE_S
        )
        match verdict:
            case "enrolled" | "again":
                status = 201 if verdict == "enrolled" else 200
                return json_answer(Enrolled(device=device, run=self._run), status, _UNSTORED)
            case "revoked":
                raise _revoked(403)
            case "replayed":
                raise _replayed()
            case _:
                raise Refusal(403, "invite", _WHY_NOT[verdict])

    async def _attested(self, shown: Attestation | None, newcomer: Newcomer) -> None:
        """Raise Refusal unless the operator's verifier accepts the device."""
        try:
            async with asyncio.timeout(_VERIFY_S):
                await self._verifier.verify(shown, newcomer)
        except NotAttested as error:
            raise Refusal(403, _DOUBTS[error.why], str(error)) from error
        except Exception as error:
            _LOG.exception("the verifier of attestations failed for device %d", newcomer.device)
            raise Refusal(
                503,
                "unavailable",
                "attestations can't be verified now: try again later",
                retry_after_s=_RETRY_S,
            ) from error

    async def token(self, request: web.Request) -> web.Response:
        """Give a device a token for its other requests. Raises Refusal."""
        signature, body = await self._signed(request, TOKEN_ROUTE)
        device = signature.device
        if device is None:
            raise Refusal(401, "signature", "keyid must be the device's number")
        Nothing.decode(body)
        # Read from Redis and not from the registry, as the device may have enrolled just now.
        registration, revoked = await self._registry.asked(device)
        if registration is None:
            raise Refusal(401, "unknown device", f"device {device} has not enrolled in this run")
        self._verify(request, signature, public_key(registration.key), body)
        self._of_device.take(device)
        if revoked:
            raise _revoked(401)
        if not await self._ledger.take_nonce(signature.nonce, seconds=_NONCE_S):
            raise _replayed()
        now = int(self._clock())
        claims = {
            "sub": str(device),
            "aud": self._audience,
            "iat": now,
            "exp": now + TOKEN_S,
            "key": _thumbprint(registration),
        }
        made = jwt.encode(claims, await self._registry.secret(), ALGORITHM)
        return json_answer(Access(token=made, expires_in=TOKEN_S), headers=_UNSTORED)

    async def _signed(self, request: web.Request, path: str) -> tuple[Signature, bytes]:
        """Read a request's signature, without verifying it, and its body. Raises Refusal."""
        if request.raw_path != path:  # a query or another spelling would not be signed
            raise Refusal(401, "signature", f"a signed request goes to {path}, as it is")
        if any(len(request.headers.getall(name, ())) > 1 for name in _SIGNED):
            raise Refusal(401, "signature", f"{', '.join(_SIGNED)}: each once")
        try:
            signature = read(request.headers)
        except BadSignature as error:
            raise Refusal(401, "signature", str(error)) from error
        now = self._clock()
        if abs(now - signature.created) > WINDOW_S:
            date = formatdate(now, usegmt=True)
            raise Refusal(
                401,
                "clock",
                f"signed at {signature.created}, which is more than {WINDOW_S} s from the "
                f"gateway's time, {int(now)} ({date}): set the clock",
                headers={hdrs.DATE: date},
            )
        return signature, await body_of(request, within_s=self._body_s)

    def _verify(
        self, request: web.Request, signature: Signature, key: PublicKey, body: bytes
    ) -> None:
        """Check that ``key`` signed this request for this gateway. Raises Refusal."""
        why: BadSignature | None = None
        for name in self._names.of(request.host):
            try:
                signature.verify(
                    key, method="POST", authority=name, path=request.raw_path, body=body
                )
            except BadSignature as error:
                why = why or error
            else:
                return
        raise Refusal(401, "signature", str(why)) from why

    # all other requests

    async def device_of(self, request: web.Request) -> int:
        """The device of a request, by its token. Raises Refusal, Unavailable."""
        given = request.headers.getall(hdrs.AUTHORIZATION, ())
        if len(given) != 1:
            raise _untrusted("send Authorization: Bearer with the token of /v1/token")
        try:
            token = headers.bearer(given[0])
        except BadHeader as error:
            raise _untrusted(str(error)) from error
        device, key = self._verified.claims(token, await self._registry.secret(), self._clock())
        registration = await self._registry.get(device)
        if registration is None or key != _thumbprint(registration):
            raise _untrusted("the device was revoked, or has enrolled with another key")
        return device

    async def revoked(self) -> frozenset[int]:
        """The revoked devices. Raises Unavailable."""
        return await self._registry.revoked()


def _thumbprint(registration: Registration) -> str:
    return digest_of(registration.key.encode())


def _revoked(status: int) -> Refusal:
    return Refusal(status, "revoked", "the operator has revoked this device")


def _replayed() -> Refusal:
    return Refusal(401, "nonce", "this nonce was used: sign every request anew")
