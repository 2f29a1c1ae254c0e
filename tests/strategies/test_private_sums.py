"""Private rules make the versions that their own rules make of the same updates in the clear."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedstream.core.errors import ConfigError, SumOutOfRange
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.private.masks import masked, rounded, sum_of_masks
from fedstream.private.policy import PrivacyPolicy
from fedstream.settings.services import check_turns
from fedstream.strategies import AfaCdSettings, Batch, FedAvgSettings, FedBuffSettings, strategy_of
from fedstream.strategies.optimizers import Adam, Momentum, Yogi
from fedstream.strategies.private_sums import (
    PrivateSums,
    PrivateTerms,
    check_layout,
    check_weights,
    words_of,
)
from fedstream.strategies.strategy import State, Strategy, Update
from tests.private.enrolled import policy_of
from tests.support import layout_of, model_of

SIZE, K, LR, STEPS = 40, 4, 0.05, 6


def policy(**changes: object) -> PrivacyPolicy:
    return policy_of(
        **{"parameters": SIZE, "sigma": 0.0, "min_batch": 2, "max_batch": K, **changes}
    )


class Run:
    """A private run in memory: devices mask, the helper adds up the streams."""

    def __init__(self, rule: Strategy, terms: PrivateTerms) -> None:
        self.rule, self.policy = PrivateSums.of(rule, terms), terms.policy
        self.layout = layout_of(SIZE)
        self.state = State(0, model_of(self.layout, 0.5))
        self.seeds: list[tuple[bytes, int]] = []
        self.rng = np.random.default_rng(3)

    def takes(self, tau: int = 0, values: np.ndarray | None = None) -> np.ndarray:
        """A device's update, as the server must not see it; ``values``: in place of drawn ones."""
        if values is None:
            delta = (self.rng.standard_normal(SIZE) / 10).astype(np.float32)
            values = rounded(delta, self.policy, self.rng)
        seed = os.urandom(32)
        sent = Model(self.layout)
        words_of(sent)[:] = masked(values, seed)
        update = Update(sent, tau, 0, samples=0, steps=0, lr=LR)
        self.state, decision = self.rule.receive(self.state, update, Model(self.layout))
        assert decision.outcome == "buffered"
        self.seeds.append((seed, int(decision.weight)))
        return np.ldexp(values.astype(np.float64), -self.policy.scale_bits)

    def opens(self) -> None:
        masks = Model(self.layout)
        words_of(masks)[:] = sum_of_masks(self.seeds, None, SIZE)
        self.state, self.seeds = self.rule.open(self.state, masks), []


@pytest.mark.parametrize(
    "rule",
    [
        FedBuffSettings(buffer_size=K, server_lr=0.7),
        FedBuffSettings(buffer_size=K, server=Momentum()),
        FedBuffSettings(buffer_size=K, server=Adam()),
        FedBuffSettings(buffer_size=K, server=Yogi()),
        FedAvgSettings(clients_per_round=K),
        AfaCdSettings(buffer_size=K),
    ],
    ids=lambda rule: f"{rule.name}-{rule.server.kind if isinstance(rule, Batch) else ''}",
)
def test_version_is_that_of_the_plain_rule(rule: Strategy) -> None:
    run = Run(rule, PrivateTerms(policy=policy(), per=LR * STEPS if rule.by_steps else 1.0))
    plain = State(0, model_of(run.layout, 0.5))
    for version in range(3):
        for _ in range(K):
            assert not run.rule.is_due(run.state)
            delta = run.takes(tau=version)
            sent = Model(run.layout)
            sent.floats[:] = delta if rule.sends == "delta" else plain.model.floats + delta
            update = Update(sent, version, 0, samples=1, steps=STEPS, lr=LR)
            plain, _ = rule.receive(plain, update, Model(run.layout))
        assert run.rule.is_due(run.state)
        run.opens()
        assert run.state.version == plain.version == version + 1
        np.testing.assert_allclose(run.state.model.floats, plain.model.floats, rtol=1e-5, atol=1e-6)


def test_staler_updates_weigh_as_the_policy_says() -> None:
    run = Run(FedBuffSettings(buffer_size=K), PrivateTerms(policy=policy(weights=(4, 3, 2))))
    for _ in range(2):
        for _ in range(K):
            run.takes(tau=run.state.version)
        run.opens()
    before = run.state.model.floats.copy()
    fresh, stale = run.takes(tau=2), run.takes(tau=0)
    fresh += run.takes(tau=2)
    stale += run.takes(tau=0)
    run.opens()
    wanted = (4 * fresh + 2 * stale) / (4 * K)
    np.testing.assert_allclose(run.state.model.floats - before, wanted, atol=1e-6)
    update = Update(Model(run.layout), 0, 0, samples=0, steps=0, lr=LR)
    assert run.rule.receive(run.state, update, Model(run.layout))[1].outcome == "dropped"


def test_run_whose_sums_the_helper_might_refuse_for_their_weights_does_not_start() -> None:
    """One fresh update among stale ones would stand out, and the batch be lost each time."""
    terms = PrivateTerms(policy=policy(weights=(4, 3, 1)))
    with pytest.raises(ConfigError, match="a sum may add up to 7, and the policy opens none below"):
        check_weights(FedBuffSettings(buffer_size=K), terms)
    check_weights(FedBuffSettings(buffer_size=K, max_staleness=1), terms)
    check_weights(FedAvgSettings(clients_per_round=K), terms)


def test_closed_round_is_divided_by_the_same_constant() -> None:
    """So how far a device moves the model doesn't tell how many others came."""
    run = Run(FedAvgSettings(clients_per_round=K), PrivateTerms(policy=policy()))
    assert run.rule.end_round(run.state) is run.state
    deltas = run.takes() + run.takes()
    run.state = run.rule.end_round(run.state)
    assert run.rule.is_due(run.state)
    run.opens()
    np.testing.assert_allclose(run.state.model.floats, 0.5 + deltas / K, atol=1e-6)
    assert not run.state.memory.arrivals
    assert not run.rule.is_due(run.state)


def test_malformed_sum_leaves_the_batch_as_it_was() -> None:
    """So that the journal can drop it, as every replay will."""
    run = Run(FedBuffSettings(buffer_size=2), PrivateTerms(policy=policy()))
    run.takes()
    run.takes()
    run.seeds[0] = (os.urandom(32), 1)
    total = run.state.memory.model
    assert total is not None
    before = total.buffer.copy()
    with pytest.raises(SumOutOfRange):
        run.opens()
    np.testing.assert_array_equal(total.buffer, before)
    assert run.rule.drop_round(run.state).memory.arrivals == 0


def test_recorded_rule_is_the_same_rule() -> None:
    terms = PrivateTerms(policy=policy(weights=(3, 2)), per=0.3)
    rule = PrivateSums.of(AfaCdSettings(buffer_size=K, max_staleness=1), terms)
    again = strategy_of(rule.model_dump(mode="json"), devices=10)
    assert again == rule
    assert (again.max_staleness, again.batch, again.policy) == (1, K, terms.policy.text.decode())


@pytest.mark.parametrize(
    ("kind", "says"), [("buffer", "running_mean"), ("integer", "running_mean")]
)
def test_model_that_sends_more_than_parameters_is_refused(kind: str, says: str) -> None:
    tensors = (
        Tensor("weight", (SIZE,), "float32", "parameter"),
        Tensor("running_mean", (2,), "float32" if kind == "buffer" else "int64", kind),  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match=says):
        check_layout(Layout(tensors), policy())


def test_model_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="for 40 parameters, the model has 41"):
        check_layout(layout_of(SIZE + 1), policy())


def test_correlated_noise_needs_devices_that_take_turns() -> None:
    """Else all of them sit out at some time, and no batch is filled any more."""
    policy = policy_of(bands=4)
    rule = PrivateSums.of(FedBuffSettings(buffer_size=3), PrivateTerms(policy=policy))
    check_turns(rule, 12)
    with pytest.raises(ConfigError, match=r"bands = 4, .* need 12 devices"):
        check_turns(rule, 11)
