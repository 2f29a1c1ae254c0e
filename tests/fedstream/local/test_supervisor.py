"""When a process that died is started again, why it died, and what can go wrong beside it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from fedstream.local.launcher import Interpreters
from fedstream.local.supervisor import (
    Child,
    Program,
    Restarts,
    Supervisor,
    how_it_ended,
    last_words,
)
from tests.support import wait_until


def test_wait_doubles_until_giving_up() -> None:
    policy = Restarts()
    assert [policy.died(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_long_life_resets_the_count() -> None:
    policy = Restarts()
    for _ in range(4):
        policy.died(1.0)
    assert policy.died(31.0) == 0.5
    assert policy.died(1.0) == 1.0


def test_service_killed_by_its_work_is_always_restarted() -> None:
    policy = Restarts()
    assert {policy.died(1.0, worked=True) for _ in range(50)} == {0.5}
    assert policy.died(1.0) == 0.5


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with 1"),
        (0, "exited with 0"),
        (-9, "was killed by SIGKILL"),
        (-250, "was killed by signal 250"),
    ],
)
def test_exit_status_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_last_words_are_the_last_errors_reason() -> None:
    lines = [
        json.dumps({"level": "error", "event": "failed", "reason": "the first"}),
        json.dumps({"level": "error", "event": "failed", "reason": "the second"}),
        json.dumps({"level": "info", "event": "stopped"}),
    ]
    assert last_words("\n".join(lines)) == "the second"


def test_last_words_of_a_crash_are_the_exception() -> None:
    trace = "Traceback (most recent call last):\n  File ...\nKeyError: 'x'"
    line = json.dumps({"level": "error", "event": "crashed", "exception": trace})
    assert last_words(line) == "KeyError: 'x'"


def test_last_words_may_be_pythons_output() -> None:
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
            programs,
            launcher=Interpreters(),
            logs=logs,
            environment=os.environ,
            say=self._say,
            failed=self._failed,
            worked=self._worked,
            first_delay_s=0.001,
        )

    def _say(self, line: str) -> None:
        self.said.append(line)

    def _failed(self, why: str) -> None:
        self.why = why
        self.over.set()

    async def _worked(self, program: Program, pid: int) -> bool:
        raise LookupError(f"nobody knows {program.name}")


async def test_failure_to_start_counts_as_a_death(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    told.start()
    await asyncio.wait_for(told.over.wait(), 10)
    assert told.said[0].startswith("one cannot be started: [Errno 2] No such file")
    assert told.said[0].endswith("; restarting it in 0.001 s")
    assert told.why.startswith("one died 5 times in a row; the last time it cannot be started: ")
    assert told.restarts == {"one": 4}
    await told.stop()


async def test_run_goes_on_without_a_service_it_can_do_without(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("sinks", "sinks", (), 1.0, vital=False))
    told.start()
    await wait_until(lambda: told.said and "goes on without it" in told.said[-1])
    assert told.said[-1].startswith("sinks died 5 times in a row")
    assert not told.over.is_set()
    await told.stop()


class Ended:
    """A process that has ended."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.returncode = code

    async def wait(self) -> int:
        return self.returncode

    def terminate(self) -> None:
        raise ProcessLookupError

    kill = terminate


class Endings:
    """A launcher of processes that end at once, with these codes, and what it was asked for."""

    def __init__(self, *codes: int) -> None:
        self.codes = [*codes]
        self.asked: list[tuple[list[str], Mapping[str, str]]] = []

    async def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Ended:
        self.asked.append(([*words], environment))
        return Ended(self.codes.pop(0))


async def test_program_that_may_end_is_restarted_only_after_a_failure(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.launcher = launcher = Endings(-9, 0)
    told.worked = nobody
    told.start()
    told.add([Program("device-1", "device", ("--x",), 1.0, ends=True, environment={"SECRET": "y"})])
    [child] = told.children
    assert child._keeper is not None
    await asyncio.wait_for(child._keeper, 10)
    assert told.said == ["device-1 was killed by SIGKILL; restarting it in 0.001 s"]
    assert (told.restarts, told.why) == ({"device-1": 1}, "")
    words, environment = launcher.asked[1]
    assert words == ["device", "--x"]
    assert environment == {**os.environ, "SECRET": "y"}
    await told.stop()


async def nobody(_program: Program, _pid: int) -> bool:
    """Nobody had begun to work."""
    return False


@pytest.mark.process
async def test_service_that_failed_to_start_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path / "logs", Program("one", "no-such-role", (), 1.0))
    monkeypatch.setattr(told, "say", lambda _: (tmp_path / "logs").mkdir())
    told.start()
    await asyncio.wait_for(told.over.wait(), 100)  # Python starts, beside others' work
    assert told.why.startswith("one exited with 2")
    assert told.restarts == {"one": 1}
    await told.stop()


async def test_unreadable_log_is_reported(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    assert told.children[0]._last_words(0).startswith("its log cannot be read: [Errno 2]")


async def test_failed_supervision_ends_the_run_and_stops_the_others(
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


async def test_waits_of_those_that_stop_are_ended_until_they_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [Program(name, name, (), 1.0) for name in ("trainer", "scheduler", "updater")]
    told = Told(tmp_path, *programs)
    ended: list[str] = []

    async def end_waits(names: Collection[str]) -> None:
        ended.extend(names)
        if ended.count(*names) == 2:
            stopped[next(iter(names))].set()

    stopped = {program.name: asyncio.Event() for program in programs}

    async def stop(child: Child) -> None:
        await stopped[child.program.name].wait()

    monkeypatch.setattr(Child, "stop", stop)
    told._end_waits = end_waits
    await told.stop()
    assert ended == ["scheduler"] * 2 + ["trainer"] * 2 + ["updater"] * 2
