"""A private run's rule, and settings that would show the server more than a sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.core.errors import ConfigError
from fedstream.settings.config import Settings, read
from fedstream.strategies.private_sums import PrivateSums
from tests.private.enrolled import OWNER, files, hex_of, policy_of


@pytest.fixture
def private(tmp_path: Path) -> list[str]:
    """A policy for sums of 3 to 10 updates, staleness 9 at most, and a rule that it fits."""
    return [
        f"private.policy={files(tmp_path, policy_of())['policy']}",
        f"private.owner={hex_of(OWNER)}",
        "strategy.name=fedbuff",
        "strategy.buffer_size=5",
    ]


def test_rule_is_the_strategys_on_sums_under_the_policy(private: list[str]) -> None:
    rule = read(None, private).rule
    assert isinstance(rule, PrivateSums)
    assert (rule.batch, rule.max_staleness, rule.masked) == (5, 9, True)
    assert rule.policy == policy_of().text.decode()
    assert read(None, [*private, "strategy.max_staleness=2"]).rule.max_staleness == 2
    rounds = [*private[:2], "strategy.name=fedavg", "strategy.clients_per_round=4"]
    assert read(None, rounds).rule.max_staleness == 0, "late answers are dropped"
    assert not read(None, private[2:]).rule.masked


def test_terms_are_those_of_the_policy(private: list[str]) -> None:
    """A recorded run may repeat them. To ask for more noise is no way to get it."""
    assert read(None, [*private, "private.terms.participations=5"]).rule.masked
    with pytest.raises(ConfigError, match=r"^private\.terms\.sigma = 2\.0, but .* has 1\.0: "):
        read(None, [*private, "private.terms.sigma=2"]).rule  # noqa: B018


AFA_CD = ["strategy.name=afa-cd", "strategy.buffer_size=5"]


def test_afa_cd_divides_by_one_learning_rate_and_number_of_steps(private: list[str]) -> None:
    """As each device of the plain rule does: gamma = 0.2, H = 4."""
    sets = [*private[:2], *AFA_CD, "solver.lr=0.2", "scheduler.steps.n=4"]
    rule = read(None, sets).rule
    assert isinstance(rule, PrivateSums)
    assert rule.terms.per == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["wire.update=int8"], "wire.update = 'int8' in a private run"),
        (["evaluator.on_devices.fraction=0.1"], "evaluator.on_devices in a private run"),
        (
            ["journal.weights=false"],
            "journal.weights = false in a private run",
        ),
        (
            ["strategy.adapt.every=20"],
            "strategy.adapt in a private run",
        ),
        (
            ["journal.sync=never"],
            "journal.sync = 'never' in a private run",
        ),
        (
            ["gateway.flower_app=a", "gateway.flower_keys=b"],
            "gateway.flower_app in a private run",
        ),
        ([*AFA_CD, "scheduler.steps.kind=uniform"], "scheduler.steps.kind = 'uniform'"),
        ([*AFA_CD, "participation=[{devices=[1], steps={kind='fixed', n=9}}]"], "participation"),
        ([*AFA_CD, "solvers=[{devices=[1], lr=0.9}]"], "solvers.lr differs"),
        ([*AFA_CD, "solver.schedule.kind=inverse_sqrt"], "solver.schedule"),
        (
            [*AFA_CD, "solver.lr_scheduler.kind=CosineAnnealingLR", "solver.lr_scheduler.T_max=9"],
            "solver.lr_scheduler",
        ),
    ],
)
def test_settings_that_a_sum_cannot_serve_are_refused_by_name(
    sets: list[str], why: str, private: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, [*private, *sets])
    assert why in str(caught.value)
    assert "in a private run (private.policy)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(read(None, sets if AFA_CD[0] in sets else [*private[2:], *sets]), Settings)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["strategy.name=fedasync"], "strategy.name = 'fedasync' in a private run"),
        (["strategy.name=fedbuff", "strategy.staleness.kind=polynomial"], "strategy.staleness"),
        (["strategy.name=fedbuff", "strategy.buffer_size=2"], "opens sums of 3 to 10 updates"),
    ],
)
def test_rule_without_a_private_form_is_refused(
    sets: list[str], why: str, private: list[str]
) -> None:
    settings = read(None, [*private[:2], *sets])
    with pytest.raises(ConfigError, match=why):
        _ = settings.rule


def test_policy_that_another_owner_signed_is_refused(private: list[str]) -> None:
    settings = read(None, [private[0], f"private.owner={'1' * 64}", *private[2:]])
    with pytest.raises(ConfigError, match="not signed by the helper's owner"):
        _ = settings.rule


@pytest.mark.parametrize("url", ["helper:8444", "ftp://helper", "http://"])
def test_helpers_address_that_is_no_url_is_refused_at_the_start(url: str) -> None:
    """The updater would wait for an answer for ever."""
    with pytest.raises(ConfigError, match=r"private\.helper"):
        read(None, [f"private.helper={url}"])
