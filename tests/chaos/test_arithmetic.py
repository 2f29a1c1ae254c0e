"""Two ways to the same bits: arithmetic and decoding of the suite, and those of the project."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest

from fedstream.core.formats import format_of
from fedstream.core.layout import Layout, Model
from fedstream.journal.progress import Progress, close_round, take
from fedstream.strategies import (
    AcedSettings,
    AfaCdSettings,
    AfaCsSettings,
    Ca2flSettings,
    FadasSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    RingmasterSettings,
    ScaffoldSettings,
    State,
    Strategy,
)
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.staleness import Exponential, Hinge, InverseSqrtAlpha, Linear, StepAlpha
from tests.chaos.arithmetic import Course, Shape
from tests.chaos.faults import FORMATS
from tests.chaos.formats import decoded, fits
from tests.support import layout_of
from tests.updater.states import upload_of

RULES: tuple[Strategy, ...] = (
    FedAsyncSettings(),
    FedAsyncSettings(staleness=Hinge(b=1), alpha_schedule=StepAlpha(at=5)),
    FedAsyncSettings(staleness=Exponential(), alpha_schedule=InverseSqrtAlpha()),
    FedAvgSettings(clients_per_round=3),
    FedAvgSettings(clients_per_round=3, weighting="samples"),
    FedBuffSettings(buffer_size=3, staleness=Linear()),
    AfaCdSettings(buffer_size=3),
    AfaCsSettings(buffer_size=3),
    ScaffoldSettings(buffer_size=3),
    RingmasterSettings(),
    FedAsyncSettings(adapt=Adapt()),
    FedBuffSettings(buffer_size=3, server_lr=0.5, adapt=Adapt()),
    Ca2flSettings(buffer_size=3),
    AcedSettings(max_age=2),
    AcedSettings(max_age=0, buffer_size=3),
    FadasSettings(buffer_size=3),
    FadasSettings(buffer_size=3, server_lr=0.6, delay_adaptive="paper"),
    FadasSettings(buffer_size=2, tau_c=0, delay_adaptive="code"),
)


def layout(rule: Strategy) -> Layout:
    """Of a model with buffers, and what the rule needs beside them."""
    plain = layout_of(50, buffers=5)
    return plain.with_controls() if isinstance(rule, ScaffoldSettings) else plain


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("early", [None, 7])
def test_arithmetic_matches_the_updater(rule: Strategy, early: int | None) -> None:
    """``early``: behind so many updates a round ends with what has come."""
    rng = np.random.default_rng(0)
    shape = layout(rule)
    model = Model(shape)
    model.floats[:] = rng.standard_normal(shape.floats)
    strategy, before = rule.build(4), Progress(State(0, model.copy()))
    course = Course(
        rule.model_dump(mode="json"),
        Shape.of(msgpack.unpackb(shape.encode())),
        4,
        model.floats.copy(),
    )
    if rule.adapt is not None:
        before, course.scale = replace(before, scale=0.7), 0.7
    for number in range(20):
        update = Model(shape)
        update.floats[:] = rng.standard_normal(shape.floats)
        late = 0 if isinstance(rule, FedAvgSettings) else int(rng.integers(0, 4))
        upload = upload_of(
            f"t{number}",
            device=int(rng.integers(0, 4)),
            tau=max(0, course.version - late),
            samples=int(rng.integers(1, 9)),
            steps=int(rng.integers(1, 4)),
            lr=0.3,
        )
        said = upload.model_dump()
        step = take(strategy, before, upload, update, Model(shape))
        assert step.decision
        assert course.weight(said) == pytest.approx(step.decision.weight, rel=1e-12)
        course.take(said, update.floats, step.decision.weight)
        before = step.after
        if number == early and course.arrivals:
            before = close_round(strategy, before, before.state.version).after
            course.step()
        assert course.version == before.state.version
        assert course.model.tobytes() == before.state.model.floats.tobytes()
    vectors = before.state.memory.devices
    assert set(course.last) == (vectors.heard if vectors else set())
    for device, vector in course.last.items():
        assert vectors is not None
        assert vector.tobytes() == vectors[device].tobytes()


# wire formats


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
