"""AFA-CS keeps a sum over all devices as it changes: rounding must not add up in it."""

from __future__ import annotations

import numpy as np

from fedstream.core.layout import Model
from fedstream.strategies import AfaCsSettings, State, Update
from tests.support import layout_of, model_of

LAYOUT = layout_of(64)
DEVICES = 10


def test_sum_is_recomputed_every_hundred_versions() -> None:
    rule = AfaCsSettings(buffer_size=1, server_lr=1e-3).build(DEVICES)
    rng, state, apart = np.random.default_rng(0), State(0, model_of(LAYOUT)), []
    for n in range(1, 301):
        sent = Model(LAYOUT)
        # Gradients shrink: what large ones left in the sum would be all of it in the end.
        sent.floats[:] = rng.standard_normal(64) * 1000.0 ** (1 - n / 100)
        state, _ = rule.receive(state, Update(sent, n - 1, n % DEVICES, 1, 1, 1.0), Model(LAYOUT))
        total, vectors = state.memory.model, state.memory.devices
        assert total is not None
        assert vectors is not None
        exact = np.zeros(64, np.float32)
        for device in range(DEVICES):
            exact = exact + vectors[device]
        apart.append(not np.array_equal(exact, total.parameters))
    assert [n for n in (100, 200, 300) if apart[n - 1]] == []
    assert sum(apart) > 200  # else this would show nothing
