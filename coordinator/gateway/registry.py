"""The devices of a gateway, as far as a replica knows them, and what it signs tokens with.

Every request with a token asks for its device. Redis answers once; after that, a look every other
second tells whether anything has changed, and if so all is asked anew. So a revocation takes effect
within about two seconds, and a request costs Redis nothing. A device that enrols for the first time
changes nothing for others: only that a device is not there is forgotten with every look. The list
of those who are revoked is read as a whole, for tasks whose devices make no request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstream.broker.ledger.gateway import GatewayLedger, Registration

LOOK_S = 2.0  # between two looks at whether anything has changed
# Then everything is asked again, whatever the look says. A device that waits checks in each minute,
# so with less, each check-in would cost an exchange.
_ANEW_S = 600.0
_SECRET = 32  # bytes


class Registry:
    """The registrations of devices that are neither unknown nor revoked."""

    def __init__(
        self,
        ledger: GatewayLedger,
        *,
        secret: bytes | None = None,
        most: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``secret``: the configured one; None: the replicas' common one in Redis. ``most``:
        devices remembered. ``clock``: monotonic seconds.
        """
        self._ledger = ledger
        self._configured = secret
        self._most = most
        self._clock = clock
        self._found: dict[int, Registration | None] = {}
        self._absent: set[int] = set()  # those of them that are not there
        self._revoked: frozenset[int] = frozenset()
        self._secret = b""
        self._stamp: bytes | None = None
        self._looked: float | None = None  # when the last look began
        self._emptied = 0.0
        self._generation = 0
        self._looking = asyncio.Lock()

    async def secret(self) -> bytes:
        """What tokens are signed with. Raises Unavailable."""
        await self._look()
        return self._secret

    async def get(self, device: int) -> Registration | None:
        """A device that may take part; None if it has not enrolled or is revoked.

        Raises Unavailable: nobody is let in on what was true before.
        """
        await self._look()
        if device in self._found:
            return self._found[device]
        registration, revoked = await self.asked(device)
        return None if revoked else registration

    async def asked(self, device: int) -> tuple[Registration | None, bool]:
        """A device's registration as it is now, and whether it is revoked. Raises Unavailable."""
        await self._look()
        generation = self._generation
        registration, revoked = await self._ledger.registration(device)
        if generation == self._generation:  # else this was read before the change
            if len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            found = self._found[device] = None if revoked else registration
            if found is None:
                self._absent.add(device)
        return registration, revoked

    async def revoked(self) -> frozenset[int]:
        """The devices that are revoked. Raises Unavailable."""
        await self._look()
        return self._revoked

    async def _look(self) -> None:
        """Notice changes, if the last look is a while ago; several requests wait for one look."""
        if self._is_fresh():
            return
        async with self._looking:
            if self._is_fresh():
                return
            now = self._clock()
            stamp, secret = await self._ledger.state()
            if self._configured is not None:
                self._secret = self._configured
            else:
                self._secret = secret or await self._ledger.secret(secrets.token_bytes(_SECRET))
            if stamp != self._stamp or now - self._emptied >= _ANEW_S:
                self._revoked = await self._ledger.revoked()
                self._found.clear()
                self._generation += 1
                self._emptied = now
            for device in self._absent:
                self._found.pop(device, None)
            self._absent.clear()
            self._stamp, self._looked = stamp, now

    def _is_fresh(self) -> bool:
        return self._looked is not None and self._clock() - self._looked < LOOK_S
