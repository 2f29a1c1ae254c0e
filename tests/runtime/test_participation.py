"""Devices that take part more or less often than others, or train longer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fedstream.core.errors import ConfigError
from fedstream.runtime.config import dump
from fedstream.runtime.task_settings import (
    Epochs,
    FixedSteps,
    Length,
    Participation,
    ParticipationGroup,
    UniformSteps,
)
from fedstream.settings.config import read

FIVE = FixedSteps(n=5)
GROUPS = (
    ParticipationGroup(devices=(1, 4), rate=3.0),
    ParticipationGroup(devices=(2,), rate=0.5, steps=Epochs(n=2)),
)


class Fixed(random.Random):
    """Always draws the same number in [0, 1)."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(
    ("devices", "number", "place"),
    [  # the borders are at 1 / 4.5 = .222 and 4 / 4.5 = .889; without device 1 at 2/3
        ((0, 1, 2), 0.22, 0),
        ((0, 1, 2), 0.23, 1),
        ((0, 1, 2), 0.88, 1),
        ((0, 1, 2), 0.89, 2),
        ((2, 1, 0), 0.11, 0),
        ((2, 1, 0), 0.12, 1),
        ((0, 2), 0.66, 0),
        ((0, 2), 0.67, 1),
        ((4,), 0.99, 0),
    ],
)
def test_device_is_drawn_in_proportion_to_its_rate(
    devices: Sequence[int], number: float, place: int
) -> None:
    assert Participation(FIVE, GROUPS).pick(Fixed(number), devices) == place


def test_without_groups_devices_are_drawn_uniformly_without_summing() -> None:
    alike = Participation(FIVE)
    devices = range(10**12)  # rates of so many would never be there
    drawn = random.Random(3)
    assert [alike.pick(random.Random(3), devices)] == [drawn.randrange(10**12)]
    assert alike.mean(devices) == 1.0


def test_groups_override_the_usual_rates_and_lengths() -> None:
    parts, rng = Participation(UniformSteps(c=1), GROUPS), random.Random(0)
    assert parts.rates(range(6)) == [1.0, 3.0, 0.5, 1.0, 3.0, 1.0]
    assert parts.mean([0, 1, 2, 5]) == 5.5 / 4
    assert parts.length(rng, 2) == Length(epochs=2)
    assert {parts.length(rng, 1) for _ in range(64)} == {Length(steps=1), Length(steps=2)}


def test_groups_round_trip() -> None:
    sets = ["participation=[{devices=[0, 1], rate=0.5}, {devices=[5], steps={kind='epochs', n=2}}]"]
    settings = read(None, sets)
    assert settings.participation == (
        ParticipationGroup(devices=(0, 1), rate=0.5),
        ParticipationGroup(devices=(5,), steps=Epochs(n=2)),
    )
    assert "[[participation]]" in dump(settings)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("[{devices=[0], rate=0.0}]", r"participation\[0\]\.rate.*greater than 0"),
        ("[{devices=[]}]", r"participation\[0\]\.devices"),
        (
            "[{devices=[0], steps={kind='some'}}]",
            r"participation\[0\]\.steps\.kind .*must be one of",
        ),
        ("[{devices=[1]}, {devices=[0, 1]}]", r"participation\[1\]\.devices: device 1 is .*twice"),
    ],
)
def test_invalid_groups_are_rejected_in_one_line(groups: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read(None, [f"participation={groups}"])
    assert "\n" not in str(refused.value)
