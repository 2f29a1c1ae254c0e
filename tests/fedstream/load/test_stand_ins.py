"""Made-up updates differ, and their digests are right."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.broker.digest import digest_of
from fedstream.load.stand_ins import StandIn, StandIns
from fedstream.wire import changes


def whole(made: StandIn) -> bytes:
    return b"".join(made.part(0, len(made.first) + len(made.last)))


@pytest.mark.parametrize("cut", [0, 1, 3995, 3996, 3998, 4000])
def test_parts_make_the_whole(cut: int) -> None:
    made = StandIns().next(4000)
    assert b"".join((*made.part(0, cut), *made.part(cut, 4000))) == whole(made)


def test_updates_differ_and_are_all_finite() -> None:
    stand_ins = StandIns()
    made = [stand_ins.next(4000) for _ in range(100)]
    assert all(digest_of(whole(one)) == one.digest for one in made)
    assert len({one.digest for one in made}) == 100
    values = np.frombuffer(whole(made[7]), "<f4")
    assert values.size == 1000
    assert np.abs(values[:-1]).max() < 0.5
    assert 0 < values[-1] < 1


def test_updates_are_small_numbers_in_bfloat16_too() -> None:
    data = whole(StandIns().next(4000))
    values = (np.frombuffer(data[:-4], "<u2").astype("<u4") << 16).view("<f4")
    assert np.abs(values).max() < 0.5
    assert np.abs(values).min() > 0.005


def test_sizes_do_not_mix() -> None:
    stand_ins = StandIns()
    for size in (8, 4, 2, 8):
        made = stand_ins.next(size)
        assert len(whole(made)) == size
        assert digest_of(whole(made)) == made.digest


def test_models_made_of_them_change_in_most_of_their_bytes() -> None:
    """Otherwise, what changed would be next to nothing, which it never is in a real run."""
    stand_ins, model, share = StandIns(), np.zeros(2000, "<f4"), 0.0
    for _ in range(40):
        before = model
        sent = np.frombuffer(whole(stand_ins.next(8000)), "<f4")
        model = before + np.float32(0.1) * (sent - before)
        frame = changes.encode(before.view(np.uint8), model.view(np.uint8), 4)
        share = frame.size / model.nbytes
    assert share == pytest.approx(0.8, abs=0.15)
