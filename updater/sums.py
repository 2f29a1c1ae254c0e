"""The updater's part in a private run: checks of sealed updates, and asking the helper for sums.

A batch's intent follows from the journalled updates alone: their sealed parts in the journal's
order, the policy's weights, and the version. So it needs no record of its own: the journal is
synced before the helper is asked, and whichever updater asks again asks for the same bytes.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from fedstream.core import reasons
from fedstream.core.errors import BadMessage, ConfigError, FedstreamError
from fedstream.core.formats import Format
from fedstream.core.messages import QUARANTINED, SetQuarantine
from fedstream.core.records import PrivacyLoss
from fedstream.private.accounting import epsilon
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import (
    EPOCHS_HEADER,
    INTENT_HEADER,
    REFUSALS,
    EpochKey,
    Intent,
    SealedUpdate,
)
from fedstream.private.settings import PrivateSettings, client_context
from fedstream.runtime.backoff import pause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.core.layout import Payload
    from fedstream.core.messages import Upload
    from fedstream.journal.progress import PrivacyAccount, Progress
    from fedstream.runtime.service import Context
    from fedstream.updater.state import RunState

_LOOK_S = 5.0  # between two requests for the helper's key
_EXPIRE_MS = 600_000  # of the key in Redis, which the updater renews
_SUSPECT: Final = 3  # dropped batches in a row after which a device is quarantined
_SPOILS: Final = "its private updates spoil sums"
# By refusal, why the device is quarantined that the helper names, itself or by its task.
_QUARANTINES: Final[Mapping[str, str]] = {
    "signature": _SPOILS,
    "seal": _SPOILS,
    "not in roster": _SPOILS,
    "participation": "it has spent its privacy budget, as the helper counts it over all runs",
}


class HelperUnavailable(FedstreamError):
    """The helper can't be reached, or can't open sums now."""

    retriable = True


@dataclass(frozen=True)
class Opening:
    """The helper's answer to an intent."""

    intent: Intent
    masks: bytes | None  # packed; None: refused
    refused: str = ""  # why
    quarantine: SetQuarantine | None = None  # of the device that no sum can have


class Sums:
    """Checks the sealed updates of a private run, and has its sums opened."""

    def __init__(
        self, policy: PrivacyPolicy, settings: PrivateSettings, client: Client, keys: Keys
    ) -> None:
        """Raises ConfigError for settings without a helper, or with unusable files."""
        if settings.helper is None:
            raise ConfigError("private.helper: name the helper's URL")
        self._policy, self._settings = policy, settings
        self._url = settings.helper.rstrip("/")
        self._client, self._keys = client, keys
        self._tls = client_context(settings)
        self._epochs: frozenset[str] | None = None  # that the helper can open; None: unknown
        self._key_due = asyncio.Event()  # Redis may have another key than the helper's newest
        self._loss: tuple[Mapping[int, PrivacyAccount], PrivacyLoss | None] = {}, None

    @property
    def format(self) -> Format:
        """The wire format of masked updates and of masks."""
        return self._policy.format

    @property
    def least(self) -> int:
        """The fewest updates in a sum."""
        return self._policy.min_batch

    # checks

    def refusal(self, upload: Upload, state: RunState) -> str:
        """The reason to refuse an update by its sealed part and its device; '' for none."""
        policy, progress = self._policy, state.progress
        if upload.format != self.format.name:
            return reasons.WIRE_FORMAT
        if (sealed := _sealed_in(upload)) is None or not _is_of(sealed, upload, state, policy):
            return reasons.SEAL
        if self._epochs is not None and sealed.epoch not in self._epochs:
            self.renew_key()  # Redis may have an earlier key, to which other devices seal, too
            return reasons.HELPER_LOST
        if any(one.device == upload.device for one in progress.held) or any(
            upload.device in devices for devices in progress.recent
        ):
            return reasons.IN_THE_BATCH
        account = progress.accounts.get(upload.device)
        weight = policy.weights[state.version - upload.since]
        if account is not None and account.squares + weight**2 > policy.allowance:
            return reasons.PRIVACY_SPENT
        return ""

    @staticmethod
    def is_signed(upload: Upload, sent: Payload) -> bool:
        """Whether the device has signed these masked words; the helper never sees them."""
        sealed = _sealed_in(upload)
        return sealed is not None and sent.is_of(sealed.masked)

    def suspects(self, state: RunState) -> SetQuarantine | None:
        """The quarantine of the devices whose last sums were all dropped; None: there is none."""
        known = state.quarantines.by_device
        found = [
            device
            for device, account in state.progress.accounts.items()
            if account.dropped >= _SUSPECT and device not in known
        ]
        return SetQuarantine(devices=tuple(found[:QUARANTINED]), why=_SPOILS) if found else None

    def loss(self, progress: Progress) -> PrivacyLoss:
        """What the sums have told so far, and the devices that can take part no more."""
        accounts, (known, loss) = progress.accounts, self._loss
        if loss is None or accounts is not known:  # each sum makes new accounts
            squares = max((one.squares for one in accounts.values()), default=0)
            sums = max((one.sums for one in accounts.values()), default=0)
            delta = self._settings.delta
            loss = PrivacyLoss(
                progress.sums,
                progress.dropped,
                epsilon(self._policy, squares, sums, delta) if self._policy.sigma else math.inf,
                delta,
                self._spent(progress),
                frozenset(chain.from_iterable(progress.recent)),
            )
            self._loss = accounts, loss
        return loss

    def _spent(self, progress: Progress) -> frozenset[int]:
        """The devices whose next update, at the largest weight, would exceed the allowance."""
        most = self._policy.allowance - max(self._policy.weights) ** 2
        return frozenset(device for device, one in progress.accounts.items() if one.squares > most)

    def exhausted(self, progress: Progress, devices: int, batch: int) -> str:
        """Why a run with ``devices`` is over; '' if enough of them may take part in turn."""
        begun = {one.device for one in progress.held}  # in buckets of the next version
        left = devices - len(self._spent(progress) - begun)
        batch *= self._policy.bands  # a device is in one of so many sums in a row
        if left >= batch:
            return ""
        return f"the privacy budget is spent: {left} devices may still take part, sums need {batch}"

    # the helper

    async def open(self, state: RunState) -> Opening:
        """Ask the helper for the masks of the batch that is due.

        If the helper has lost the batch's keys, its newest key is published first: a batch after
        this one is sealed to it. Raises HelperUnavailable, and ConfigError if the helper does not
        know us.
        """
        progress = state.progress
        intent = Intent(
            run=state.run.lineage,
            policy=self._policy.digest,
            version=state.version,
            updates=tuple(SealedUpdate.decode(one) for one in progress.sealed),
            weights=tuple(int(one.weight) for one in progress.in_sum),
        )
        status, body, about, headers = await self._ask("POST", "/v1/open", intent.encode())
        if status == 200:
            found = headers.get(INTENT_HEADER)
            if found != intent.digest:  # a proxy mixed answers up
                raise HelperUnavailable(
                    f"the helper at {self._url} answered for intent {found}, asked was "
                    f"{intent.digest}"
                )
            size = self._policy.word_bits // 8 * self._policy.parameters
            if len(body) != size:
                raise HelperUnavailable(
                    f"the helper at {self._url} answered {len(body)} bytes, a sum has {size}"
                )
            return Opening(intent, body)
        reason = about.get("reason")
        if status != 409 or reason is None:  # such as a proxy's answer
            raise HelperUnavailable(
                f"the helper at {self._url} answers {status}: {about.get('error', '')}"
            )
        if reason not in REFUSALS:  # of a later release: reasons are few, in journals and metrics
            reason = "refused"
        if reason == reasons.HELPER_LOST:
            await self._publish_key()
        return Opening(intent, None, reason, _quarantine(reason, about, intent))

    def renew_key(self) -> None:
        """Publish the helper's key soon: Redis may have none, or an earlier one."""
        self._key_due.set()

    async def keep_key(self, context: Context) -> None:
        """Publish the helper's key in Redis, where devices' trainers find it, until cancelled."""
        lost = False
        while True:
            self._key_due.clear()
            try:
                await self._publish_key()
            except FedstreamError as error:
                if not error.retriable:
                    raise
                if not lost:
                    context.log.warning("no key of the helper", reason=str(error))
                lost = True
            else:
                lost = False
            await pause(self._key_due, _LOOK_S if not lost else 1.0)

    async def _publish_key(self) -> None:
        status, body, _, headers = await self._ask("GET", "/v1/key")
        if status != 200:
            raise HelperUnavailable(f"the helper at {self._url} answers {status}, not its key")
        try:
            key = EpochKey.decode(body)
        except BadMessage as error:
            raise ConfigError(f"private.helper = {self._url!r}: not a helper: {error}") from error
        if key.policy != self._policy.digest:
            raise ConfigError(
                f"private.helper = {self._url!r} keeps to the policy {key.policy}, ours is "
                f"{self._policy.digest}: both must have the same file"
            )
        if EPOCHS_HEADER in headers:
            self._epochs = frozenset(headers[EPOCHS_HEADER].split(","))
        await self._client.call("SET", self._keys.sealing, body, "PX", _EXPIRE_MS)

    async def _ask(
        self, method: str, route: str, body: bytes | None = None
    ) -> tuple[int, bytes, dict[str, Any], Mapping[str, str]]:
        """One request: status, body, the body's JSON object if it is one, and headers."""
        settings = self._settings
        sent = {}
        if settings.token is not None:
            sent["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
        limit = aiohttp.ClientTimeout(total=settings.ask_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.request(
                    method, self._url + route, data=body, headers=sent, ssl=self._tls
                ) as reply,
            ):
                data = await reply.read()
                about = await reply.json() if reply.content_type.endswith("json") else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise HelperUnavailable(
                f"the helper at {self._url} can't be asked: {error or type(error).__name__}"
            ) from error
        if reply.status == 401:
            raise ConfigError(f"private.token: the helper at {self._url} refuses it")
        return reply.status, data, about if isinstance(about, dict) else {}, reply.headers


def _sealed_in(upload: Upload) -> SealedUpdate | None:
    try:
        return SealedUpdate.decode(upload.sealed) if upload.sealed is not None else None
    except BadMessage:
        return None


def _is_of(sealed: SealedUpdate, upload: Upload, state: RunState, policy: PrivacyPolicy) -> bool:
    """Whether a sealed part says what its upload says."""
    said = (sealed.task, sealed.attempt, sealed.device, sealed.tau, sealed.layout)
    ours = (upload.task, upload.attempt, upload.device, upload.tau, upload.layout)
    return (*said, sealed.run, sealed.policy) == (*ours, state.run.lineage, policy.digest)


def _quarantine(reason: str, about: dict[str, Any], intent: Intent) -> SetQuarantine | None:
    why = _QUARANTINES.get(reason)
    named = [
        one.device
        for one in intent.updates
        if about.get("device", one.device) == one.device and about.get("task", one.task) == one.task
    ]
    if why is None or len(named) != 1:
        return None
    return SetQuarantine(devices=tuple(named), why=why)
