"""The values of a layout's unshared tensors: a file beside the segments, named by its digest.

The file is on disk before the first segment whose layout names it, and is never changed.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.core.layout import Model
from fedstream.journal.errors import JournalDamaged, JournalError
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:
    from fedstream.core.layout import Layout, Unshared

SUFFIX = ".unshared"


def stored(folder: Path, layout: Layout) -> Layout:
    """The layout with its unshared values in a journal's folder, read when they are needed."""
    if (unshared := layout.unshared) is None:
        return layout
    return layout.with_values(partial(_kept, folder, unshared.digest, unshared.layout))


def read(folder: Path, digest: str, layout: Layout) -> Model:
    """Read the values. Raises JournalError; JournalDamaged if they don't match their digest.

    ``layout``: of the unshared tensors alone.
    """
    path, model = folder / f"{digest}{SUFFIX}", Model(layout)
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.readinto(model.buffer.data)
            is_whole = size == model.buffer.nbytes and not file.read(1)
    except OSError as error:
        raise JournalError(
            f"{path}: the frozen or local parameters cannot be read: {error.strerror}: restore it"
        ) from error
    if not is_whole or not model.is_of(digest):
        raise JournalDamaged(
            f"{path}: the frozen or local parameters do not match their digest: restore it"
        )
    return model


_kept = lru_cache(1)(read)  # all segments of a run have the same


def keep(folder: Path, unshared: Unshared) -> None:
    """Put the values into the folder, and on disk. Raises OSError, and as :meth:`Unshared.model`.

    An existing file of another size is replaced; a damaged one is found by its readers.
    """
    path = folder / f"{unshared.digest}{SUFFIX}"
    with suppress(FileNotFoundError):
        if path.stat().st_size == unshared.layout.nbytes:
            return
    aside = folder / f".{unshared.digest[:16]}.{secrets.token_hex(4)}.tmp"
    try:
        with open(aside, "xb", opener=_private) as file:
            file.write(unshared.model().buffer.data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
