"""The strategies reproduce the trajectories that an independent program computed in float64, and
make none of the mistakes that others made."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Layout, Model
from fedstream.strategies import (
    RULES,
    AfaCdSettings,
    AfaCsSettings,
    DeviceVectors,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    ScaffoldSettings,
    State,
    Strategy,
    StrategySettings,
    Update,
)
from fedstream.strategies.staleness import Polynomial
from tests.support import layout_of, model_of

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "known_answers_server.json").read_text())
SETTINGS: TypeAdapter[Strategy] = TypeAdapter(StrategySettings)
LAYOUT = layout_of(2)


def named(case: dict[str, Any]) -> str:
    rule = case["strategy"]
    inner = [rule.get(key, {}).get("kind") for key in ("staleness", "alpha_schedule")]
    own = ("weighting", "buffer_size", "max_staleness")
    parts = [rule["name"], *inner, *(rule.get(key) for key in own)]
    return "-".join(str(part) for part in parts if part is not None)


def update(model: Model, tau: int = 0, **changes: Any) -> Update:
    about: dict[str, Any] = {"device": 0, "samples": 1, "steps": 1, "lr": 0.1}
    return Update(model=model, tau=tau, **about | changes)


def state(*floats: float, version: int = 0, layout: Layout = LAYOUT) -> State:
    return State(version, model_of(layout, *floats))


def receive(rule: Strategy, before: State, new: Update) -> tuple[State, str, float, int]:
    after, decision = rule.receive(before, new, Model(before.model.layout))
    return after, decision.outcome, decision.weight, decision.staleness


def sent(rule: Strategy, x_new: Model, x_tau: Model) -> Model:
    """What a device sends that trained x_tau into x_new."""
    model = x_new.copy()
    if rule.sends == "delta":
        model.parameters[:] -= x_tau.parameters
    return model


# the papers' rules


@pytest.mark.parametrize("case", KNOWN, ids=named)
def test_known_answers(case: dict[str, Any]) -> None:
    rule = SETTINGS.validate_python(case["strategy"]).build()
    layout = layout_of(len(case["x0"]))
    now = State(0, model_of(layout, *case["x0"]))
    versions = {0: now.model.copy()}
    for number, (arrived, expected) in enumerate(
        zip(case["updates"], case["expected"], strict=True)
    ):
        x_new = model_of(layout, *arrived["x_new"])
        tau = arrived["base_version"]
        new = Update(
            model=sent(rule, x_new, versions[tau]),
            tau=tau,
            device=arrived["device"],
            samples=arrived["samples"],
            steps=arrived["local_steps"],
            lr=arrived["local_lr"],
        )
        now, outcome, weight, staleness = receive(rule, now, new)
        found = (outcome, staleness, now.version)
        assert found == (expected["outcome"], expected["staleness"], expected["version"]), number
        assert weight == pytest.approx(expected["weight"], rel=1e-12), number
        versions.setdefault(now.version, now.model.copy())
        wanted = np.array(expected["x"])
        assert np.abs(now.model.floats - wanted).max() <= 1e-5 * np.abs(wanted).max(), number


def test_known_answers_cover_every_outcome_and_strategy() -> None:
    outcomes = {(c["strategy"]["name"], e["outcome"]) for c in KNOWN for e in c["expected"]}
    assert outcomes >= {
        ("fedasync", "applied"),
        ("fedasync", "dropped"),
        ("fedavg", "applied"),
        ("fedavg", "buffered"),
        ("fedavg", "dropped"),
        ("fedbuff", "applied"),
        ("fedbuff", "buffered"),
        ("fedbuff", "dropped"),
        ("afa-cd", "applied"),
        ("afa-cd", "buffered"),
        ("afa-cs", "applied"),
        ("afa-cs", "buffered"),
        ("afa-cs", "dropped"),
    }
    assert all(e["weight"] == 0 for c in KNOWN for e in c["expected"] if e["outcome"] == "dropped")


# mistakes that others made


def test_dropped_update_changes_nothing() -> None:
    rule = FedAsyncSettings(alpha=0.5, max_staleness=2).build()
    before = state(1.0, 2.0, version=7)
    after, outcome, weight, staleness = receive(rule, before, update(model_of(LAYOUT, 9.0), tau=4))
    assert after is before
    assert (outcome, weight, staleness) == ("dropped", 0.0, 3)
    assert receive(rule, before, update(model_of(LAYOUT, 9.0), tau=5))[1] == "applied"


def test_devices_without_samples_do_not_divide_by_zero() -> None:
    rule = FedAvgSettings(clients_per_round=3, weighting="samples").build()
    now = state(0.0)
    for samples, value in ((0, 1.0), (0, 2.0), (4, 8.0)):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, value), samples=samples))
    assert now.model.floats == pytest.approx([8.0, 8.0])


def test_timed_out_round_averages_fewer_than_k() -> None:
    rule = FedAvgSettings(clients_per_round=10).build()
    now = state(0.0)
    for value in (2.0, 4.0):
        now, outcome, *_ = receive(rule, now, update(model_of(LAYOUT, value)))
        assert outcome == "buffered"
    after = rule.end_round(now)
    assert (after.version, after.memory.arrivals) == (1, 0)
    assert after.model.floats == pytest.approx([3.0, 3.0])


def test_round_without_arrivals_makes_no_version() -> None:
    now = state(1.0, version=3)
    for settings in (FedAvgSettings(), FedAsyncSettings(), FedBuffSettings(), AfaCsSettings()):
        assert settings.build(10).end_round(now) is now


def test_device_that_answers_twice_counts_twice() -> None:
    rule = FedAvgSettings(clients_per_round=2).build()
    now = state(0.0)
    for value in (1.0, 3.0):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, value), device=4))
    assert now.version == 1
    assert now.model.floats == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("settings", "floats"),
    [
        (FedAsyncSettings(alpha=0.5, staleness=Polynomial()), [5.0, 3.5]),
        (FedAvgSettings(clients_per_round=2), [6.0, 4.0]),
        # parameters: 0 + rate (4 + 8); buffers: the mean of the batch's own, 3 and 5
        (FedBuffSettings(buffer_size=2, server_lr=3.0), [18.0, 4.0]),
        (AfaCdSettings(buffer_size=2, server_lr=0.1), [6.0, 4.0]),
        (AfaCsSettings(buffer_size=2, server_lr=0.1, devices=4), [3.0, 4.0]),
    ],
)
def test_batch_norm_statistics_mix_and_counters_take_the_newest(
    settings: Strategy, floats: list[float]
) -> None:
    """Where devices send deltas, statistics are never stepped beyond what the devices have."""
    layout = layout_of(1, buffers=1, integers=1)
    now = State(0, model_of(layout, 0.0, 1.0, integers=[5]))
    rule = settings.build()
    for device, (x, mean, count) in enumerate(((4.0, 3.0, 60), (8.0, 5.0, 7))):
        model = model_of(layout, x, mean, integers=[count])
        now, *_ = receive(rule, now, update(model, tau=now.version, device=device))
    assert now.model.floats == pytest.approx(floats)
    assert now.model.integers.tolist() == [7]


# batches


def test_short_batch_is_divided_by_its_actual_size() -> None:
    rule = FedBuffSettings(buffer_size=10).build()
    now = state(0.0)
    for value in (2.0, 4.0):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, value)))
    assert rule.end_round(now).model.floats == pytest.approx([3.0, 3.0])


def test_afa_cs_recovers_its_sum_from_the_devices_vectors() -> None:
    rule = AfaCsSettings(buffer_size=1, server_lr=1.0).build(3)
    vectors = DeviceVectors(3, 2)
    vectors.write(1)[:] = 6.0
    lost = State(0, model_of(LAYOUT, 0.0), replace(state(0.0).memory, devices=vectors))
    now, *_ = receive(rule, lost, update(model_of(LAYOUT, 3.0), device=0, steps=1, lr=1.0))
    assert now.model.floats == pytest.approx([3.0, 3.0])


def test_dropped_batch_of_scaffold_leaves_c_the_mean_of_c_i() -> None:
    """The devices have added it to their c_i; x never gets it."""
    rule = ScaffoldSettings(buffer_size=2, server_lr=1.0).build(4)
    now = State(0, model_of(layout_of(1).with_controls(), 1.0, 0.0))

    def sent(device: int, delta: float, change: float) -> Update:
        return update(model_of(now.model.layout, delta, change), device=device)

    assert rule.drop_round(now) == now
    now, *_ = receive(rule, now, sent(0, 100.0, 8.0))
    now = rule.drop_round(now)
    assert (now.version, now.memory.arrivals) == (0, 0)
    for device, delta, change in ((1, 2.0, -4.0), (2, 4.0, 12.0)):
        now, *_ = receive(rule, now, sent(device, delta, change))
    assert now.version == 1
    assert now.model.floats == pytest.approx([1.0 + 3.0, (8.0 - 4.0 + 12.0) / 4])


def test_large_vectors_are_kept_in_a_file() -> None:
    small, large = DeviceVectors(3, 4), DeviceVectors(3, 4, in_memory=47)
    for vectors in (small, large):
        vectors.write(2)[:] = 7.0
        assert (vectors[2].tolist(), vectors[0].tolist()) == ([7.0] * 4, [0.0] * 4)
        assert vectors.changed == {2}
        with pytest.raises(ValueError, match="read-only"):
            vectors[1][:] = 1.0
        other = vectors.copy()
        other.write(2)[:] = 1.0
        assert vectors[2].tolist() == [7.0] * 4
        other = vectors.copy()
        vectors.write(2)[1:] = 1.0
        vectors.write(0)[:] = 5.0
        assert (other[2].tolist(), other[0].tolist()) == ([7.0] * 4, [0.0] * 4)
        other.write(1)[:] = 3.0
        assert [vectors[n].tolist() for n in range(3)] == [[5.0] * 4, [0.0] * 4, [7.0, 1, 1, 1]]
        assert (other.heard, vectors.heard) == ({1, 2}, {0, 2})


def test_copies_of_copies_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the vectors of one copy and the next are in memory at the same time."""

    def full(_file: int, _begin: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    vectors = DeviceVectors(3, 4, in_memory=2 * 3 * 4 * 4)
    for value in range(5):
        vectors = vectors.copy()
        for device in range(3):
            vectors.write(device)[:] = value
    assert vectors[2].tolist() == [4.0] * 4


def test_file_of_vectors_is_allocated_up_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that a full disk has no room for kills by a signal, where nobody can say anything."""
    reserved: list[int] = []
    real = os.posix_fallocate

    def reserve(file: int, begin: int, size: int) -> None:
        real(file, begin, size)
        reserved.append(os.fstat(file).st_blocks * 512)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    vectors = DeviceVectors(300, 1000, in_memory=0)
    vectors.write(0)[:] = 1.0
    assert vectors[299].tolist() == vectors.write(299).tolist() == [0.0] * 1000
    assert [room >= 1_200_000 for room in reserved] == [True]

    def full(_file: int, _begin: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FedstreamError, match=r"1200000 bytes: No space left .*TMPDIR") as said:
        DeviceVectors(300, 1000, in_memory=0).write(0)
    assert "\n" not in str(said.value)


def test_many_small_vectors_use_little_memory() -> None:
    """A journal of a few kilobytes may speak of 2^53 devices with four parameters."""
    tracemalloc.start()
    try:
        DeviceVectors(2**53, 4).write(0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_only_written_vectors_use_space() -> None:
    """M is what somebody says; an update of each that is heard is there."""
    tracemalloc.start()
    try:
        vectors = DeviceVectors(10**12, 1000)
        vectors.write(10**12 - 1)[:] = 1.0
        assert tracemalloc.get_traced_memory()[1] <= 65 << 20
    finally:
        tracemalloc.stop()
    assert (vectors[10**12 - 1][0], vectors[5][0], vectors.devices) == (1.0, 0.0, 10**12)
    for nobody in (-1, 10**12):
        with pytest.raises(IndexError):
            vectors[nobody]
        with pytest.raises(IndexError):
            vectors.write(nobody)


# purity


@pytest.mark.parametrize(
    "settings",
    [
        FedAsyncSettings(),
        FedAsyncSettings(max_staleness=0),
        FedAvgSettings(clients_per_round=3),
        FedBuffSettings(buffer_size=3),
        FedBuffSettings(buffer_size=1),
        AfaCdSettings(),
        AfaCsSettings(buffer_size=1),
        AfaCsSettings(buffer_size=3),
    ],
)
@given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_the_current_model_is_never_written_to(settings: Strategy, data: st.DataObject) -> None:
    """Readers may be reading it; and the memory that may be reused is never one in use."""
    layout = layout_of(3, integers=1)
    rule = settings.build(1)
    now = State(0, model_of(layout, 1.0, 2.0, 3.0, integers=[1]))
    free: list[Model] = []
    for _ in range(12):
        before, bytes_before = now, now.model.digest()
        values = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3))
        arriving = model_of(layout, *values, integers=[2])
        spare = free.pop() if free else Model(layout)
        tau = data.draw(st.integers(max(0, now.version - 1), now.version))
        now, _ = rule.receive(before, update(arriving, tau=tau), spare)
        assert before.model.digest() == bytes_before
        in_use = {id(model) for model in now.models()}
        for model in (before.model, arriving, spare):
            if id(model) not in in_use and all(model is not other for other in free):
                model.buffer[:] = 0xFF  # whoever still read it would read NaN
                free.append(model)
        assert np.isfinite(now.model.floats).all()


@pytest.mark.parametrize("settings", RULES.built_in.values())
def test_settings_agree_with_their_strategy(settings: type[Strategy]) -> None:
    """The rest of fedstream reads the settings, and never asks which strategy they are for."""
    usual, rule = settings(), settings().build(9)
    assert (rule.sends, rule.controls) == (settings.sends, settings.controls)
    assert (rule.max_staleness == 0) == (settings.rounds == "always")
    if settings.rounds == "never":
        assert usual.batch == 1
    else:
        changed = settings.model_validate({settings.batch_key: 7})
        assert changed.batch == 7
    if usual.remembered is None and "devices" in settings.model_fields:
        assert settings.model_validate({"devices": 9}).remembered == 9
    assert (rule.remembered is not None) == ("devices" in settings.model_fields)
