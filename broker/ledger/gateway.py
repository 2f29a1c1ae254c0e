"""The gateways' operations on Redis beyond a trainer's: devices, nonces and outcomes.

A gateway enrols devices that an operator invited. It can neither invite devices nor readmit revoked
ones: it may only read the list of revoked devices. The replicas of one gateway share a site and so
a Redis user, which has no access to another site's devices, nonces and secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import msgpack

from fedstream.broker import partial_blobs
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger import trainer
from fedstream.broker.ledger.base import Rights, word
from fedstream.broker.ledger.evaluator import OpenEvaluation
from fedstream.broker.ledger.queries import device_of
from fedstream.broker.ledger.trainer import TakesTasks
from fedstream.broker.scripts import Script
from fedstream.broker.streams import BLOCK_MS, Entry, Reader
from fedstream.core.messages import ArrivedDevices, HandOver

ENROL = Script("enrol")
_MOVES_KEPT = 2000  # messages, each about at most 1,000 devices

# The rights of a site's trainer, and more. Like trainers, gateways may not load scripts.
RIGHTS = Rights(
    reads=(*trainer.RIGHTS.reads, "admitted", "ended", "gateway:{site}:revoked"),
    commands=(*trainer.RIGHTS.commands, "hget", "hexists", "hkeys", "zrangebylex"),
    apart=(
        *trainer.RIGHTS.apart,
        Rights(
            both=(
                "gateway:{site}:devices",
                "gateway:{site}:invites",
                "gateway:{site}:changed",
                "gateway:{site}:secret",
                "gateway:{site}:nonce:*",
            ),
            commands=("evalsha", "get", "set", "hget", "hset", "hdel"),
        ),
        Rights(reads=("open", "evaluations"), commands=("hexists",)),
        Rights(reads=("evaluation",), commands=("hgetall",)),
        Rights(both=("gateway:{site}:moves",), commands=("xadd", "xread", "xrange")),
        Rights(both=("gateway:{site}:upload:*",), commands=partial_blobs.ON_NOTE),
        Rights(writes=("update:{site}/*",), commands=partial_blobs.ON_BLOB),
        Rights(both=("gateway:{site}:upload:*", "update:{site}/*"), commands=("evalsha",)),
    ),
)

Enrolling = Literal["enrolled", "again", "revoked", "used", "unknown", "expired", "replayed"]


@dataclass(frozen=True)
class Registration:
    """The register's record of an enrolled device."""

    key: str  # the device's public key, PEM
    invite: str  # digest of its invite
    at: int  # time of enrolment, ms since 1970, Redis's clock

    @classmethod
    def parsed(cls, packed: bytes) -> Registration:
        """Decode a record that the script ``enrol`` packed."""
        found = msgpack.unpackb(packed)
        return cls(found["key"], found["invite"], int(found["at"]))


@dataclass(frozen=True)
class Fate:
    """The state of a task: the admitted attempt, and how the task ended."""

    admitted: str | None = None  # the attempt that is in the queue now
    attempt: str = ""  # the attempt that ended the task; '' if none did
    outcome: str | None = None  # None: open, ended long ago, or forgotten by Redis
    reason: str = ""


class GatewayLedger(TakesTasks):
    """A gateway's view of the run, and its changes to it."""

    def __init__(self, client: Client, keys: Keys, service: str, site: str) -> None:
        super().__init__(client, keys, service)
        self._site = site
        self._enrolled, self._revoked = keys.enrolled(site), keys.revoked(site)
        self._changed = keys.enrolments(site)
        self._moves = keys.moves(site)

    async def enrol(
        self, device: int, invite: str, key: str, nonce: str, *, nonce_s: float
    ) -> Enrolling:
        """Enrol an invited device with its public key.

        ``invite``: the invite's digest. ``nonce_s``: seconds for which the nonce is remembered.
        Returns 'enrolled'; 'again' (the device had enrolled with this invite and key); or a reason
        for refusal: 'revoked' (the device is), 'used' (the invite was, with another key), 'unknown'
        or 'expired' (the invite is), 'replayed' (the nonce is known).
        """
        reply = await self._run(
            ENROL,
            device,
            invite,
            key,
            round(nonce_s * 1000),
            self._revoked,
            invites=self.keys.invites(self._site),
            enrolled=self._enrolled,
            changed=self._changed,
            nonce=self.keys.nonce(self._site, nonce),
        )
        return cast("Enrolling", word(reply))

    async def registration(self, device: int) -> tuple[Registration | None, bool]:
        """Look up a device; return its registration, if any, and whether the device is revoked."""
        packed, revoked = await self._client.pipeline(
            [("HGET", self._enrolled, device), ("HEXISTS", self._revoked, device)]
        )
        return (Registration.parsed(packed) if packed else None), bool(revoked)

    async def revoked(self) -> frozenset[int]:
        """Read the revoked devices, ignoring foreign fields."""
        named = map(device_of, await self._client.call("HKEYS", self._revoked))
        return frozenset(device for device in named if device is not None)

    async def state(self) -> tuple[bytes | None, bytes | None]:
        """Read the registers' version text and the site's signing secret, in one exchange.

        The text changes once a device enrols with another key, is revoked, or is admitted again.
        The replicas sign tokens with the secret. The text or the secret is None if it doesn't exist
        yet.
        """
        changed, secret = await self._client.pipeline(
            [("GET", self._changed), ("GET", self.keys.secret(self._site))]
        )
        return changed, secret

    async def take_nonce(self, nonce: str, *, seconds: float) -> bool:
        """Remember a nonce for ``seconds``; False if it was known: the request is a replay."""
        key = self.keys.nonce(self._site, nonce)
        taken = await self._client.call("SET", key, "", "NX", "PX", round(seconds * 1000))
        return taken is not None

    async def secret(self, fresh: bytes) -> bytes:
        """Read the site's signing secret; set it to ``fresh`` if there is none."""
        key = self.keys.secret(self._site)
        _, found = await self._client.pipeline([("SET", key, fresh, "NX"), ("GET", key)])
        return bytes(found)

    # devices that change replicas

    async def move(self, message: ArrivedDevices | HandOver) -> str:
        """Send a message to the site's replicas; return its id in their stream."""
        id_ = await self._client.call(
            "XADD", self._moves, "MAXLEN", "~", _MOVES_KEPT, "*", "m", message.encode()
        )
        return str(id_.decode())

    async def moves(self) -> list[Entry]:
        """Read all messages of the site's replicas that are still kept."""
        rows = await self._client.call("XRANGE", self._moves, "-", "+")
        return [Entry(id_.decode(), fields[1]) for id_, fields in rows]

    async def moves_after(self, entry: str, *, block_ms: int = BLOCK_MS) -> list[Entry]:
        """Wait at most ``block_ms`` for the replicas' messages after an entry."""
        found = await Reader(self._client, {self._moves: entry}).read(block_ms=block_ms)
        return found.get(self._moves, [])

    async def fates(self, tasks: Sequence[str]) -> list[Fate]:
        """Look up the state of tasks. Redis knows the ends of the newest 20,000 ended tasks."""
        asked = [
            command
            for task in tasks
            for command in (
                ("HGET", self.keys.admitted, task),
                ("ZRANGEBYLEX", self.keys.ended, f"[{task}|", f"[{task}}}", "LIMIT", 0, 1),
            )
        ]
        replies = await self._client.pipeline(asked) if asked else []
        return [
            _fate(admitted, ended)
            for admitted, ended in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def is_open(self, task: str) -> bool:
        """Whether a task is open; False also for a task that Redis has forgotten."""
        return bool(await self._client.call("HEXISTS", self.keys.open, task))

    async def is_evaluating(self, device: int) -> bool:
        """Whether a device has an open task of an evaluation."""
        return bool(await self._client.call("HEXISTS", self.keys.evaluations, device))

    async def evaluation_under_way(self) -> OpenEvaluation | None:
        """Read the evaluation that is under way, without its registers of devices."""
        return OpenEvaluation.parsed(await self._client.call("HGETALL", self.keys.evaluation))


def _fate(admitted: bytes | None, ended: Sequence[bytes]) -> Fate:
    attempt = admitted.decode() if admitted is not None else None
    if not ended:
        return Fate(attempt)
    _, by, outcome, reason = ended[0].decode().split("|", 3)
    return Fate(attempt, by, outcome, reason)
