"""Reading journals in a process of its own, while this one loads what will show them.

Both take about as long, for a run of 100,000 versions that nobody has looked at yet. The process
leaves an index; whatever keeps it from that, the journal is read again here, where somebody is told
what is wrong with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fedstream.history.index import index, index_of
from fedstream.journal import stored_bytes
from fedstream.runtime import process
from fedstream.terminal import adding, progress

LEAST = 32 << 20  # bytes of a journal that are worth a process


@contextmanager
def reading_ahead(journals: Sequence[Path]) -> Iterator[bool]:
    """Index journals during the block, if they are large and have no index; wait at its end.

    Yields whether there is anything to wait for.
    """
    new = [journal for journal in journals if _is_worth_it(journal)]
    # A fork has this thread alone, and what somebody else's program holds.
    if not new or not process.is_own() or threading.active_count() > 1 or sys.platform != "linux":
        yield False
        return
    above, child = os.getpid(), os.fork()
    if child == 0:
        _read(new, above)
    try:
        yield True
    except BaseException:
        os.kill(child, signal.SIGTERM)
        raise
    finally:
        os.waitpid(child, 0)


def _is_worth_it(journal: Path) -> bool:
    path = index_of(journal)
    if path.exists() or not os.access(path.parent, os.W_OK):
        return False
    return stored_bytes(journal) >= LEAST


def _read(journals: Sequence[Path], above: int) -> NoReturn:
    """What the process does. It ends with the one above it, however that one ends."""
    with suppress(BaseException):
        for journal in journals:
            total = stored_bytes(journal)
            with progress("reading the journal", total, quiet=False, parts=False) as step:
                index(journal, _while(above, adding(step, total)))
    os._exit(0)


def _while(above: int, add: Callable[[int], object]) -> Callable[[int], object]:
    """``add``, as long as this process belongs to another one."""

    def added(count: int) -> None:
        if os.getppid() != above:
            os._exit(1)
        add(count)

    return added
