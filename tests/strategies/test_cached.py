"""CA2FL, ACED and FADAS: repeated devices, old caches, dropped rounds, and recovery."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.core.layout import Model
from fedstream.journal import Segment, segments
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.strategies import (
    AcedSettings,
    AfaCsSettings,
    Ca2flSettings,
    DeviceVectors,
    FadasSettings,
    FedBuffSettings,
    State,
    Strategy,
    Update,
)
from tests.journals import Scribe
from tests.strategies.test_independent import LAYOUT, WIDTH, M, played
from tests.support import layout_of, model_of


def receive(rule: Strategy, now: State, device: int, *values: float) -> State:
    update = Update(model_of(now.model.layout, *values), now.version, device, 1, 1, 1.0)
    return rule.receive(now, update, Model(now.model.layout))[0]


def test_ca2fl_counts_a_device_once_that_came_twice() -> None:
    """Its last update, and the mean is over devices: 1/2 (6 + 2), not 1/3 (9 + 6 + 2)."""
    rule, layout = Ca2flSettings(buffer_size=3).build(4), layout_of(1)
    now = State(0, model_of(layout))
    for device, value in ((0, 9.0), (1, 2.0), (0, 6.0)):
        now = receive(rule, now, device, value)
    assert now.version == 1
    assert now.model.parameters == pytest.approx([4.0])
    for device, value in ((1, 2.0), (2, 0.0), (3, 0.0)):  # h = (6 + 2) / 4
        now = receive(rule, now, device, value)
    assert now.model.parameters == pytest.approx([4.0 + 2.0 + 0.0])


def test_ca2fl_without_heterogeneity_steps_like_fedbuff_once_all_were_heard() -> None:
    rule, plain = Ca2flSettings(buffer_size=M).build(M), FedBuffSettings(buffer_size=M).build(M)
    for one in (rule, plain):
        now = State(0, model_of(layout_of(1)))
        for device in (*range(M), *range(M)):
            now = receive(one, now, device, 2.0)
        assert now.model.parameters == pytest.approx([4.0])


def test_ca2fl_goes_on_from_the_caches_that_a_dropped_round_left() -> None:
    rule, now = Ca2flSettings(buffer_size=3).build(3), State(0, model_of(layout_of(1)))
    for device in (0, 1):
        now = receive(rule, now, device, 6.0)
    now = rule.drop_round(now)
    for device, value in ((0, 4.0), (0, 4.0), (2, 5.0)):  # h = (6 + 6) / 3; corrections -2 and 5
        now = receive(rule, now, device, value)
    assert now.model.parameters == pytest.approx([4.0 + 1.5])


def test_aced_with_an_endless_age_is_ace_over_the_devices_heard() -> None:
    """ACE is afa-cs with a buffer of one."""
    arrivals, ace = played(AfaCsSettings(buffer_size=1))
    heard_all = next(
        n for n in range(len(arrivals)) if len({one.device for one in arrivals[: n + 1]}) == M
    )
    _, aced = played(AcedSettings(max_age=1000))
    moves = [[b - a for a, b in pairwise(one)] for one in (ace, aced)]
    for expected, found in list(zip(*moves, strict=True))[heard_all:]:
        assert found == pytest.approx(expected, abs=1e-5)


def test_aced_forgets_a_cache_and_takes_the_device_back() -> None:
    rule, now = AcedSettings(max_age=1, server_lr=1.0).build(3), State(0, model_of(layout_of(1)))
    xs = []
    for device, value in ((0, 8.0), (1, 2.0), (1, 2.0), (0, 4.0)):
        now = receive(rule, now, device, value)
        xs.append(float(now.model.parameters[0]))
    # 8; (8 + 2) / 2; device 0's cache is two versions old: 2; (2 + 4) / 2
    assert xs == pytest.approx([8.0, 13.0, 15.0, 18.0])


def test_aced_after_a_dropped_round_has_the_caches_of_it() -> None:
    rule, layout = AcedSettings(buffer_size=2, server_lr=1.0).build(3), layout_of(1)
    now = rule.drop_round(receive(rule, State(0, model_of(layout)), 0, 6.0))
    for device, value in ((1, 3.0), (2, 3.0)):
        now = receive(rule, now, device, value)
    assert now.model.parameters == pytest.approx([4.0])


@pytest.mark.parametrize(
    ("rule", "xs"),
    [
        # means of 4: of 8, of 8 and 2, then of 2 alone
        (AfaCsSettings(buffer_size=1, server_lr=1.0), [2.0, 4.5, 5.0, 5.5]),
        # means of those heard: of 8, of 8 and 2, then of 2 alone
        (AcedSettings(server_lr=1.0), [8.0, 13.0, 15.0, 17.0]),
        # 8, then 8 / 4 + 2; then h = 2 / 4 without corrections
        (Ca2flSettings(buffer_size=1), [8.0, 12.0, 12.5, 13.0]),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_quarantined_device_is_out_of_all_later_steps(rule: Strategy, xs: list[float]) -> None:
    rule, now, found = rule.build(4), State(0, model_of(layout_of(1))), []
    for device, value in ((0, 8.0), (1, 2.0), (1, 2.0), (1, 2.0)):
        if now.version == 2:
            now = rule.forget(now, (0, 3))
        now = receive(rule, now, device, value)
        found.append(float(now.model.parameters[0]))
    assert found == pytest.approx(xs)


def test_ca2fl_counts_a_device_as_zero_that_is_quarantined_amid_its_batch() -> None:
    """Until then it has a cache of 8: 8 / 4 + ((0 - 8) + (2 - 0)) / 2; later it has none."""
    rule, now = Ca2flSettings(buffer_size=2).build(4), State(0, model_of(layout_of(1)))
    for device, value in ((0, 8.0), (2, 0.0), (0, 4.0)):
        now = receive(rule, now, device, value)
    now = receive(rule, rule.forget(now, (0,)), 1, 2.0)
    assert now.model.parameters == pytest.approx([4.0 + 2.0 - 3.0])
    for device in (1, 2):
        now = receive(rule, now, device, 2.0)
    assert now.model.parameters == pytest.approx([3.0 + 0.5 + 1.0])


def test_a_round_of_quarantined_devices_makes_a_version_all_the_same() -> None:
    rule, now = AcedSettings(buffer_size=2).build(3), State(0, model_of(layout_of(1)))
    now = rule.end_round(rule.forget(receive(rule, now, 0, 8.0), (0,)))
    assert (now.version, now.model.parameters.tolist()) == (1, [0.0])


@pytest.mark.parametrize("rule", [AfaCsSettings(), AcedSettings(), Ca2flSettings(buffer_size=2)])
def test_caches_are_recovered_and_replayed_without_the_quarantined(
    rule: Strategy, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "journal", rule)
    for number in range(30):
        scribe.update(device=number % 4)
        if number in (11, 20):
            scribe.quarantine(number % 4)
        if number == 15:
            scribe.segment()
    scribe.close()
    with Replayer(scribe.folder) as replayer:
        assert [one.identical for one in replayer if one.message.digest].count(True) == (
            scribe.version
        )
    with Segment(segments(scribe.folder)[-1].path) as newest:
        assert recovered(newest).digest == scribe.digests[scribe.version]


@pytest.mark.parametrize(
    ("edition", "stale", "eta"),
    [
        ("none", 4, 0.5),
        ("paper", 2, 0.5),  # tau_c itself is not beyond it
        ("paper", 4, 0.25),
        ("code", 2, 0.5),
        ("code", 4, 0.125),
    ],
)
def test_fadas_slows_down_for_the_stalest_update_in_the_batch(
    edition: Any, stale: int, eta: float
) -> None:
    """The first step of a corrected AMSGrad is eta; of a plain one 0.1 / sqrt(0.01) = 1, also."""
    rule = FadasSettings(buffer_size=2, server_lr=0.5, tau_c=2, delay_adaptive=edition).build(4)
    layout = layout_of(1)
    x = State(0 if edition == "code" else 9, model_of(layout))
    for tau in (x.version - stale, x.version):
        update = Update(model_of(layout, 3.0), tau, 0, 1, 1, 1.0)
        x, _ = rule.receive(x, update, Model(layout))
    assert x.model.parameters == pytest.approx([eta], rel=1e-5)
    assert x.memory.stalest == 0  # the next batch begins anew


def test_fadas_recovers_the_stalest_update_of_a_batch(tmp_path: Path) -> None:
    rule = FadasSettings(buffer_size=2, tau_c=0, delay_adaptive="code")
    scribe = Scribe(tmp_path / "journal", rule)
    for late in (0, 0, 0, 0, 2):
        scribe.update(late=late)
    scribe.segment()
    scribe.update()
    scribe.close()
    chain = segments(scribe.folder)
    assert recovered(chain[-1]).digest == scribe.digests[3]
    for segment in chain:
        segment.close()


def test_sums_are_recomputed_from_the_caches() -> None:
    """Else what large updates left in the sum would be all of it in the end."""
    rng = np.random.default_rng(0)
    for rule in (Ca2flSettings(buffer_size=1), AcedSettings()):
        now, built = State(0, model_of(LAYOUT)), rule.build(M)
        for n in range(300):
            scale = 1000.0 ** (1 - n / 100)
            now = receive(built, now, n % M, *(rng.standard_normal(WIDTH) * scale))
        total, vectors = now.memory.model, now.memory.devices
        assert total is not None
        assert vectors is not None
        exact = np.zeros(WIDTH, np.float32)
        for device in range(M):
            exact = exact + vectors[device]
        assert total.parameters.tobytes() == exact.tobytes()


def test_a_lost_sum_is_made_of_the_caches() -> None:
    vectors = DeviceVectors(3, 1, names=Ca2flSettings().vector_names)
    vectors.write(1)[:] = 6.0
    lost = State(0, model_of(layout_of(1)))
    lost = replace(lost, memory=replace(lost.memory, devices=vectors))
    now = receive(Ca2flSettings(buffer_size=1).build(3), lost, 0, 3.0)
    assert now.model.parameters == pytest.approx([2.0 + 3.0])
