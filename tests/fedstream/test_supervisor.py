"""When a process that died is started again, and why it died: pure functions."""

from __future__ import annotations

import json

import pytest

from fedstream.supervisor import Restarts, how_it_ended, last_words


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
