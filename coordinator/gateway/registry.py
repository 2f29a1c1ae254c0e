"""A replica's cache of the enrolled devices, and the secret for tokens.

Every request with a token looks its device up. The cache reads each device from Redis once, and
checks every two seconds whether a register has changed; if so, the cache starts anew. So a
revocation takes effect within about two seconds, and most requests cost Redis nothing. A first
enrolment doesn't count as a change, so the cache forgets absent devices with every check. The list
of revoked devices is read as a whole, for tasks whose devices make no request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstream.broker.ledger.gateway import GatewayLedger, Registration

LOOK_S = 2.0  # between two checks for changes
# Age at which the cache starts anew in any case. A waiting device checks in each minute, so a lower
# value would cost an exchange per check-in.
_ANEW_S = 600.0
_SECRET = 32  # bytes


class Registry:
    """The registrations of enrolled devices that are not revoked."""

    def __init__(
        self,
        ledger: GatewayLedger,
        *,
        secret: bytes | None = None,
        most: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``secret``: the configured secret; None: the replicas' common secret in Redis.
        ``most``: cached devices. ``clock``: monotonic seconds.
        """
        self._ledger = ledger
        self._configured = secret
        self._most = most
        self._clock = clock
        self._found: dict[int, Registration | None] = {}
        self._absent: set[int] = set()  # cached devices without a registration
        self._revoked: frozenset[int] = frozenset()
        self._secret = b""
        self._stamp: bytes | None = None
        self._looked: float | None = None  # beginning of the last check
        self._emptied = 0.0
        self._generation = 0
        self._looking = asyncio.Lock()

    async def secret(self) -> bytes:
        """The secret for signing tokens. Raises Unavailable."""
        await self._look()
        return self._secret

    async def get(self, device: int) -> Registration | None:
        """The registration of a device; None if it has not enrolled or is revoked.

        Raises Unavailable rather than trust an outdated cache.
        """
        await self._look()
        if device in self._found:
            return self._found[device]
        registration, revoked = await self.asked(device)
        return None if revoked else registration

    async def asked(self, device: int) -> tuple[Registration | None, bool]:
        """Read from Redis a device's registration, and whether it is revoked.

        Raises Unavailable.
        """
        await self._look()
        generation = self._generation
        registration, revoked = await self._ledger.registration(device)
        if generation == self._generation:  # else the answer was read before the change
            if len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            found = self._found[device] = None if revoked else registration
            if found is None:
                self._absent.add(device)
        return registration, revoked

    async def revoked(self) -> frozenset[int]:
        """The revoked devices. Raises Unavailable."""
        await self._look()
        return self._revoked

    async def _look(self) -> None:
        """Check for changes if the last check is too old; concurrent requests share one check."""
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
