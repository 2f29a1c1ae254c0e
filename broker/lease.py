"""Leases: one process at a time holds a role, and a token fences its predecessors."""

from __future__ import annotations

import secrets

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.scripts import Script
from fedstream.core.errors import Fenced

_GOODBYE_S = 2.0

_ACQUIRE = Script("acquire")
_HOLD = Script("hold")
_YIELD = Script("yield")
SCRIPTS = (_ACQUIRE, _HOLD, _YIELD)  # for the roles that need a lease


class Lease:
    """A role and the name of its holder, with a token that grows with each holder.

    Redis checks the token with each write, and correctness depends on the token alone: a holder
    that was paused past the end of its lease is fenced when it resumes.
    """

    def __init__(self, client: Client, keys: Keys, role: str, name: str, *, seconds: float) -> None:
        self._client = client
        self._keys = {"leader": keys.leader(role), "tokens": keys.tokens}
        self._milliseconds = round(seconds * 1000)
        self.nonce = secrets.token_hex(8)
        self.role = role
        self.name = name
        self.seconds = seconds
        self.number = 0  # the epoch: 0 while the role is not held

    @property
    def token(self) -> str:
        """The fencing token that the holder presents with every write."""
        return f"{self.number}:{self.nonce}"

    async def acquire(self, *, at_least: int = 0) -> bool:
        """Take the role unless another process holds it; return whether it was taken.

        The token's number is above ``at_least``.
        """
        number = await _ACQUIRE(
            self._client,
            self._keys,
            self.role,
            self.name,
            self.nonce,
            self._milliseconds,
            at_least,
        )
        self.number = int(number)
        return self.number > 0

    async def hold(self) -> bool:
        """Renew the lease. False if Redis lost the token: acquire again. Raises Fenced."""
        holder = f"{self.name}|{self.nonce}"
        reply = await _HOLD(
            self._client, self._keys, self.role, self.token, holder, self._milliseconds
        )
        if reply == b"fenced":
            raise Fenced(f"another {self.role} has taken over (mine is token {self.token})")
        return bool(reply == b"held")

    async def release(self) -> None:
        """Give up the lease, so that a successor need not wait for its expiry.

        This is the holder's last call, with a short time-out in case Redis hangs.
        """
        self._client.hurry(_GOODBYE_S)
        await _YIELD(self._client, self._keys, f"{self.name}|{self.nonce}")
