"""A journal of a model with a frozen base: the base lies beside the segments, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedstream
from fedstream.journal import JournalError, opened, stored_bytes
from fedstream.journal.inspection import model_at, verify
from fedstream.journal.replay import Replayer
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.task import Task, initial

WIDTH, UPDATES = 200, 20


class Adapted(Task):
    """A frozen base of 40,000 parameters, and a head of 400."""

    devices = 4

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False))
        model[0].requires_grad_(requires_grad=False)
        return model

    def device_data(self, device: int) -> TensorDataset:
        rng = torch.Generator().manual_seed(device)
        return TensorDataset(
            torch.randn(8, WIDTH, generator=rng), torch.randint(2, (8,), generator=rng)
        )


def recorded(folder: Path) -> None:
    """A journal of twenty updates."""
    settings = read(None, [f"run.versions={UPDATES}", "simulation.threads=1"])
    simulate(settings, Adapted(), journal=folder)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A run's folder."""
    recorded(tmp_path / "journal")
    return tmp_path


def test_journal_has_the_base_once(journal: Path) -> None:
    base, head = 4 * WIDTH * WIDTH, 4 * WIDTH * 2
    size = stored_bytes(journal / "journal")
    assert base < size < base + UPDATES * 2 * (head + 4096) + 65536
    with Replayer(journal / "journal") as replayer:
        assert [moment.identical for moment in replayer] == [True] * UPDATES


def test_every_version_is_whole_again(journal: Path) -> None:
    first = initial(Adapted(), 0).tensors()
    found = fedstream.open(journal).model(7)
    assert set(found) == {"0.weight", "1.weight"}
    assert found["0.weight"].tolist() == first["0.weight"].tolist()
    assert found["1.weight"].tolist() != first["1.weight"].tolist()


def test_missing_and_damaged_base_are_reported_with_their_place(journal: Path) -> None:
    [file] = (journal / "journal").glob("*.unshared")
    whole = file.read_bytes()
    for damage in (whole[:-4], whole + b"more", b"x" + whole[1:]):
        file.write_bytes(damage)
        with opened(journal) as chain:
            [verdict] = verify(chain)
            assert verdict.damage == (
                f"{file}: the frozen or local parameters do not match their digest: restore it"
            )
    file.unlink()
    with opened(journal) as chain:
        model, _ = model_at(chain, 3)
        with pytest.raises(JournalError, match=rf"{file.name}: .*cannot be read: No such file"):
            model.tensors()
    file.write_bytes(whole)
    with opened(journal) as chain:
        [verdict] = verify(chain)
        assert verdict.damage is None
