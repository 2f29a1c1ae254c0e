"""Every rule that has one beside its independent program, and the contract of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from fedstream.core.layout import Model
from fedstream.strategies import (
    AcedSettings,
    AfaCdSettings,
    AflGuardSettings,
    BasgdSettings,
    Ca2flSettings,
    FadasSettings,
    FedBuffSettings,
    RingleaderSettings,
    RingmasterSettings,
    State,
    Strategy,
    Update,
)
from fedstream.strategies.batches import Middle
from fedstream.strategies.optimizers import Adam, Amsgrad, Momentum
from fedstream.strategies.staleness import Polynomial
from fedstream.testing import check_strategy
from tests.strategies import independent
from tests.strategies.independent import Arrival, Vector
from tests.support import layout_of, model_of

M, WIDTH = 6, 7
LAYOUT = layout_of(WIDTH)
LATE = Polynomial(a=0.5)
MIDDLES: tuple[Middle, ...] = ("median", "geometric median")

CASES: dict[str, tuple[Strategy, Callable[..., list[Vector]], dict[str, Any]]] = {
    "ca2fl": (
        Ca2flSettings(buffer_size=3, server_lr=0.7),
        independent.ca2fl,
        {"devices": M, "size": 3, "rate": 0.7},
    ),
    "ca2fl drops": (
        Ca2flSettings(buffer_size=4, max_staleness=1),
        independent.ca2fl,
        {"devices": M, "size": 4, "rate": 1.0, "most": 1},
    ),
    "ca2fl alone": (
        Ca2flSettings(buffer_size=1, server_lr=0.3),
        independent.ca2fl,
        {"devices": M, "size": 1, "rate": 0.3},
    ),
    "aced": (
        AcedSettings(max_age=4, server_lr=0.3),
        independent.aced,
        {"devices": M, "size": 1, "rate": 0.3, "age": 4},
    ),
    "aced batch": (
        AcedSettings(max_age=1, buffer_size=2, max_staleness=2),
        independent.aced,
        {"devices": M, "size": 2, "rate": 0.1, "age": 1, "most": 2},
    ),
    "aced youngest": (
        AcedSettings(max_age=0),
        independent.aced,
        {"devices": M, "size": 1, "rate": 0.1, "age": 0},
    ),
    **{
        f"fadas {edition}": (
            FadasSettings(buffer_size=3, server_lr=0.6, tau_c=1, delay_adaptive=edition),
            independent.fadas,
            {"size": 3, "eta": 0.6, "edition": edition, "tau_c": 1},
        )
        for edition in ("none", "paper", "code")
    },
    "fadas eps": (
        FadasSettings(buffer_size=3, server=Amsgrad(eps=0.2), delay_adaptive="code"),
        independent.fadas,
        {"size": 3, "eta": 0.001, "edition": "code", "tau_c": 1, "eps": 0.2},
    ),
    "fadas drops": (
        FadasSettings(buffer_size=2, tau_c=0, max_staleness=2, delay_adaptive="code"),
        independent.fadas,
        {"size": 2, "eta": 0.001, "edition": "code", "tau_c": 0, "most": 2},
    ),
    "ringmaster": (
        RingmasterSettings(max_staleness=2, server_lr=0.7),
        independent.ringmaster,
        {"threshold": 3, "rate": 0.7},
    ),
    "ringleader": (
        RingleaderSettings(server_lr=0.7),
        independent.ringleader,
        {"devices": M, "rate": 0.7},
    ),
    **{
        f"fedbuff {how}": (
            FedBuffSettings(buffer_size=4, server_lr=0.7, aggregate=how, staleness=LATE),
            independent.fedbuff,
            {"size": 4, "rate": 0.7, "how": how, "power": 0.5},
        )
        for how in MIDDLES
    },
    "fedbuff drops": (
        FedBuffSettings(buffer_size=3, aggregate="median", max_staleness=2),
        independent.fedbuff,
        {"size": 3, "rate": 1.0, "how": "median", "most": 2},
    ),
    "fedbuff clip": (
        FedBuffSettings(buffer_size=3, clip=2.0, staleness=LATE),
        independent.fedbuff,
        {"size": 3, "rate": 1.0, "clip": 2.0, "power": 0.5},
    ),
    **{
        f"basgd {how}": (
            BasgdSettings(buckets=3, server_lr=0.5, aggregate=how),
            independent.basgd,
            {"buckets": 3, "rate": 0.5, "how": how},
        )
        for how in get_args(Middle)
    },
    "aflguard": (
        AflGuardSettings(root=(1, 3), radius=1.4, server_lr=0.3),
        independent.aflguard,
        {"root": (1, 3), "radius": 1.4, "rate": 0.3},
    ),
}


def played(rule: Strategy, seed: int = 0, n: int = 260) -> tuple[list[Arrival], list[Vector]]:
    """Random arrivals, with repeated devices and stale ones, and x after each."""
    rng, now = np.random.default_rng(seed), State(0, model_of(LAYOUT, *np.ones(WIDTH)))
    rule, arrivals, found = rule.build(M), [], []
    for _ in range(n):
        delta = Model(LAYOUT)
        delta.parameters[:] = rng.standard_normal(WIDTH)
        arrival = Arrival(
            # Device 0 comes often, and the last one seldom.
            device=int(min(rng.geometric(0.4) - 1, M - 1)),
            tau=max(0, now.version - int(rng.integers(0, 5))),
            delta=delta.parameters.astype(np.float64),
            steps=int(rng.integers(1, 6)),
            lr=0.25,
        )
        update = Update(delta, arrival.tau, arrival.device, 1, arrival.steps, arrival.lr)
        now, _ = rule.receive(now, update, Model(LAYOUT))
        arrivals.append(arrival)
        found.append(now.model.parameters.astype(np.float64))
    return arrivals, found


def apart(found: list[Vector], wanted: list[Vector]) -> float:
    """The largest distance between two courses, in units of the second one's largest value."""
    return float(
        max(np.abs(f - w).max() / np.abs(w).max() for f, w in zip(found, wanted, strict=True))
    )


def length(rule: Strategy) -> int:
    """The arrivals to play: a version of ringleader takes many."""
    return 600 if isinstance(rule, RingleaderSettings) else 260


@pytest.mark.parametrize("name", CASES)
def test_course_is_that_of_an_independent_program(name: str) -> None:
    rule, program, keys = CASES[name]
    for seed in range(3):
        arrivals, found = played(rule, seed, length(rule))
        assert len({x.tobytes() for x in found}) > 3 * M
        assert apart(found, program(np.ones(WIDTH), arrivals, **keys)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("ca2fl", "caches of the batch never recorded"),
        ("ca2fl", "divided by K twice"),
        ("ca2fl", "mean cache after replacement"),
        ("aced", "divided by all devices"),
        ("fadas none", "adam"),
        ("ringmaster", "one version more"),
        ("ringleader", "no second table"),
        ("ringleader", "what comes too early is dropped"),
        ("ringleader", "mean over all deltas"),
        ("fedbuff median", "mean"),
        ("fedbuff clip", "clipped after weighing"),
        ("basgd median", "newest only"),
        ("basgd median", "mean over updates"),
        ("basgd median", "never emptied"),
        ("aflguard", "root moves the model"),
        ("aflguard", "by its own length"),
    ],
)
def test_errors_of_other_programs_would_be_noticed(name: str, bug: str) -> None:
    rule, program, keys = CASES[name]
    arrivals, found = played(rule, n=length(rule))
    assert apart(found, program(np.ones(WIDTH), arrivals, **keys, bug=bug)) > 1e-3


@pytest.mark.parametrize(
    "rule",
    [
        *(rule for rule, *_ in CASES.values()),
        Ca2flSettings(buffer_size=3, server=Momentum()),
        Ca2flSettings(buffer_size=3, server=Adam()),
        AcedSettings(max_age=2, buffer_size=3, server=Amsgrad()),
        FedBuffSettings(buffer_size=2, server=Amsgrad()),
        RingleaderSettings(server=Adam()),
        FedBuffSettings(buffer_size=4, aggregate="median", clip=0.2, server=Adam()),
        BasgdSettings(buckets=3, clip=0.2, server=Adam()),
        AflGuardSettings(root=(0, 1), buffer_size=3, aggregate="median", radius=3.0),
        AfaCdSettings(clip=0.2),
    ],
    ids=repr,
)
def test_rule_fulfils_the_contract(rule: Strategy) -> None:
    """Above all, its memory survives journal, recovery and replay, in the middle of a batch too."""
    check_strategy(rule, arrivals=150 if isinstance(rule, RingleaderSettings) else 90)
