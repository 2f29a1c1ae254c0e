"""A worker thread: calls in order, and results and errors where the call was made."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest

from fedstream.runtime.service import Worker
from tests.support import wait_until


def threads(name: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == name]


async def test_calls_are_made_in_order_and_by_the_same_thread() -> None:
    made: list[tuple[int, str]] = []

    def call(n: int, *, twice: bool = False) -> int:
        made.append((n, threading.current_thread().name))
        return 2 * n if twice else n

    with Worker("training") as worker:
        results = await asyncio.gather(*(worker.run(call, n, twice=n == 3) for n in range(4)))
    assert results == [0, 1, 2, 6]
    assert made == [(n, "training") for n in range(4)]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("no data"), ValueError),
        (SystemExit(3), SystemExit),  # the thread goes on
        (StopIteration("no more batches"), RuntimeError),  # it would be lost otherwise
    ],
    ids=["an error", "an exit", "an end of iteration"],
)
async def test_what_a_call_raises_is_raised_where_it_is_awaited(
    error: BaseException, raised: type[BaseException]
) -> None:
    def call() -> None:
        raise error

    with Worker("training") as worker:
        with pytest.raises(raised, match=str(error)):
            await worker.run(call)
        assert await worker.run(str, 5) == "5"


async def test_cancelled_call_is_finished_and_those_after_it_are_made() -> None:
    gate, finished = threading.Event(), threading.Event()

    def call() -> None:
        gate.wait()
        finished.set()

    with Worker("training") as worker:
        waiting = worker.run(call)
        waiting.cancel()
        gate.set()
        assert await worker.run(finished.is_set)
        assert waiting.cancelled()


async def test_thread_ends_after_the_calls_that_were_asked_for() -> None:
    gate = threading.Event()
    with Worker("ending") as worker:
        late = worker.run(gate.wait)
    assert len(threads("ending")) == 1
    gate.set()
    assert await late
    await wait_until(lambda: not threads("ending"))


async def test_arguments_are_let_go_once_a_call_was_made() -> None:
    """A model that was trained must not stay in memory while its trainer waits for a task."""

    class Big:
        pass

    given = Big()
    known = ref(given)
    with Worker("training") as worker:
        await worker.run(id, given)
        del given
        await wait_until(lambda: known() is None)


def test_result_for_a_closed_loop_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    gate = threading.Event()

    async def ask(worker: Worker) -> None:
        worker.run(gate.wait)

    with Worker("late") as worker, ThreadPoolExecutor(1) as waiting:
        asyncio.run(ask(worker))
        (thread,) = threads("late")
        gate.set()
        worker.close()
        waiting.submit(thread.join).result(10)
    assert capfd.readouterr().err == ""
