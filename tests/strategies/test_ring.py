"""Ringmaster beside FedBuff, and a round of Ringleader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstream.core.layout import Model
from fedstream.strategies import (
    FedBuffSettings,
    Memory,
    RingleaderSettings,
    RingmasterSettings,
    State,
    Update,
)
from tests.strategies.test_independent import LAYOUT, WIDTH, M, played
from tests.support import model_of


def test_ringmaster_is_fedbuff_without_a_buffer() -> None:
    _, found = played(RingmasterSettings(max_staleness=2, server_lr=0.7))
    _, wanted = played(FedBuffSettings(buffer_size=1, max_staleness=2, server_lr=0.7))
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


def test_a_sum_lost_with_redis_is_made_again() -> None:
    """The updater goes on with the devices' vectors alone, in the first phase of later rounds."""
    rule, rng = RingleaderSettings(server_lr=1.0).build(M), np.random.default_rng(0)
    kept, lost, losses = State(0, model_of(LAYOUT)), State(0, model_of(LAYOUT)), 0
    for _ in range(400):
        device, delta = int(rng.integers(M)), model_of(LAYOUT, *rng.standard_normal(WIDTH))
        vectors = lost.memory.devices
        if vectors and lost.version and not any(n % 2 for n in vectors.numbers.values()):
            lost, losses = replace(lost, memory=Memory(devices=vectors)), losses + 1
        kept, _ = rule.receive(kept, Update(delta, kept.version, device, 1, 1, 0.1), Model(LAYOUT))
        lost, _ = rule.receive(lost, Update(delta, lost.version, device, 1, 1, 0.1), Model(LAYOUT))
        assert lost.version == kept.version
        np.testing.assert_allclose(lost.model.floats, kept.model.floats, rtol=1e-5, atol=1e-5)
    assert losses > M


def test_a_round_of_ringleader_told() -> None:
    """Three devices; the first one is fast, and the last one slow."""
    rule, now = RingleaderSettings(server_lr=1.0).build(3), State(0, model_of(LAYOUT))

    def comes(device: int, delta: float) -> tuple[str, float]:
        nonlocal now
        update = Update(model_of(LAYOUT, *[delta] * WIDTH), now.version, device, 1, 1, 0.1)
        now, decision = rule.receive(now, update, Model(LAYOUT))
        return decision.outcome, round(float(now.model.parameters[0]), 5)

    assert comes(0, 1.0) == ("buffered", 0.0)
    assert comes(0, 5.0) == ("buffered", 0.0), "its mean is 3"
    assert comes(1, 6.0) == ("buffered", 0.0)
    assert comes(2, 9.0) == ("applied", 6.0), "all have come: + (3 + 6 + 9) / 3"
    assert comes(2, 30.0) == ("buffered", 6.0), "it had its version: this is for the next round"
    assert comes(0, 6.0) == ("applied", 12.33333), "its mean is 4: + (4 + 6 + 9) / 3"
    assert comes(0, 3.0) == ("buffered", 12.33333)
    assert comes(1, 12.0) == ("applied", 19.66667), "its mean is 9: + (4 + 9 + 9) / 3"
    assert now.memory.devices is not None
    assert now.memory.devices.numbers == {0: 2, 2: 2}, "one update each, for the next round"
    assert comes(1, 0.0) == ("applied", 30.66667), "+ (3 + 0 + 30) / 3"
