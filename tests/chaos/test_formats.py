"""Two ways to the same bits: the suite's decoding and the updater's."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from fedstream.core.formats import format_of
from fedstream.core.layout import Model
from tests.chaos.arithmetic import Shape
from tests.chaos.faults import FORMATS
from tests.chaos.formats import decoded, fits
from tests.support import layout_of

LAYOUT = layout_of(1001, buffers=5).with_controls()
SHAPE = Shape.of(msgpack.unpackb(LAYOUT.encode()))
ALL = sorted(
    {name for pairs in FORMATS.values() for pair in pairs for name in pair}
    | {"f32", "bf16", "f32+zstd"}
)


def drawn() -> Model:
    model = Model(LAYOUT)
    model.floats[:] = np.random.default_rng(0).standard_normal(LAYOUT.floats)
    return model


@pytest.mark.parametrize("name", ALL)
def test_decoding_matches_the_updaters(name: str) -> None:
    model, into = drawn(), Model(LAYOUT)
    sent = format_of(name).encoded(model)
    format_of(name).decode(sent, into)
    got = decoded(name, sent.tobytes(), SHAPE)
    assert got.tobytes() == into.floats.tobytes()
    assert fits(name, got, model.floats, SHAPE, at_random=False)
    random = decoded(name, format_of(name).encoded(model, seed=1).tobytes(), SHAPE)
    assert fits(name, random, model.floats, SHAPE, at_random=True)
    assert fits(name, random, model.floats, SHAPE, at_random=False) == (
        name.startswith(("f32", "topk"))
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("at", [0, 1000, 1001, -1])
def test_another_update_does_not_fit(name: str, at: int) -> None:
    model = drawn()
    got = decoded(name, format_of(name).encoded(model).tobytes(), SHAPE)
    model.floats[at] += 5.0
    assert not fits(name, got, model.floats, SHAPE, at_random=True)
