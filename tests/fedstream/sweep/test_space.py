"""What a sweep tries, from the text of `--over`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.errors import ConfigError
from fedstream.sweep.space import Range, Values, axes, axis, drawn, grid


def test_values_are_toml_or_else_text() -> None:
    assert axis("strategy.name=fedasync,fedbuff") == Values(
        "strategy.name", ("fedasync", "fedbuff")
    )
    assert axis(" solver.lr = 0.1, 1 ") == Values("solver.lr", (0.1, 1))
    assert axis("task.args.deep=true,false") == Values("task.args.deep", (True, False))
    assert axis('a.b=["x, y", {kind = "hinge"}]') == Values("a.b", ("x, y", {"kind": "hinge"}))


def test_a_range_has_two_ends_and_may_be_logarithmic() -> None:
    assert axis("solver.lr=1e-3..1:log") == Range("solver.lr", 0.001, 1, log=True)
    assert axis("strategy.buffer_size=2..20") == Range("strategy.buffer_size", 2, 20)
    assert axis("a.b=-1.5..2") == Range("a.b", -1.5, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("=1,2", "expected KEY="),
        ("solver.lr=", "expected KEY="),
        ("solver.lr=1,,2", "a value is missing"),
        ("solver.lr=[1, 2", "not a TOML array"),
        ("solver.lr=1,2,1", "the same value twice"),
        ("solver.lr=a..b", "'a' is not a number"),
        ("solver.lr=true..1", "'true' is not a number"),
        ("solver.lr=0..inf", "inf is not finite"),
        ("solver.lr=2..1", "2 is not below 1"),
        ("solver.lr=0..1:log", "must begin above 0"),
    ],
)
def test_a_wrong_axis_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        axis(text)
    assert f"--over {text}" in str(raised.value)


def test_a_sweep_needs_an_axis_and_each_only_once() -> None:
    with pytest.raises(ConfigError, match="name what to vary with --over"):
        axes([])
    with pytest.raises(ConfigError, match=r"--over solver\.lr is given twice"):
        axes(["solver.lr=1,2", "solver.lr=3"])


def test_a_grid_has_every_combination_the_last_axis_fastest() -> None:
    found = list(grid(axes(["a.x=1,2", "a.y=p,q"])))
    assert found == [
        {"a.x": 1, "a.y": "p"},
        {"a.x": 1, "a.y": "q"},
        {"a.x": 2, "a.y": "p"},
        {"a.x": 2, "a.y": "q"},
    ]
    with pytest.raises(ConfigError, match="a range needs --random N"):
        list(grid(axes(["a.x=1..2"])))


def test_more_draws_keep_the_ones_before() -> None:
    found = axes(["a.x=1..2", "a.y=p,q", "a.n=1..9"])
    assert list(drawn(found, 9, seed=3))[:4] == list(drawn(found, 4, seed=3))
    assert list(drawn(found, 4, seed=3)) != list(drawn(found, 4, seed=4))


@given(st.integers(0, 2**32), st.integers(-5, 5), st.integers(1, 9))
def test_draws_stay_inside_and_integers_stay_integers(seed: int, low: int, more: int) -> None:
    found = [Range("n", low, low + more), Range("x", float(low), low + 0.5)]
    for keys in drawn(found, 3, seed):
        n, x = keys["n"], keys["x"]
        assert isinstance(n, int)
        assert isinstance(x, float)
        assert low <= n <= low + more
        assert low <= x <= low + 0.5


def test_a_logarithmic_range_draws_every_decade_alike() -> None:
    draws = [keys["x"] for keys in drawn([Range("x", 1e-4, 1.0, log=True)], 400, 0)]
    decades = [sum(10**-d <= float(str(x)) < 10 ** (1 - d) for x in draws) for d in (1, 2, 3, 4)]
    assert sum(decades) == 400
    assert all(70 < count < 130 for count in decades)
    whole = [keys["n"] for keys in drawn([Range("n", 1, 64, log=True)], 50, 0)]
    assert all(isinstance(n, int) and 1 <= n <= 64 for n in whole)
    assert math.log(sum(int(str(n)) < 8 for n in whole) / 50) == pytest.approx(
        math.log(0.5), abs=0.4
    )
