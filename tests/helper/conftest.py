"""A helper with enrolled devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helper.batches import Batches
from tests.private.enrolled import policy_of

Make = Callable[..., Batches]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A helper whose policy has some other keys."""
    made: list[Batches] = []

    def make(**changes: Any) -> Batches:
        made.append(Batches(tmp_path / f"helper-{len(made)}.sqlite", policy_of(**changes)))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.fixture
def batches(make: Make) -> Batches:
    """A helper of the usual policy."""
    return make()
