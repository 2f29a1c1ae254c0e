"""The helper's service: it announces its epoch's key, and opens sums of updates over HTTP.

It has no access to Redis, to journals or to masked updates, and it needs no clock but its own. All
that it remembers is in its store, so it may be killed at any moment: the same intent gets the same
bytes again.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from prometheus_client import Counter, Histogram

from fedstream.core.errors import BadMessage, ConfigError
from fedstream.helper.opening import NotOpened, check_intent, noise_epoch, seeds_of
from fedstream.helper.store import HelperStore, StoreFailed
from fedstream.private import noise
from fedstream.private.masks import packed, sum_of_masks
from fedstream.private.policy import (
    KeyRoster,
    PrivacyPolicy,
    private_key,
    public_key,
    read_signed,
)
from fedstream.private.sealing import (
    EPOCHS_HEADER,
    INTENT_HEADER,
    REFUSALS,
    EpochKey,
    EpochSecret,
    Intent,
)
from fedstream.runtime.backoff import pause
from fedstream.runtime.http import HttpSettings, problem, tokens_in
from fedstream.runtime.process import read_regular
from fedstream.runtime.service import Worker, repeat

if TYPE_CHECKING:
    from fedstream.helper.settings import HelperSettings
    from fedstream.runtime.service import Context

_LOOK_S = 5.0  # between two checks of the epoch's age
_UPDATE_BYTES = 4096  # of a sealed update in an intent, at most
_SLOW_S = 600.0  # longest opening; epochs are rotated between two of them
_AT_ONCE = 4  # intents in memory; more are answered 503
BYTES = "application/octet-stream"


class Helper:
    """Checks, opens and remembers. ``now``: seconds since 1970."""

    def __init__(
        self,
        policy: PrivacyPolicy,
        roster: KeyRoster,
        key: Ed25519PrivateKey,
        store: HelperStore,
        *,
        epoch_s: float,
        keep_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._policy, self._roster, self._key, self._store = policy, roster, key, store
        self._epoch_s, self._keep_s, self._now = epoch_s, keep_s, now
        self._epochs: dict[str, EpochSecret] = {}
        self.rotate()

    def rotate(self) -> None:
        """Begin a new epoch if it is time, and forget the keys of old ones."""
        changed = self._store.rotate(self._now(), every_s=self._epoch_s, keep_s=self._keep_s)
        if changed or not self._epochs:
            self._epochs = self._store.epochs()
            *_, newest = self._epochs.values()
            until = int(self._store.began() + self._epoch_s + self._keep_s)
            self.key: EpochKey = newest.announced(self._policy, self._key, until)

    @property
    def epochs(self) -> tuple[str, ...]:
        """The epochs whose updates can be opened, oldest first; the last is the key's."""
        return tuple(self._epochs)

    def open(self, intent: Intent) -> bytes:
        """M for an intent, packed: the same bytes for the same intent.

        Raises NotOpened, StoreFailed. Nothing is recorded for a refused intent.
        """
        policy = self._policy
        check_intent(intent, policy, self._roster)
        seeds = seeds_of(intent, policy, self._epochs)
        secret = noise_epoch(intent, self._epochs)

        def drawn() -> NDArray[np.int64]:
            key = noise.noise_key(secret.noise, intent.digest)
            return noise.draw(key, policy.parameters, policy.noise_sigma)

        if policy.bands == 1:
            self._store.take(intent)
            added = drawn() if policy.sigma else None
        else:
            added = self._store.take_in_turn(intent, secret.epoch, drawn)
        return packed(sum_of_masks(seeds, added, policy.parameters), policy)


class HelperService:
    """The helper over HTTP."""

    role = "helper"

    def __init__(self, settings: HelperSettings, http: HttpSettings) -> None:
        """Read the files of ``settings``. Raises ConfigError."""
        self._settings = settings
        self._token = http.token
        if http.token_file is not None:
            raise ConfigError("http.token_file: the helper takes http.token alone")
        read = partial(_content, settings)
        owner = settings.owner
        if owner is None:
            raise ConfigError("helper.owner: name the Ed25519 public key that signs the policy")
        self._signed = read("policy")
        at = f"helper.policy = {settings.policy!r}"
        policy = read_signed(self._signed, public_key(owner), at)
        roster = KeyRoster.parsed(read("roster"), f"helper.roster = {settings.roster!r}")
        if roster.digest != policy.roster:
            raise ConfigError(
                f"helper.roster = {settings.roster!r} is not the policy's: its digest is "
                f"{roster.digest}, the policy names {policy.roster}"
            )
        key = _private_key(read("key"), f"helper.key = {settings.key!r}", policy)
        if settings.store is None:
            raise ConfigError("helper.store: name the file of keys and opened tasks")
        self._most = policy.max_batch * _UPDATE_BYTES
        self._store = HelperStore(Path(settings.store), policy)
        self.helper = Helper(
            policy,
            roster,
            key,
            self._store,
            epoch_s=settings.epoch_s,
            keep_s=settings.keep_s,
        )
        self._worker: Worker | None = None
        self._asked = 0  # intents in memory

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The routes for devices' operators, gateways and the updater."""
        return (
            web.get("/v1/policy", self._send_policy),
            web.get("/v1/key", self._send_key),
            web.post("/v1/open", self._open),
        )

    async def run(self, context: Context) -> None:
        """Rotate epochs until stopped."""
        self._context, self._metrics = context, HelperMetrics(context)
        context.log.info("policy", digest=self.helper.key.policy, epoch=self.helper.key.epoch)
        with Worker("opening") as worker:
            self._worker = worker
            try:
                await repeat(context, "epochs", self._rotate, within_s=_SLOW_S)
            finally:
                await worker.run(self._store.close)  # after the queued openings
                self._worker = None

    async def _rotate(self) -> None:
        assert self._worker is not None  # noqa: S101  (set in run)
        before = self.helper.key.epoch
        await self._worker.run(self.helper.rotate)
        if self.helper.key.epoch != before:
            self._context.log.info("epoch begins", epoch=self.helper.key.epoch)
        await pause(self._context.stop, _LOOK_S)

    async def _send_policy(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._signed, content_type="text/plain")

    async def _send_key(self, _request: web.Request) -> web.StreamResponse:
        headers = {EPOCHS_HEADER: ",".join(self.helper.epochs)}
        return web.Response(body=self.helper.key.encode(), content_type=BYTES, headers=headers)

    async def _open(self, request: web.Request) -> web.StreamResponse:
        if self._token is not None and not _has_token(request, self._token.get_secret_value()):
            return problem(401, "this helper needs Authorization: Bearer TOKEN", reason="token")
        worker = self._worker
        if worker is None or self._asked >= _AT_ONCE:
            said = "too many intents at once" if worker else "the helper starts or stops"
            return problem(503, said, reason="busy", retry_after_s=1)
        self._asked += 1
        try:
            return await self._answer(request, worker)
        finally:
            self._asked -= 1

    async def _answer(self, request: web.Request, worker: Worker) -> web.StreamResponse:
        try:
            intent = Intent.decode(await self._body(request))
            with self._metrics.seconds.time():
                masks = await worker.run(self.helper.open, intent)
        except StoreFailed as error:
            self._context.log.warning("not opened", reason="store", error=str(error))
            return problem(503, str(error), reason="store", retry_after_s=5)
        except (BadMessage, NotOpened) as error:
            refused = error if isinstance(error, NotOpened) else NotOpened("malformed", str(error))
            self._metrics.refused.labels(refused.reason).inc()
            self._context.log.warning("not opened", reason=refused.reason, error=str(refused))
            about: dict[str, Any] = {"error": str(refused), "reason": refused.reason}
            return web.json_response(about | refused.about, status=409)
        self._metrics.opened.inc()
        self._metrics.updates.inc(len(intent.updates))
        self._context.log.info("opened", intent=intent.digest, updates=len(intent.updates))
        headers = {INTENT_HEADER: intent.digest}
        return web.Response(body=masks, content_type=BYTES, headers=headers)

    async def _body(self, request: web.Request) -> bytes:
        """The request's body. Raises NotOpened if it is too long or comes too slowly."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._settings.body_s):
                async for part in request.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > self._most:
                        raise NotOpened("malformed", f"an intent takes at most {self._most} bytes")
        except TimeoutError:
            raise NotOpened(
                "malformed", f"the intent took longer than {self._settings.body_s:g} s"
            ) from None
        return b"".join(parts)


class HelperMetrics:
    """The service's metrics."""

    def __init__(self, context: Context) -> None:
        registry = context.registry
        self.opened = Counter(
            "fedstream_helper_opened", "Batches opened, repetitions included.", registry=registry
        )
        self.updates = Counter(
            "fedstream_helper_updates", "Updates in opened batches.", registry=registry
        )
        self.refused = Counter(
            "fedstream_helper_refused", "Batches not opened.", ["reason"], registry=registry
        )
        self.seconds = Histogram(
            "fedstream_helper_open_seconds", "Time to open a batch.", registry=registry
        )
        for reason in REFUSALS:
            self.refused.labels(reason)


def _content(settings: HelperSettings, key: str) -> bytes:
    """The content of the file that ``helper.KEY`` names. Raises ConfigError."""
    name = getattr(settings, key)
    if name is None:
        raise ConfigError(f"helper.{key}: name a file")
    try:
        return read_regular(Path(name))
    except OSError as error:
        raise ConfigError(f"helper.{key} = {name!r}: {error.strerror}") from error


def _private_key(pem: bytes, at: str, policy: PrivacyPolicy) -> Ed25519PrivateKey:
    key = private_key(pem, at)
    if key.public_key().public_bytes_raw().hex() != policy.helper:
        raise ConfigError(f"{at}: not the key that the policy names as the helper's")
    return key


def _has_token(request: web.Request, secret: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    given_bytes = given.encode(errors="surrogateescape")
    return scheme.lower() == "bearer" and any(
        hmac.compare_digest(given_bytes, one.encode()) for one in tokens_in(secret)
    )
