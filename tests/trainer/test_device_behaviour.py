"""Simulated devices: repeatable, as slow and as unreliable as the settings say."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedstream.trainer.devices import (
    Availability,
    DeviceSettings,
    Diurnal,
    ExponentialLatency,
    FixedLatency,
    Latency,
    LognormalLatency,
    OnOff,
    UniformLatency,
    behaviour,
    eligible,
    next_change,
    state,
)

SEEDS = range(2000)


def test_behaviour_depends_on_device_and_seed() -> None:
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
def test_latency_has_the_configured_mean(latency: Latency, mean_s: float) -> None:
    settings = DeviceSettings(latency=latency)
    drawn = [behaviour(settings, 0, seed).latency_s for seed in SEEDS]
    assert min(drawn) >= 0
    assert fmean(drawn) == pytest.approx(mean_s, rel=0.1)


def test_slow_device_multiplies_the_same_draw() -> None:
    latency = ExponentialLatency(mean_s=1.0)
    usual = behaviour(DeviceSettings(latency=latency), 4, seed=9)
    slow = DeviceSettings(latency=latency, slow_devices=(4,), slow_factor=7.0)
    assert behaviour(slow, 4, seed=9).latency_s == 7.0 * usual.latency_s
    assert behaviour(slow, 5, seed=9) == behaviour(DeviceSettings(latency=latency), 5, seed=9)


def test_dropout_rate_does_not_depend_on_latency() -> None:
    quick = DeviceSettings(dropout=0.2)
    late = DeviceSettings(dropout=0.2, latency=UniformLatency(high_s=1.0))
    gone = [behaviour(quick, 0, seed).drops_out for seed in SEEDS]
    assert fmean(gone) == pytest.approx(0.2, abs=0.03)
    assert gone == [behaviour(late, 0, seed).drops_out for seed in SEEDS]


def test_uniform_latency_rejects_reversed_bounds() -> None:
    with pytest.raises(ValidationError, match=r"low_s = 2.0 is above high_s = 1.0"):
        UniformLatency(low_s=2.0, high_s=1.0)


def changes(settings: Availability, device: int, until_s: float, seed: int = 1) -> list[float]:
    """The times of all changes from 0 on."""
    found = [0.0]
    while found[-1] < until_s:
        found.append(next_change(settings, device, seed, found[-1]))
    return found[1:]


@pytest.mark.parametrize(("mean_on_s", "mean_off_s"), [(3.0, 1.0)])
def test_on_and_off_times_are_exponential(mean_on_s: float, mean_off_s: float) -> None:
    settings = OnOff(mean_on_s=mean_on_s, mean_off_s=mean_off_s)
    times: dict[bool, list[float]] = {True: [], False: []}
    for begin, end in pairwise(changes(settings, 2, until_s=3000 * (mean_on_s + mean_off_s))):
        times[eligible(settings, 2, 1, begin)].append(end - begin)
    for on, mean in ((True, mean_on_s), (False, mean_off_s)):
        drawn = times[on]
        assert fmean(drawn) == pytest.approx(mean, rel=0.1)
        # exponential: the deviation is the mean, and e^-1 of them are longer than it
        assert math.sqrt(fmean([(t - mean) ** 2 for t in drawn])) == pytest.approx(mean, rel=0.1)
        assert fmean([t > mean for t in drawn]) == pytest.approx(math.exp(-1), abs=0.03)
    # alternating, and one time does not tell the next
    assert abs(len(times[True]) - len(times[False])) <= 1


@pytest.mark.parametrize("at_s", [0.0, 0.3, 1e9])
def test_share_of_available_devices_is_stationary(at_s: float) -> None:
    for settings, share in (
        (OnOff(mean_on_s=3.0, mean_off_s=1.0), 0.75),
        (OnOff(mean_on_s=1e-2, mean_off_s=1e4), 1e-6),
        (Diurnal(period_s=10.0, share=0.3), 0.3),
    ):
        on = [eligible(settings, device, 1, at_s) for device in range(2000)]
        assert fmean(on) == pytest.approx(share, abs=0.03)


def test_diurnal_devices_have_their_share_at_their_own_times() -> None:
    settings = Diurnal(period_s=24.0, share=0.25)
    begins = set()
    for device in range(20):
        times = changes(settings, device, until_s=240.0)
        on = [at_s for at_s in times if eligible(settings, device, 1, at_s)]
        assert [b - a for a, b in pairwise(on)] == pytest.approx([24.0] * (len(on) - 1))
        assert all(
            next_change(settings, device, 1, at_s) - at_s == pytest.approx(6.0) for at_s in on
        )
        begins.add(round(on[0] % 24.0, 6))
    assert len(begins) == 20


POSITIVE = st.floats(1e-2, 1e6)
SETTINGS = st.builds(OnOff, mean_on_s=POSITIVE, mean_off_s=POSITIVE) | st.builds(
    Diurnal, period_s=POSITIVE, share=st.floats(0.01, 0.99)
)


@given(
    settings=SETTINGS,
    device=st.integers(0, 10**6),
    seed=st.integers(0, 2**63),
    at_s=st.floats(0, 1e9),
    part=st.floats(0, 1),
)
def test_eligibility_changes_exactly_at_the_next_change(
    settings: Availability, device: int, seed: int, at_s: float, part: float
) -> None:
    now = eligible(settings, device, seed, at_s)
    change_s = next_change(settings, device, seed, at_s)
    assert change_s > at_s
    assert eligible(settings, device, seed, change_s) is not now
    before_s = min(at_s + part * (change_s - at_s), math.nextafter(change_s, 0))
    assert eligible(settings, device, seed, before_s) is now
    assert next_change(settings, device, seed, before_s) == change_s
    assert eligible(settings, device, seed, at_s) is now  # whatever was asked in between


def test_devices_and_seeds_have_independent_courses() -> None:
    for settings in (OnOff(mean_on_s=1.0, mean_off_s=1.0), Diurnal(share=0.5)):
        drawn = {
            next_change(settings, device, seed, 0.0) for device in range(10) for seed in range(10)
        }
        assert len(drawn) == 100


def test_device_is_idle_working_or_ineligible() -> None:
    settings = Diurnal(period_s=10.0, share=0.5)
    change_s = next_change(settings, 0, 1, 0.0)
    if not eligible(settings, 0, 1, change_s):
        change_s = next_change(settings, 0, 1, change_s)
    assert state(settings, 0, 1, change_s, busy=False) == "idle"
    assert state(settings, 0, 1, change_s, busy=True) == "working"
    for busy in (False, True):
        assert state(settings, 0, 1, change_s + 5.5, busy=busy) == "ineligible"


@pytest.mark.parametrize("share", [0.0, 1.1, -0.5])
def test_share_must_be_a_fraction_of_the_period(share: float) -> None:
    with pytest.raises(ValidationError, match="share"):
        Diurnal(share=share)
