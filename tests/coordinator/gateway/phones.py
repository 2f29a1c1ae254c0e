"""Devices of a gateway's tests, and gateways that only authenticate them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.digest import digest_of
from fedstream.protocol.headers import as_bearer
from fedstream.protocol.messages import ENROL_ROUTE, TOKEN_ROUTE, Access, BadBody, Enrolment
from fedstream.protocol.signatures import PrivateKey, pem_of, sign
from tests.support import Hand

SITE = "gateway"
INVITE = "3-" + "i" * 32
NAME = "gateway.example"
SECRET = "s" * 32


@web.middleware
async def answering(request: web.Request, handler: Any) -> web.StreamResponse:
    """As the gateway's app does."""
    try:
        response: web.StreamResponse = await handler(request)
    except Refusal as refusal:
        return web.json_response(
            {"error": str(refusal), "reason": refusal.reason},
            status=refusal.status,
            headers=refusal.headers,
        )
    except BadBody as error:
        return web.json_response({"error": str(error), "reason": "malformed"}, status=400)
    return response


@dataclass
class Phone:
    """A device as a program of anybody's."""

    http: TestClient[web.Request, web.Application]
    key: PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    number: int = 3
    authority: str = NAME  # for which it signs
    token: str = ""

    def signing(self, path: str, body: bytes, **about: Any) -> dict[str, str]:
        """The headers that sign a request."""
        given = {"keyid": str(self.number), "created": int(time.time()), **about}
        return sign(
            self.key, method="POST", authority=self.authority, path=path, body=body, **given
        )

    async def signed(
        self, path: str, body: bytes, *, headers: dict[str, str] | None = None, **about: Any
    ) -> ClientResponse:
        """A signed request, unless ``headers`` sign it."""
        headers = headers or self.signing(path, body, **about)
        return await self.http.post(path, data=body, headers=headers)

    def enrolment(self, invite: str = INVITE) -> bytes:
        return Enrolment(invite=invite, public_key=pem_of(self.key.public_key())).encode()

    async def enrol(self, invite: str = INVITE, **about: Any) -> ClientResponse:
        return await self.signed(ENROL_ROUTE, self.enrolment(invite), **{"keyid": "new", **about})

    async def ask_token(self, **about: Any) -> ClientResponse:
        return await self.signed(TOKEN_ROUTE, b"{}", **about)

    async def join(self) -> None:
        """Enrol and get a token."""
        assert (await self.enrol()).status in (200, 201)
        self.token = Access.decode(await (await self.ask_token()).read()).token

    async def who(self, *authorizations: str) -> ClientResponse:
        """A request with a token: who is asking?"""
        given = authorizations or (as_bearer(self.token),)
        return await self.http.get("/who", headers=[("Authorization", one) for one in given])


Replica = Callable[..., Any]


async def invite(hand: Hand, text: str = INVITE, site: str = SITE) -> None:
    device = int(text.partition("-")[0])
    verdict, _ = await hand.ledger.invite(site, {device: digest_of(text.encode())}, seconds=60)
    assert verdict == "invited"


async def said(response: ClientResponse) -> tuple[int, str]:
    """Status and reason of a refusal, which also says in a sentence what is wrong."""
    body = json.loads(await response.read())
    assert body["error"]
    return response.status, body["reason"]
