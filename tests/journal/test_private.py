"""Replays of a private journal: as it was, and by other rules on the same opened sums."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats
from fedstream.history.index import columns_of
from fedstream.history.replay import rule_by
from fedstream.journal import NotRecorded
from fedstream.journal.replay import Replayer
from fedstream.private.masks import in_model_units
from fedstream.strategies import (
    AfaCdSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    Strategy,
)
from fedstream.strategies.optimizers import Adam, Momentum
from fedstream.strategies.staleness import Polynomial
from tests.journal.replaying import digests
from tests.journals import Scribe
from tests.private.journalled import EACH, POLICY, PrivateScribe, private_run, run_in_buckets

ADAM = FedBuffSettings(buffer_size=EACH, server=Adam())
K = 3 * EACH


def recorded(scribe: Scribe) -> dict[int, str]:
    return {version: digest for version, digest in scribe.digests.items() if version}


def models(folder: Path, **options: Any) -> list[list[float]]:
    with Replayer(folder, **options) as replayer:
        return [one.model.floats.tolist() for one in replayer if one.step.made is not None]


def begin_of(folder: Path) -> Floats:
    with Replayer(folder) as replayer:
        return next(iter(replayer)).model.floats.copy()


def test_rounds_that_end_early_are_of_their_opened_buckets(folder: Path) -> None:
    """At the round's end, or once its last bucket is opened or refused; by another rule too."""
    scribe = PrivateScribe(folder, FedAvgSettings(clients_per_round=K), terms={"buckets": 3})
    scribe.fills()
    scribe.close_round()
    for refused in ("", "too few"):
        scribe.fills()
        scribe.update()
        scribe.update()
        scribe.close_round()
        if not refused:
            scribe.segment()
        scribe.opens(refused)
    scribe.close()
    assert scribe.version == 3
    assert digests(folder) == recorded(scribe)
    assert digests(folder, strategy=FedBuffSettings()) == recorded(scribe)
    with Replayer(folder) as replayer:
        made = [len(one.step.made) for one in replayer if one.step.made is not None]
    assert made == [EACH, EACH + 2, EACH]
    columns = columns_of(folder)
    assert columns.count().tolist() == [0, *made]


RULES = [
    FedBuffSettings(buffer_size=EACH),
    ADAM,
    FedAvgSettings(clients_per_round=EACH),
    AfaCdSettings(buffer_size=EACH),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_replay_makes_the_same_versions(folder: Path, rule: Strategy) -> None:
    """From the journal's begin, from each version, and beside another rule."""
    if isinstance(rule, FedAvgSettings):
        scribe = PrivateScribe(folder, rule)
        scribe.fills()
        scribe.fills()
        scribe.close()
    else:
        scribe = private_run(folder, rule)
    assert digests(folder) == recorded(scribe)
    for begin in range(scribe.version):
        wanted = {one: digest for one, digest in recorded(scribe).items() if one > begin}
        assert digests(folder, from_version=begin) == wanted


@pytest.mark.parametrize("rule", [None, FedBuffSettings(buffer_size=K, server=Adam())], ids=str)
def test_versions_of_buckets_are_the_same(folder: Path, rule: Strategy | None) -> None:
    """Also where a segment begins between two buckets of a version."""
    scribe = run_in_buckets(folder, rule)
    assert scribe.version == 2
    assert digests(folder) == recorded(scribe)
    assert digests(folder, from_version=1) == {2: scribe.digests[2]}
    with Replayer(folder) as replayer:
        made = [len(one.step.made) for one in replayer if one.step.made is not None]
    assert made == [K, K]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_another_rule_makes_the_versions_that_it_would_have_made(
    tmp_path: Path, rule: Strategy
) -> None:
    """The same devices' updates, in a run by that rule from the start: bit for bit."""
    if isinstance(rule, FedAvgSettings):
        made = []
        for name, one in (("was", RULES[0]), ("would", rule)):
            scribe = PrivateScribe(tmp_path / name, one)
            scribe.fills()
            scribe.fills()
            scribe.close()
            made.append(scribe)
    else:
        made = [private_run(tmp_path / "was", RULES[0]), private_run(tmp_path / "would", rule)]
    assert digests(made[0].folder, strategy=rule) == recorded(made[1])
    assert digests(made[0].folder, strategy=rule, beside=True) == recorded(made[1])


def test_reading_needs_the_extra_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is not damaged."""
    private_run(folder)
    monkeypatch.setitem(sys.modules, "fedstream.strategies.private_sums", None)
    with pytest.raises(ConfigError, match=r"a private run needs .*'fedstream\[private\]'$"):
        digests(folder)


def test_another_learning_rate_scales_the_steps(folder: Path) -> None:
    private_run(folder)
    was = np.array(models(folder))
    other = np.array(models(folder, strategy=rule_by(["strategy.server_lr=0.5"])))
    first = begin_of(folder)
    np.testing.assert_allclose(other - first, (was - first) / 2, atol=1e-6)


def test_optimizer_goes_on_with_its_own_vectors(folder: Path) -> None:
    """The same optimizer from version 2 on keeps its moments; another one begins anew."""
    private_run(folder, ADAM)
    same = rule_by(["strategy.server.beta1=0.9"])
    was = models(folder)
    assert models(folder, strategy=same, from_version=2) == was[2:]
    other = rule_by(["strategy.server.kind=momentum"])
    assert models(folder, strategy=other, from_version=2)[-1] != was[-1]


@pytest.mark.parametrize(
    ("over", "middle"), [("mean", np.mean), ("median", np.median)], ids=["mean", "median"]
)
def test_another_rule_over_the_same_buckets(folder: Path, over: str, middle: Any) -> None:
    scribe = run_in_buckets(folder)
    [made, _] = models(folder, strategy=rule_by([f"private.over={over}"]))
    sums = [sum(scribe.values[f"task-{4 * n + one}"] for one in range(EACH)) for n in range(3)]
    means = [in_model_units(np.asarray(one), EACH, POLICY) for one in sums]
    np.testing.assert_allclose(made - begin_of(folder), middle(means, axis=0), atol=1e-6)


def test_other_optimizer_takes_over_in_the_midst_of_a_version(folder: Path) -> None:
    """The journal begins with a bucket opened, whose sum any optimizer needs."""
    scribe = run_in_buckets(folder, FedBuffSettings(buffer_size=K, server=Momentum()))
    min(folder.iterdir()).unlink()
    assert digests(folder) == recorded(scribe)
    plain = rule_by(["strategy.server.kind=sgd"])
    [made, _] = models(folder, strategy=plain)
    np.testing.assert_allclose(made, models(folder)[0], rtol=1e-6)  # momentum's first step


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (FedAsyncSettings(), "needs each update alone, and a private run opens sums only"),
        (FedBuffSettings(buffer_size=EACH, staleness=Polynomial()), "the privacy policy has weig"),
        (FedBuffSettings(buffer_size=4), "buffer_size = 4: it was 3 in this private run"),
        (FedBuffSettings(max_staleness=0), "max_staleness = 0: it was not set"),
    ],
)
def test_what_no_sum_can_tell_is_said(folder: Path, other: Strategy, says: str) -> None:
    private_run(folder)
    with pytest.raises(ConfigError, match=says), Replayer(folder, strategy=other) as replayer:
        list(replayer)


def test_sum_of_devices_with_other_steps_is_not_afas(folder: Path) -> None:
    PrivateScribe(folder, terms={"per": None}).close()
    with pytest.raises(ConfigError, match="gamma H, which is not known"):
        digests(folder, strategy=AfaCdSettings())


def test_device_is_in_a_sum(folder: Path) -> None:
    private_run(folder)
    with pytest.raises(NotRecorded, match="no device can be left out of a sum"):
        Replayer(folder, without=frozenset({1}))


def test_plain_run_has_no_sums(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.update()
    scribe.close()
    rule = rule_by(["private.over=median"])
    with pytest.raises(ConfigError, match="this run is not private"):
        digests(folder, strategy=rule)
