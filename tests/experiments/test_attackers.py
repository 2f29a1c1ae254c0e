"""What attackers send, beside the update of the same training, and a run that they ruin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import fedstream
from experiments.attackers import Attack, attacked, attackers_of
from fedstream.core.errors import ConfigError
from fedstream.trainer.solvers import Sgd
from tests.trainer.stepping import work_of


def sent(attack: Attack, device: int, z: float = 1.5) -> Tensor:
    """x_new - x_tau of a device."""
    task = attacked(attack=attack, share=0.3, z=z)
    torch.manual_seed(0)
    model = task.model()
    before = parameters_to_vector(model.parameters()).detach().clone()
    task.train(model, task.device_data(device), work_of(Sgd(lr=0.1), device=device, steps=3))
    return parameters_to_vector(model.parameters()).detach() - before


ATTACKERS = attackers_of(10, 0.3, 0)
ONE = ATTACKERS[0]
HONEST = next(device for device in range(10) if device not in ATTACKERS)


@pytest.mark.parametrize("attack", get_args(Attack))
def test_honest_devices_send_what_they_always_send(attack: Attack) -> None:
    assert torch.equal(sent(attack, HONEST), sent("none", HONEST))


@pytest.mark.parametrize(("attack", "factor"), [("flip", -1.0), ("scaled", -10.0)])
def test_attackers_send_a_multiple_of_their_update(attack: Attack, factor: float) -> None:
    torch.testing.assert_close(sent(attack, ONE), factor * sent("none", ONE), atol=1e-6, rtol=1e-4)


def test_alie_stays_within_the_spread_of_the_attackers_own_updates() -> None:
    mean, shifted = sent("alie", ONE, z=0.0), sent("alie", ONE, z=1.0)
    updates = torch.stack([sent("none", device) for device in ATTACKERS])
    torch.testing.assert_close(sent("alie", ATTACKERS[1], z=0.0), mean, atol=1e-5, rtol=0.01)
    assert (shifted <= mean + 1e-6).all()
    assert shifted.norm() < 3 * updates.norm(dim=1).max()


def test_labels_are_mirrored() -> None:
    plain, mirrored = (attacked(attack=one, share=0.3) for one in ("none", "labels"))
    for device in (ONE, HONEST):
        y, found = (task.device_data(device).tensors[1] for task in (plain, mirrored))
        assert torch.equal(found, 9 - y if device == ONE else y)


def test_device_0_never_attacks() -> None:
    assert all(0 not in attackers_of(10, 0.9, seed) for seed in range(20))
    assert len(attackers_of(100, 0.2, 1)) == 20


def test_unknown_attack_is_refused() -> None:
    with pytest.raises(ConfigError, match="attack = 'flips': expected one of none, labels, flip"):
        attacked(attack="flips")  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 0.95])
def test_a_share_without_an_honest_device_is_refused(share: float) -> None:
    with pytest.raises(
        ConfigError, match=f"share = {share}: must be at least 0 and leave an honest"
    ):
        attacked(share=share)


def test_data_are_similar_unless_a_partition_says_otherwise() -> None:
    alike, unlike = attacked(), attacked(partition={"kind": "classes", "p": 2})
    classes = [set(one.device_data(0).tensors[1].tolist()) for one in (alike, unlike)]
    assert [len(some) for some in classes] == [10, 2]


@pytest.mark.parametrize(
    ("strategy", "learns"),
    [
        ({"name": "fedbuff", "buffer_size": 5}, False),
        ({"name": "fedbuff", "buffer_size": 5, "aggregate": "median"}, True),
        ({"name": "basgd"}, True),
    ],
)
def test_two_of_ten_attackers_ruin_a_mean_but_no_middle(
    tmp_path: Path, strategy: dict[str, Any], learns: bool
) -> None:
    run = fedstream.simulate(
        attacked(attack="scaled"),
        strategy=strategy,
        versions=20,
        journal=False,
        progress=False,
        out=tmp_path / "run",
        set={"updater.norm_factor": 0, "simulation.evaluate_every": 0},
    )
    assert (run.metrics["accuracy"].iloc[-1] > 0.8) == learns
