"""Replay by another rule, or without some devices, on the same updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.core.layout import Model
from fedstream.journal import JournalDamaged, Taken
from fedstream.journal.replay import Moment, Replayer
from fedstream.strategies import FedAsyncSettings, FedAvgSettings
from tests.journal.replaying import FEDAVG, digests, fedasync, fedavg, values
from tests.journals import Scribe


def mixed(x: np.ndarray[Any, Any], new: Model, weight: float) -> np.ndarray[Any, Any]:
    """One step of FedAsync, in float64."""
    return (1 - weight) * x + weight * new.floats.astype(float)


def test_other_alpha_mixes_the_same_updates(folder: Path) -> None:
    fedasync(folder)
    with Replayer(folder) as replayer:
        original = list(replayer)
    with Replayer(folder, strategy=FedAsyncSettings(alpha=0.25)) as replayer:
        x: np.ndarray[Any, Any] | None = None
        for was, moment in zip(original, replayer, strict=True):
            assert isinstance(was.message, Taken)
            assert was.step.decision == moment.step.decision or was.step.decision
            if was.message.outcome == "refused":
                continue
            assert moment.step.decision
            assert moment.step.decision.staleness == was.message.staleness
            assert moment.step.decision.weight == pytest.approx(was.message.weight / 0.4 * 0.25)
            if x is not None:
                x = mixed(x, moment.update(), moment.step.decision.weight)
                assert moment.model.floats == pytest.approx(x, rel=1e-5)
            x = moment.model.floats.astype(float)


def test_the_same_rule_gives_the_same_bits(folder: Path) -> None:
    for n, (run, rule) in enumerate(((fedasync, FedAsyncSettings()), (fedavg, FEDAVG))):
        scribe = run(folder / str(n))
        scribe.digests.pop(0)
        assert digests(folder / str(n), strategy=rule) == scribe.digests
        assert digests(folder / str(n), strategy=rule, beside=True) == scribe.digests


def test_a_round_without_a_device_is_the_mean_of_the_others(folder: Path) -> None:
    scribe = Scribe(folder, FedAvgSettings(clients_per_round=3))
    for device in (1, 2, 3, 4, 1, 2):
        scribe.update(device)
    scribe.close()
    with Replayer(folder) as replayer:
        updates = [moment.update().floats for moment in replayer]
    with Replayer(folder, without=frozenset({1})) as replayer:
        made = [m.model.floats.tolist() for m in replayer if m.step.made is not None]
    assert made[0] == pytest.approx((updates[1] + updates[2]) / 2, rel=1e-6)
    assert made[1] == pytest.approx((updates[3] + updates[5]) / 2, rel=1e-6)


def test_both_rules_can_be_replayed_together(folder: Path) -> None:
    scribe = fedasync(folder)
    last: Moment | None = None
    with Replayer(folder, strategy=FedAsyncSettings(alpha=0.1), beside=True) as replayer:
        for moment in replayer:
            last = moment
        assert replayer.checkpoints == 2
        assert last
        assert last.original
        assert last.original.state.model.digest() == scribe.digests[9]
        assert last.model.digest() != scribe.digests[9]


def test_override_continues_across_segments(folder: Path) -> None:
    """The recorded standing is not the other rule's."""
    fedasync(folder / "cut")
    scribe = Scribe(folder / "whole")
    for late in (0, 1, 2, 0, -1, 0, 1, 2, 0, -1, 1):
        scribe.refuse() if late < 0 else scribe.update(late=late)
    scribe.close()
    rule = FedAsyncSettings(alpha=0.9)
    assert values(folder / "cut", strategy=rule) == values(folder / "whole", strategy=rule)


def test_override_starts_with_a_whole_round(folder: Path) -> None:
    """Also where the checkpoint lies in the middle of it."""
    for name in ("cut", "whole"):
        scribe = Scribe(folder / name, FedAvgSettings(clients_per_round=3))
        for n in range(9):
            scribe.update()
            if name == "cut" and n in (0, 4):
                scribe.segment()
        scribe.close()
    rule = FedAvgSettings(clients_per_round=3, weighting="samples")
    for begin in (None, 0, 1, 2):
        cut = values(folder / "cut", strategy=rule, from_version=begin)
        assert cut == values(folder / "whole", strategy=rule, from_version=begin)


def test_unknown_rule_is_an_error(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.head = scribe.head.model_copy(update={"strategy": {"name": "magic"}})
    path, head = scribe.writer.path, scribe.head
    scribe.close()
    path.unlink()
    scribe.head = head
    scribe._begin("begun")
    scribe.close()
    with pytest.raises(
        JournalDamaged, match=rf"^{path}: strategy.name = 'magic': must be one of fedasync"
    ):
        digests(folder)


def test_rule_may_be_derived_from_each_segments_own(folder: Path) -> None:
    scribe = Scribe(folder, FedAsyncSettings(alpha=0.5))
    scribe.update()
    scribe.segment(FedAsyncSettings(alpha=0.1))
    scribe.update()
    scribe.close()

    def halved(recorded: Any) -> FedAsyncSettings:
        return FedAsyncSettings(alpha=recorded["alpha"] / 2)

    with Replayer(folder, strategy=halved) as replayer:
        weights = [moment.step.decision and moment.step.decision.weight for moment in replayer]
    assert weights == [0.25, 0.05]
