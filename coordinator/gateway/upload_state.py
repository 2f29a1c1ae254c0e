"""An upload's state in Redis: its note, and the receipt of its task.

With the note, any replica can continue the upload. One periodic query serves all requests that wait
for a receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstream.broker.blobs import CHUNK
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.core import reasons
from fedstream.protocol.messages import Receipt, UpdateReport

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.gateway import Fate
    from fedstream.coordinator.gateway.upload_locks import UploadLock

EXPIRE_S: Final = 600.0  # expiry of an incomplete upload after its last chunk


def upload_blob(client: Client, keys: Keys, site: str, task: str, attempt: str) -> PartialBlob:
    """The blob and the note of an attempt's upload."""
    name = f"{task}.{attempt}"
    key, note_key = keys.update(f"{site}/{name}"), keys.upload_note(site, name)
    return PartialBlob(client, key, note_key, expire_s=EXPIRE_S)


class Source(BaseModel):
    """The task of an update, as handed to this site."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: int
    seed: int
    stream: str
    entry: str  # its id in the stream


class UploadNote(BaseModel):
    """An upload's task, length and report."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Source
    length: int  # bytes
    report: UpdateReport
    complete: bool = False  # the device has sent the last byte

    def encode(self) -> bytes:
        """Encode the note for Redis."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes | None) -> Self | None:
        """Decode a note; None if there is none or another release wrote it."""
        if data is None:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def at(self, chunks: int) -> int:
        """The number of bytes in the first ``chunks`` chunks."""
        return min(chunks * CHUNK, self.length)


# receipts

WAIT_S: Final = 2.0  # wait for a coordinator's decision; then the device asks again
_LOOK_S = 0.02  # between two looks

Fates: TypeAlias = "Callable[[Sequence[str]], Awaitable[Sequence[Fate]]]"
IsOpen: TypeAlias = "Callable[[str], Awaitable[bool]]"

ADMITTED: Final = Receipt(state="admitted")
RECEIVED: Final = Receipt(state="received")
_TWICE: Final = Receipt(state="refused", reason=reasons.ANSWERED_TWICE)


def receipt_of(fate: Fate, attempt: str) -> Receipt | None:
    """The receipt of an attempt at a task; None while the task is undecided."""
    if fate.admitted is not None:
        return ADMITTED if fate.admitted == attempt else _TWICE
    match fate.outcome:
        case None:
            return None
        case "applied" | "buffered" | "refused" if fate.attempt != attempt:
            return _TWICE
        case "applied" | "buffered":
            return ADMITTED
        case "refused":
            return Receipt(state="refused", reason=fate.reason)
        case _:  # given up or dead
            return Receipt(state="given up", reason=fate.reason)


class Receipts:
    """The receipts of one replica's devices."""

    def __init__(self, fates: Fates, is_open: IsOpen) -> None:
        """``fates``: reads the state of tasks. ``is_open``: whether a task is open."""
        self._fates = fates
        self._is_open = is_open
        self._waiting: dict[tuple[str, str], asyncio.Future[Receipt]] = {}  # by task and attempt
        self._looking: asyncio.Task[None] | None = None

    async def now(self, task: str, attempt: str) -> Receipt | None:
        """The receipt at this moment; None while the task is undecided."""
        [fate] = await self._fates([task])
        return receipt_of(fate, attempt)

    async def of(self, task: str, attempt: str, lock: UploadLock) -> Receipt | None:
        """Wait for the receipt; "received" if the decision takes longer than two seconds.

        None if there will be no decision, because Redis has forgotten the task: it was emptied or
        fell back, or the task ended long ago. Raises TakenOver.
        """
        loop = asyncio.get_running_loop()
        found = self._waiting[task, attempt] = loop.create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            return await lock.within(loop.time() + WAIT_S, lambda: found)
        except TimeoutError:
            if await self._is_open(task):
                return RECEIVED
            return await self.now(task, attempt)  # the task may have ended a moment ago
        finally:
            del self._waiting[task, attempt]

    async def _look(self) -> None:
        """Query periodically until no request waits; an error fails all waiting requests."""
        try:
            while waiting := dict(self._waiting):
                fates = await self._fates([task for task, _ in waiting])
                for (key, found), fate in zip(waiting.items(), fates, strict=True):
                    receipt = receipt_of(fate, key[1])
                    if receipt is not None and not found.done():
                        found.set_result(receipt)
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            for found in self._waiting.values():
                if not found.done():
                    found.set_exception(error)
        finally:
            self._looking = None
