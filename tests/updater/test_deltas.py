"""Deltas: what the updater does with them, and which of them never reach the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.messages import Upload
from fedstream.strategies import (
    AcedSettings,
    AfaCdSettings,
    AfaCsSettings,
    Ca2flSettings,
    FedAsyncSettings,
    FedBuffSettings,
    ScaffoldSettings,
    Strategy,
)
from fedstream.updater.decider import LARGEST_DELTA, refusal_by_norm
from tests.support import Hand, context, counted, layout_of, running, wait_until
from tests.updater.journalled import held, reasons
from tests.updater.states import upload_of

FEDBUFF = FedBuffSettings(buffer_size=1)
AFA_CD = AfaCdSettings(buffer_size=1, server_lr=0.5)
AFA_CS = AfaCsSettings(buffer_size=1, server_lr=0.5)
CA2FL = Ca2flSettings(buffer_size=1)
ACED = AcedSettings(server_lr=0.5)
SCAFFOLD = ScaffoldSettings(buffer_size=1)
PER_STEP = ScaffoldSettings(buffer_size=1, per_step=True)
RULES = (FEDBUFF, AFA_CD, AFA_CS, CA2FL, ACED, SCAFFOLD, PER_STEP)
DELTA = {"sends": "delta"}


@pytest.fixture
def begun(hand: Hand, rule: Strategy) -> None:
    """The run's layout is what the rule needs."""
    layout = layout_of(4, 2)
    hand.layout = layout.with_controls() if rule.build(10).controls else layout


async def sent(hand: Hand, *floats: float, **changes: Any) -> Upload:
    """A device answers, whatever admission would say to it."""
    [trigger] = await hand.open(device=changes.get("device", 1))
    upload = await hand.trained(trigger, *floats, **(DELTA | changes))
    await hand.slip_in(upload)
    return upload


def filled(
    hand: Hand, parameters: float, buffers: float = 1.0, controls: float = 0.0
) -> list[float]:
    """The values of an update, by kind."""
    of = hand.layout
    between = of.floats - of.parameters - of.controls
    return [parameters] * of.parameters + [buffers] * between + [controls] * of.controls


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("rule", "moved"),
    [
        (FEDBUFF, 6.0),
        (AFA_CD, 6.0),
        (AFA_CS, 0.6),
        (SCAFFOLD, 6.0),
        (PER_STEP, 12.0),
        (CA2FL, 3.3),
        (ACED, 6.0),
    ],
    ids=["fedbuff", "afa-cd", "afa-cs", "scaffold", "scaffold per step", "ca2fl", "aced"],
)
async def test_delta_is_a_step_from_the_newest_version(
    make: Any, hand: Hand, rule: Strategy, moved: float
) -> None:
    """Twice, the second from version 0: it is added to version 1. H gamma is a half."""
    async with running(make(rule), context()):
        await hand.join()
        for number in (1, 2):
            await sent(hand, *filled(hand, 6.0, 3.0, 1.0), tau=0)
            await hand.reaches(number)
        *_, last = await hand.published()
        model = await hand.model(last)
        # AFA-CS takes the device's newest gradient, of ten devices' of which nine are silent.
        # CA2FL moves by 6, then by the mean cache alone, 0.6.
        assert model.parameters == pytest.approx([2 * moved] * 4)
        assert model.buffers.tolist() == [3.0, 3.0]  # they are no deltas
        assert model.controls == pytest.approx([0.2] * hand.layout.controls)
        assert [one.staleness for one in last.updates] == [1]
        await hand.balanced()


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("rule", "values", "changes", "reason"),
    [
        (AFA_CD, {}, {"steps": 0}, "no steps"),
        (PER_STEP, {}, {"steps": 0}, "no steps"),
        (AFA_CD, {}, {"lr": 0.0}, "no steps"),
        (AFA_CD, {}, {"lr": math.nan}, "no steps"),
        (AFA_CD, {"parameters": 0.0, "buffers": 0.0}, {"lr": 1e-40}, "no steps"),
        (AFA_CS, {}, {"device": 10}, "unknown device"),
        (CA2FL, {}, {"device": 10}, "unknown device"),
        (ACED, {}, {"steps": 0}, "no steps"),
        (FEDBUFF, {}, {"sends": "model"}, "sends a model"),
        (FEDBUFF, {"buffers": math.inf}, {}, "not finite"),
        (FEDBUFF, {"parameters": 10 * LARGEST_DELTA}, {}, "norm too large"),
        (SCAFFOLD, {"controls": 10 * LARGEST_DELTA}, {}, "norm too large"),
        # not by itself, but divided by gamma H
        (AFA_CD, {"parameters": 1e3}, {"lr": 1e-29, "steps": 1}, "norm too large"),
        (PER_STEP, {"parameters": 1e3}, {"lr": 1e-29, "steps": 1}, "norm too large"),
    ],
)
async def test_unusable_update_is_refused_and_changes_nothing(
    make: Any,
    hand: Hand,
    client: Client,
    keys: Keys,
    rule: Strategy,
    values: dict[str, float],
    changes: dict[str, Any],
    reason: str,
) -> None:
    live = context()
    updater = make(rule)
    async with running(updater, live):
        await hand.join()
        before = await hand.ledger.head()
        assert before
        upload = await sent(hand, *filled(hand, **({"parameters": 1.0} | values)), **changes)
        await wait_until(lambda: reasons(hand, "refused", {reason: 1}))
        told = {"refused": 1, f"refused:{reason}": 1}
        assert await hand.ledger.head() == replace(before, journalled=told)
        assert await client.call("EXISTS", keys.queued(upload.blob)) == 0
        assert updater._loop.state.progress.state.memory.devices is None  # nobody is remembered
        await sent(hand, *filled(hand, 1.0))  # and the next one is taken as if nothing had happened
        await hand.reaches(1)
        assert np.isfinite((await hand.model((await hand.published())[-1])).floats).all()
        await hand.balanced()
    assert counted(live, "fedstream_updates_total", outcome="refused", reason=reason) == 1


@pytest.mark.parametrize("rule", [FedAsyncSettings()])
@pytest.mark.usefixtures("begun")
async def test_rule_that_takes_models_refuses_a_delta(
    make: Any, hand: Hand, rule: Strategy
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await sent(hand, 1.0)
        await wait_until(lambda: reasons(hand, "refused", {"sends a delta": 1}))
        await sent(hand, 1.0, sends="model")
        await hand.reaches(1)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("rule", [FEDBUFF, SCAFFOLD])
async def test_fields_a_rule_does_not_use_may_be_missing(
    make: Any, hand: Hand, rule: Strategy
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await sent(hand, *filled(hand, 1.0), steps=0)
        await hand.reaches(1)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("rule", RULES)
async def test_largest_accepted_update_does_not_overflow(
    make: Any, hand: Hand, rule: Strategy
) -> None:
    largest = LARGEST_DELTA / 4
    async with running(make(rule, norm_factor=0), context()):
        await hand.join()
        for number, sign in enumerate((1, 1, -1), 1):
            many = filled(hand, sign * largest / 2, 1.0, sign * largest / 2 * (rule is SCAFFOLD))
            await sent(hand, *many, lr=1.0, steps=1)
            await hand.reaches(number)
        model = await hand.model((await hand.published())[-1])
    assert np.isfinite(model.floats).all()


@pytest.mark.parametrize(
    ("rule", "norm", "max_norm", "reason"),
    [
        (FedAsyncSettings(), 1e36, None, ""),
        (FedAsyncSettings(), 2e37, None, "norm too large"),
        (FEDBUFF, 1e29, None, ""),
        (FEDBUFF, 2e30, None, "norm too large"),
        (FEDBUFF, 2e30, 1e38, "norm too large"),  # what overflows is not for a setting to allow
        (FEDBUFF, 3.0, 2.0, "norm too large"),
        (AFA_CD, 3e29, None, "norm too large"),  # divided by gamma H = 0.2
        (FEDBUFF, math.inf, None, "not finite"),
    ],
)
def test_size_check_is_pure(
    rule: Strategy, norm: float, max_norm: float | None, reason: str
) -> None:
    upload = upload_of("t", tau=0, steps=2)
    assert refusal_by_norm(upload, rule.build(10), norm, max_norm) == reason


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("rule", [ScaffoldSettings(buffer_size=2, max_staleness=1)])
async def test_stale_update_keeps_its_devices_memory(make: Any, hand: Hand, rule: Strategy) -> None:
    updater = make(rule)
    async with running(updater, context()):
        await hand.join()
        for number, device in enumerate((1, 2, 3, 4)):
            await sent(hand, *filled(hand, 1.0, 1.0, 1.0), device=device)
            await (
                hand.reaches(number // 2 + 1) if number % 2 else wait_until(lambda: held(hand, 1))
            )
        await sent(hand, *filled(hand, 1.0, 1.0, 1.0), device=1, tau=0)
        await wait_until(lambda: reasons(hand, "refused", {"too stale": 1}))
        vectors = updater._loop.state.progress.state.memory.devices
        assert [vectors[device].tolist() for device in (1, 5)] == [[1.0] * 4, [0.0] * 4]
