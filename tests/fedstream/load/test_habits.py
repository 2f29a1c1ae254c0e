"""What devices do is drawn from the seed alone, in the given shares."""

from __future__ import annotations

import pytest

from fedstream.broker.errors import ConfigError
from fedstream.load.habits import Conduct, Habits

MANY = 4000
ODD = Habits(
    think_s=(1.0, 2.0), drop_outs=0.1, vanishes=0.2, away_s=(3.0, 4.0), cuts=0.3, slow=0.25,
    slow_rate=1000.0, skewed=0.5,
)  # fmt: skip


def conducts(habits: Habits, seed: int = 7) -> list[Conduct]:
    return [habits.task(seed, device, task) for device in range(40) for task in range(MANY // 40)]


def test_tasks_meet_their_fates_in_the_given_shares() -> None:
    found = conducts(ODD)
    shares = {
        "drop_outs": sum(one.drops_out for one in found) / MANY,
        "vanishes": sum(one.away_s is not None for one in found) / MANY,
        "cuts": sum(one.cut_at is not None for one in found) / MANY,
    }
    assert shares == pytest.approx({"drop_outs": 0.1, "vanishes": 0.2, "cuts": 0.3}, abs=0.03)
    assert not any(one.drops_out and one.away_s is not None for one in found)
    assert all(1.0 <= one.think_s <= 2.0 for one in found)
    assert all(3.0 <= one.away_s <= 4.0 for one in found if one.away_s is not None)
    assert all(0.0 <= one.cut_at < 1.0 for one in found if one.cut_at is not None)


def test_devices_are_slow_and_skewed_in_the_given_shares() -> None:
    found = [ODD.device(7, number) for number in range(MANY)]
    slow = [one.bytes_per_s for one in found if one.bytes_per_s is not None]
    skewed = [one.skew_s for one in found if one.skew_s]
    assert {*slow} == {1000.0}
    assert len(slow) / MANY == pytest.approx(0.25, abs=0.03)
    assert len(skewed) / MANY == pytest.approx(0.5, abs=0.03)
    assert all(abs(one) > 60 for one in skewed)  # else the gateway accepts it
    assert min(skewed) < 0 < max(skewed)


def test_check_ins_are_cut_in_the_given_share() -> None:
    found = [ODD.check_in(7, 3, times) for times in range(MANY)]
    assert sum(one is not None for one in found) / MANY == pytest.approx(0.3, abs=0.03)


def test_the_same_seed_draws_the_same_and_another_one_something_else() -> None:
    assert conducts(ODD) == conducts(ODD)
    assert conducts(ODD) != conducts(ODD, seed=8)
    assert ODD.task(7, 1, 2) != ODD.task(7, 2, 1)


def test_without_habits_devices_are_quick_and_faithful() -> None:
    assert {*conducts(Habits())} == {Conduct(0.0, drops_out=False, away_s=None, cut_at=None)}
    assert Habits().check_in(7, 1, 1) is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"cuts": 1.5}, r"--cuts 1.5: must be from 0 to 1"),
        ({"drop_outs": -0.1}, r"--drop-outs -0.1: must be from 0 to 1"),
        ({"drop_outs": 0.6, "vanishes": 0.5}, "together at most 1"),
        ({"think_s": (2.0, 1.0)}, r"--think 2 1: must be two numbers"),
        ({"away_s": (-1.0, 1.0)}, r"--away -1 1: must be two numbers"),
        ({"slow_rate": 0.0}, "--slow-rate 0: must be above 0"),
    ],
)
def test_habits_that_cannot_be_drawn_are_refused(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Habits(**wrong)  # type: ignore[arg-type]
