"""Changes between two models, for devices that have the older one; made once per pair."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedstream.coordinator.gateway.byte_cache import ByteCache, CachedBytes, NoRoom
from fedstream.core import changes, compressed
from fedstream.core.digest import algorithm_of, digest_of
from fedstream.core.errors import FedstreamError, Undecodable
from fedstream.core.formats import format_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.core.layout import Layout

_WORTH_IT = 0.9  # share of the model's bytes above which changes are not sent
_REMEMBERED = 1000  # offered pairs, and pairs whose changes are too large


class NotWorthIt(FedstreamError):
    """The changes are hardly smaller than the model, or memory has no room for them."""


class ModelChanges:
    """The most recently requested changes, within a budget of bytes."""

    def __init__(self, budget: int) -> None:
        """``budget``: in bytes; 0 disables changes."""
        self._is_on = budget > 0
        self._cache = ByteCache(budget)
        self._offered: dict[str, None] = {}  # pairs, the newest last
        self._useless: dict[str, None] = {}  # pairs not worth it, the newest last
        self._turn = asyncio.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of changes in memory."""
        return self._cache.nbytes

    def may_help(self, old: str, new: str) -> bool:
        """Whether changes between the models of these digests may save bytes."""
        return self._is_on and _pair(old, new) not in self._useless

    def offer(self, old: str, new: str) -> None:
        """Note that a device was offered the changes between the models of these digests."""
        _note(self._offered, _pair(old, new))

    def is_offered(self, old: str, new: str) -> bool:
        """Whether the changes between the models of these digests are among the last offers."""
        return _pair(old, new) in self._offered

    def there(self, old: str, new: str) -> CachedBytes | None:
        """The changes between the models of these digests if they are in memory, else None."""
        return self._cache.there(_pair(old, new))

    async def get(self, old: CachedBytes, new: CachedBytes, layout: Layout) -> CachedBytes:
        """Get the changes from one model to another of the same format.

        Raises NotWorthIt, also if a model is undecodable: devices will report that.
        """
        most = int(_WORTH_IT * new.data.nbytes)
        pair = _pair(old.digest, new.digest)
        try:
            return await self._cache.get(pair, most, partial(self._make, old, new, layout, most))
        except NoRoom as error:
            raise NotWorthIt(str(error)) from error
        except (NotWorthIt, Undecodable) as error:
            _note(self._useless, pair)
            raise NotWorthIt(str(error)) from error

    async def _make(
        self, old: CachedBytes, new: CachedBytes, layout: Layout, most: int
    ) -> CachedBytes:
        async with self._turn:  # each needs about three times the model's bytes
            found = await asyncio.to_thread(_between, old, new, layout)
        if found.data.nbytes > most:
            raise NotWorthIt(f"{found.data.nbytes} bytes of changes")
        return found

    def tidy(self) -> None:
        """Drop unread changes above the budget."""
        self._cache.tidy()


def _between(old: CachedBytes, new: CachedBytes, layout: Layout) -> CachedBytes:
    how = replace(format_of(new.format), zstd=False)
    before, after = _inside(old, layout), _inside(new, layout)
    frame = changes.encode(before, after, changes.width_of(how.kind)).data.toreadonly()
    return CachedBytes(frame, digest_of(frame, algorithm_of(new.digest)), f"{how.name}+changes")


def _inside(one: CachedBytes, layout: Layout) -> npt.NDArray[np.uint8]:
    """The bytes that the model's digest covers."""
    how, data = format_of(one.format), np.frombuffer(one.data, np.uint8)
    return compressed.decode(data, how.sizes(layout)[1]) if how.zstd else data


def _note(pairs: dict[str, None], pair: str) -> None:
    pairs.pop(pair, None)
    pairs[pair] = None
    while len(pairs) > _REMEMBERED:
        del pairs[next(iter(pairs))]


def _pair(old: str, new: str) -> str:
    return f"{old}-{new}"
