"""What changed from one model to a newer one, for devices that have the older: made once a pair."""

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

_WORTH_IT = 0.9  # of the model's bytes: changes that save less are not sent
_REMEMBERED = 1000  # pairs that were offered, and pairs whose changes are not worth it


class NotWorthIt(FedstreamError):
    """The changes are hardly smaller than the model, or there is no room for them."""


class ModelChanges:
    """The changes that were last asked for, up to a budget of bytes."""

    def __init__(self, budget: int) -> None:
        """``budget``: 0 if there are to be none."""
        self._is_on = budget > 0
        self._cache = ByteCache(budget)
        self._offered: dict[str, None] = {}  # pairs, the newest last
        self._useless: dict[str, None] = {}  # likewise
        self._turn = asyncio.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._cache.nbytes

    def may_help(self, old: str, new: str) -> bool:
        """Whether it makes sense to ask for what changed between these two digests."""
        return self._is_on and _pair(old, new) not in self._useless

    def offer(self, old: str, new: str) -> None:
        """Note that a device was told that it may ask for what changed between these digests."""
        _note(self._offered, _pair(old, new))

    def is_offered(self, old: str, new: str) -> bool:
        """Whether this was among the last offers."""
        return _pair(old, new) in self._offered

    def there(self, old: str, new: str) -> CachedBytes | None:
        """What changed between these two digests, if it was made and is still in memory."""
        return self._cache.there(_pair(old, new))

    async def get(self, old: CachedBytes, new: CachedBytes, layout: Layout) -> CachedBytes:
        """What turns the one model into the other, both of one format.

        Raises NotWorthIt, also if a model can't be decoded: devices say so.
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
        async with self._turn:  # each takes some three times the model's bytes meanwhile
            found = await asyncio.to_thread(_between, old, new, layout)
        if found.data.nbytes > most:
            raise NotWorthIt(f"{found.data.nbytes} bytes of changes")
        return found

    def tidy(self) -> None:
        """Keep to the budget what nobody reads."""
        self._cache.tidy()


def _between(old: CachedBytes, new: CachedBytes, layout: Layout) -> CachedBytes:
    how = replace(format_of(new.format), zstd=False)
    before, after = _inside(old, layout), _inside(new, layout)
    frame = changes.encode(before, after, changes.width_of(how.kind)).data.toreadonly()
    return CachedBytes(frame, digest_of(frame, algorithm_of(new.digest)), f"{how.name}+changes")


def _inside(one: CachedBytes, layout: Layout) -> npt.NDArray[np.uint8]:
    """The bytes that a model's digest is of."""
    how, data = format_of(one.format), np.frombuffer(one.data, np.uint8)
    return compressed.decode(data, how.sizes(layout)[1]) if how.zstd else data


def _note(pairs: dict[str, None], pair: str) -> None:
    pairs.pop(pair, None)
    pairs[pair] = None
    while len(pairs) > _REMEMBERED:
        del pairs[next(iter(pairs))]


def _pair(old: str, new: str) -> str:
    return f"{old}-{new}"
