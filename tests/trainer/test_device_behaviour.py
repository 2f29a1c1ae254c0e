"""Simulated devices: repeatable, as slow and as unreliable as the settings say."""

from __future__ import annotations

from statistics import fmean

import pytest
from pydantic import ValidationError

from trainer.devices import (
    Behaviour,
    DeviceSettings,
    ExponentialLatency,
    FixedLatency,
    Latency,
    LognormalLatency,
    UniformLatency,
    behaviour,
)

SEEDS = range(2000)


def test_by_default_a_device_is_fast_and_stays() -> None:
    assert behaviour(DeviceSettings(), 3, seed=7) == Behaviour(0.0, drops_out=False)


def test_the_same_device_and_seed_behave_the_same_and_others_do_not() -> None:
    settings = DeviceSettings(latency=ExponentialLatency(mean_s=1.0), dropout=0.5)
    assert behaviour(settings, 1, 5) == behaviour(settings, 1, 5)
    drawn = {behaviour(settings, device, seed) for device in range(10) for seed in range(10)}
    assert len(drawn) == 100


@pytest.mark.parametrize(
    ("latency", "mean_s"),
    [
        (FixedLatency(mean_s=0.5), 0.5),
        (UniformLatency(low_s=1.0, high_s=3.0), 2.0),
        (ExponentialLatency(mean_s=2.0), 2.0),
        (LognormalLatency(mean_s=2.0, sigma=0.5), 2.0),
    ],
)
def test_latency_has_the_mean_that_was_asked_for(latency: Latency, mean_s: float) -> None:
    settings = DeviceSettings(latency=latency)
    drawn = [behaviour(settings, 0, seed).latency_s for seed in SEEDS]
    assert min(drawn) >= 0
    assert fmean(drawn) == pytest.approx(mean_s, rel=0.1)


def test_a_slow_device_takes_the_same_draw_times_the_factor() -> None:
    latency = ExponentialLatency(mean_s=1.0)
    usual = behaviour(DeviceSettings(latency=latency), 4, seed=9)
    slow = DeviceSettings(latency=latency, slow_devices=(4,), slow_factor=7.0)
    assert behaviour(slow, 4, seed=9).latency_s == 7.0 * usual.latency_s
    assert behaviour(slow, 5, seed=9) == behaviour(DeviceSettings(latency=latency), 5, seed=9)


def test_drop_outs_come_at_their_rate_whatever_the_latency() -> None:
    quick = DeviceSettings(dropout=0.2)
    late = DeviceSettings(dropout=0.2, latency=UniformLatency(high_s=1.0))
    gone = [behaviour(quick, 0, seed).drops_out for seed in SEEDS]
    assert fmean(gone) == pytest.approx(0.2, abs=0.03)
    assert gone == [behaviour(late, 0, seed).drops_out for seed in SEEDS]


def test_uniform_latency_refuses_bounds_in_the_wrong_order() -> None:
    with pytest.raises(ValidationError, match=r"low_s = 2.0 is above high_s = 1.0"):
        UniformLatency(low_s=2.0, high_s=1.0)
