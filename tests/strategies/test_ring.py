"""Ringmaster beside FedBuff, and a round of Ringleader."""

from __future__ import annotations

from fedstream.core.layout import Model
from fedstream.strategies import (
    FedBuffSettings,
    RingleaderSettings,
    RingmasterSettings,
    State,
    Update,
)
from tests.strategies.test_independent import LAYOUT, WIDTH, played
from tests.support import model_of


def test_ringmaster_is_fedbuff_without_a_buffer() -> None:
    _, found = played(RingmasterSettings(max_staleness=2, server_lr=0.7))
    _, wanted = played(FedBuffSettings(buffer_size=1, max_staleness=2, server_lr=0.7))
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


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
