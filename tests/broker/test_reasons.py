"""Reasons come off the wire as text, and are counted by a closed set."""

from __future__ import annotations

import pytest

from fedstream.broker import reasons


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("dropped out", "dropped out"),
        ("deadline passed", "deadline passed"),
        ("round over", "round over"),
        ("raised ValueError", "raised ValueError"),
        ("raised LayoutMismatch", "raised LayoutMismatch"),
        ("raised OutOfMemoryError", "raised OutOfMemoryError"),
        ("raised Ours", "raised another error"),
        ("raised ", "raised another error"),
        ("raised KeyboardInterrupt", "raised another error"),
        ("tired", "another reason"),
        ("run finished", "another reason"),  # which a coordinator says, and no trainer
    ],
)
def test_why_a_device_gave_up(said: str, counted: str) -> None:
    assert reasons.of_giving_up(said) == counted


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("crashed its trainers", "crashed its trainers"),
        ("crashed its coordinators", "crashed its coordinators"),
        ("task: device: Input should be a valid integer", "unreadable"),
    ],
)
def test_why_an_entry_is_dead(said: str, counted: str) -> None:
    assert reasons.of_death(said) == counted
