"""Made-up updates differ, and their digests are right."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.broker.digest import digest_of
from fedstream.load.stand_ins import StandIns
from fedstream.wire import changes


def test_updates_differ_and_are_all_finite() -> None:
    stand_ins = StandIns()
    made = [stand_ins.next(4000) for _ in range(100)]
    assert all(digest_of(data) == digest for data, digest in made)
    assert len({digest for _, digest in made}) == 100
    values = np.frombuffer(made[7][0], "<f4")
    assert values.size == 1000
    assert np.abs(values[:-1]).max() < 0.5
    assert 0 < values[-1] < 1


def test_updates_are_small_numbers_in_bfloat16_too() -> None:
    data, _ = StandIns().next(4000)
    values = (np.frombuffer(data[:-4], "<u2").astype("<u4") << 16).view("<f4")
    assert np.abs(values).max() < 0.5
    assert np.abs(values).min() > 0.005


def test_sizes_do_not_mix() -> None:
    stand_ins = StandIns()
    for size in (8, 4, 2, 8):
        data, digest = stand_ins.next(size)
        assert len(data) == size
        assert digest_of(data) == digest


def test_models_made_of_them_change_in_most_of_their_bytes() -> None:
    """Otherwise, what changed would be next to nothing, which it never is in a real run."""
    stand_ins, model, share = StandIns(), np.zeros(2000, "<f4"), 0.0
    for _ in range(40):
        before = model
        model = before + np.float32(0.1) * (np.frombuffer(stand_ins.next(8000)[0], "<f4") - before)
        frame = changes.encode(before.view(np.uint8), model.view(np.uint8), 4)
        share = frame.size / model.nbytes
    assert share == pytest.approx(0.8, abs=0.15)
