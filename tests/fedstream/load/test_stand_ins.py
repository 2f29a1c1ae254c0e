"""Made-up updates differ, and their digests are right."""

from __future__ import annotations

import numpy as np

from fedstream.broker.digest import digest_of
from fedstream.load.stand_ins import StandIns


def test_updates_differ_in_their_last_value_and_are_all_finite() -> None:
    stand_ins = StandIns()
    made = [stand_ins.next(4000) for _ in range(100)]
    assert all(digest_of(data) == digest for data, digest in made)
    assert len({digest for _, digest in made}) == 100
    values = np.frombuffer(made[7][0], "<f4")
    assert values.size == 1000
    assert not values[:-1].any()
    assert 0 < values[-1] < 1


def test_sizes_do_not_mix() -> None:
    stand_ins = StandIns()
    for size in (8, 4, 2, 8):
        data, digest = stand_ins.next(size)
        assert len(data) == size
        assert digest_of(data) == digest
