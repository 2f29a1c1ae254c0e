"""When a process that died is started again, why it died, and what can go wrong beside it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from fedstream.local import supervisor
from fedstream.local.supervisor import (
    Program,
    Restarts,
    Supervisor,
    how_it_ended,
    last_words,
)


def test_the_wait_doubles_until_it_is_given_up() -> None:
    policy = Restarts()
    assert [policy.died(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_one_that_lived_long_begins_anew() -> None:
    policy = Restarts()
    for _ in range(4):
        policy.died(1.0)
    assert policy.died(31.0) == 0.5
    assert policy.died(1.0) == 1.0


def test_one_that_dies_of_its_work_is_started_for_ever() -> None:
    policy = Restarts()
    assert {policy.died(1.0, worked=True) for _ in range(50)} == {0.5}
    assert policy.died(1.0) == 0.5


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with 1"), (0, "exited with 0"), (-9, "was killed by SIGKILL"),
        (-250, "was killed by signal 250"),
    ],
)  # fmt: skip
def test_how_it_ended_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_the_last_words_are_the_reason_of_the_last_error() -> None:
    lines = [
        json.dumps({"level": "error", "event": "failed", "reason": "the first"}),
        json.dumps({"level": "error", "event": "failed", "reason": "the second"}),
        json.dumps({"level": "info", "event": "stopped"}),
    ]
    assert last_words("\n".join(lines)) == "the second"


def test_the_last_words_of_a_crash_are_the_exception() -> None:
    trace = "Traceback (most recent call last):\n  File ...\nKeyError: 'x'"
    line = json.dumps({"level": "error", "event": "crashed", "exception": trace})
    assert last_words(line) == "KeyError: 'x'"


def test_the_last_words_may_be_what_python_printed() -> None:
    text = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'x'\n"
    assert last_words(text) == "ModuleNotFoundError: No module named 'x'"
    assert last_words("") == ""


class Told(Supervisor):
    """A supervisor of services that are none, and what it said."""

    def __init__(self, logs: Path, *programs: Program) -> None:
        self.said: list[str] = []
        self.over = asyncio.Event()
        self.why = ""
        super().__init__(
            programs, logs=logs, environment=os.environ, say=self._say, failed=self._failed,
            worked=self._worked,
        )  # fmt: skip

    def _say(self, line: str) -> None:
        self.said.append(line)

    def _failed(self, why: str) -> None:
        self.why = why
        self.over.set()

    async def _worked(self, program: Program, pid: int) -> bool:
        raise LookupError(f"nobody knows {program.name}")


async def test_a_service_that_cannot_be_started_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.001)
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    told.start()
    await asyncio.wait_for(told.over.wait(), 10)
    assert told.said[0].startswith("one cannot be started: [Errno 2] No such file")
    assert told.said[0].endswith("; restarting it in 0.001 s")
    assert told.why.startswith("one died 5 times in a row; the last time it cannot be started: ")
    assert told.restarts == {"one": 4}
    await told.stop()


@pytest.mark.process
async def test_a_service_that_could_not_be_started_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.001)
    told = Told(tmp_path / "logs", Program("one", "no-such-role", (), 1.0))
    monkeypatch.setattr(told, "say", lambda _: (tmp_path / "logs").mkdir())
    told.start()
    await asyncio.wait_for(told.over.wait(), 100)  # Python starts, beside others' work
    assert told.why.startswith("one exited with 2")
    assert told.restarts == {"one": 1}
    await told.stop()


async def test_a_log_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    assert told.children[0]._last_words(0).startswith("its log cannot be read: [Errno 2]")


async def test_what_goes_wrong_with_one_ends_the_run_and_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(
        tmp_path, Program("one", "scheduler", (), 1.0), Program("other", "evaluator", (), 1.0)
    )
    one, other = told.children
    stopped: list[str] = []

    async def ended() -> tuple[int, int, int]:
        return 1, 0, 0

    async def stop() -> None:
        stopped.append("other")

    monkeypatch.setattr(one, "_one_life", ended)
    monkeypatch.setattr(other, "stop", stop)
    one.start()
    await asyncio.wait_for(told.over.wait(), 10)
    assert told.why == "one is no longer supervised: LookupError('nobody knows one')"
    with pytest.raises(ExceptionGroup, match="supervision failed") as raised:
        await told.stop()
    assert [str(error) for error in raised.value.exceptions] == ["nobody knows one"]
    assert stopped == ["other"]
