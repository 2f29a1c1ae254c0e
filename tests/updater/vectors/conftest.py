"""What is remembered of every device: it outlives the updater, Redis and the segments it was in."""

from __future__ import annotations

import pytest

from fedstream.strategies import Strategy
from tests.support import Hand
from tests.updater.vectors.twin import Twin, layout_for


@pytest.fixture
def twin(hand: Hand, rule: Strategy) -> Twin:
    """The run's twin."""
    hand.layout = layout_for(rule)
    return Twin(rule, hand.layout)
