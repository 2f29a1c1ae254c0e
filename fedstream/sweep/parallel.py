"""Simulations in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from fedstream.core.errors import FedstreamError
from fedstream.runtime.process import PARENT_VARIABLE, end_with_parent

J = TypeVar("J")
R = TypeVar("R")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(jobs: int, wanted: int | None) -> tuple[int, int]:
    """The number of processes for some jobs, and of torch's threads in each.

    ``wanted``: the most processes; None: one per core.
    """
    processes = max(1, min(wanted or cores(), jobs))
    return processes, max(1, cores() // processes)


def each(work: Callable[[J], R], jobs: Sequence[J], *, processes: int, threads: int) -> Iterator[R]:
    """Yield ``work(job)`` for every job, as they finish; with one process, in this one.

    ``work``: a module's function; jobs and results are pickled. Raises the errors of ``work``, and
    FedstreamError if a process was killed.
    """
    if processes == 1:
        import torch

        torch.set_num_threads(threads)
        yield from map(work, jobs)
        return
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),  # torch does not survive a fork
        initializer=_begin,
        initargs=(threads,),
    )
    try:
        for done in as_completed([pool.submit(work, job) for job in jobs]):
            yield done.result()
    except BrokenProcessPool as error:
        raise FedstreamError(
            "a process of the sweep was killed, perhaps for lack of memory: the same command "
            "continues; a smaller --jobs needs less"
        ) from error
    except BaseException:  # don't wait for lost results, also on Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    pool.shutdown()


def _begin(threads: int) -> None:
    """Set up a process that ends with its parent and ignores Ctrl-C."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    end_with_parent()
    torch.set_num_threads(threads)
