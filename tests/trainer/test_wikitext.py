"""WikiText-2 from a small text: windows that hold every word once, and perplexity over all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.partitions import Classes, Iid, Natural
from fedstream.trainer.task import TaskSettings, initial
from fedstream.trainer.texts import WordModel, wikitext2

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = " \n = Title = \n" + " a b <unk> c \n" * 60  # 1 + 4 + 60 * 5 words with <eos>
TEST = " c b Unheard-of a \n" * 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "train.txt").write_text(TRAIN)
    (folder / "test.txt").write_text(TEST)
    return tmp_path


def settings(root: Path, devices: int = 3, **more: object) -> TaskSettings:
    return TaskSettings.model_validate({"data_root": str(root), "devices": devices, **more})


def test_windows_are_consecutive_and_hold_every_word_once(root: Path) -> None:
    task = wikitext2(settings(root))
    shares = [task.device_data(device).tensors for device in range(3)]
    assert [x.shape for x, _ in shares] == [(3, 35), (3, 35), (3, 35)]  # 304 targets: 8.7 windows
    x, y = (torch.cat(parts).flatten() for parts in zip(*shares, strict=True))
    assert x.dtype == y.dtype == torch.int64
    # <eos> 0, = 1, Title 2, a 3, b 4, <unk> 5, c 6
    text = torch.tensor([0, 1, 2, 1, 0, *[3, 4, 5, 6, 0] * 60])
    assert torch.equal(x[:304], text[:-1])
    assert torch.equal(y[:304], text[1:])
    assert y[304:].tolist() == [-100] * 11
    test_x, test_y = task.test_data().tensors
    assert test_x.flatten()[:10].tolist() == [6, 4, 5, 3, 0] * 2  # what is unheard of is <unk>
    assert int((test_y >= 0).sum()) == 20 * 5 - 1


def test_iid_deals_the_same_windows_differently(root: Path) -> None:
    natural, iid, again, other = (
        [wikitext2(settings(root, **more)).device_data(i).tensors[0] for i in range(3)]
        for more in (
            {"partition": Natural()},
            {"partition": Iid()},
            {"partition": Iid()},
            {"partition": Iid(), "seed": 1},
        )
    )

    def windows(shares: list[torch.Tensor]) -> list[list[int]]:
        return sorted(torch.cat(shares).tolist())

    assert windows(natural) == windows(iid) == windows(other)
    assert torch.equal(torch.cat(iid), torch.cat(again))
    assert not torch.equal(torch.cat(iid), torch.cat(natural))
    assert not torch.equal(torch.cat(iid), torch.cat(other))


def test_published_file_names_are_found_too(root: Path) -> None:
    for part in ("train", "test"):
        file = root / f"wikitext-2/{part}.txt"
        file.rename(file.with_name(f"wiki.{part}.tokens"))
    assert wikitext2(settings(root)).devices == 3


def test_model_size_follows_the_vocabulary(root: Path) -> None:
    def count(words: int) -> int:
        embedding, dense = words * 200, 201 * words
        return embedding + 2 * 4 * 200 * (200 + 200 + 2) + dense

    assert count(33_278) == 13_987_678
    model = WordModel(33_278)
    assert sum(p.numel() for p in model.parameters()) == 13_987_678
    task = wikitext2(settings(root))
    assert len(initial(task, 0).floats) == count(7)
    x = task.test_data().tensors[0]
    assert task.model()(x).shape == (3, 7, 35)


def test_loss_is_the_mean_over_targets_and_the_state_is_causal(root: Path) -> None:
    task = wikitext2(settings(root))
    model = task.model().eval()
    x, y = task.test_data().tensors
    assert torch.allclose(task.loss(model, [x, y]), cross_entropy(model(x), y))
    changed = x.clone()
    changed[:, 20:] = 0
    assert torch.equal(model(x)[..., :20], model(changed)[..., :20])


class Uneven(nn.Module):
    """Gives the next word 0 the probability 1/2, 1 and 2 a quarter each, whatever went before."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.5, 0.25, 0.25]).log())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores[None, :, None].expand(len(x), 3, x.shape[1])


def test_perplexity_is_over_words_not_batches(root: Path) -> None:
    task = wikitext2(settings(root))
    y = torch.zeros(50, 4, dtype=torch.int64)  # more than one batch, the last one smaller
    y[0] = torch.tensor([1, 2, -100, -100])
    found = task.metrics(Uneven().train(), TensorDataset(torch.zeros_like(y), y))
    loss = (196 * math.log(2) + 2 * math.log(4)) / 198
    assert found == pytest.approx({"perplexity": math.exp(loss), "loss": loss})
    with pytest.raises(DataError, match="nothing to evaluate"):
        task.metrics(Uneven(), TensorDataset(y[:0], y[:0]))


@pytest.mark.parametrize("partition", [Classes(p=2)])
def test_text_has_no_classes(root: Path, partition: Classes) -> None:
    with pytest.raises(
        DataError, match=f"'{partition.kind}'.*no classes .*; choose natural or iid"
    ):
        wikitext2(settings(root, partition=partition))


def test_missing_empty_or_wrong_files_are_reported(root: Path) -> None:
    with pytest.raises(DataError, match="9 samples cannot be split over 100 devices"):
        wikitext2(TaskSettings(data_root=str(root)))
    file = root / "wikitext-2/test.txt"
    (root / "wikitext-2/train.txt").write_text("a b\n")
    with pytest.raises(DataError, match="'c' of the test text is not in the training text"):
        wikitext2(settings(root, devices=1))
    file.write_text("\n")
    with pytest.raises(DataError, match=r"test.txt is empty: download it again"):
        wikitext2(settings(root))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"test.txt cannot be read as text: .*download it again"):
        wikitext2(settings(root))
    file.unlink()
    with pytest.raises(DataError, match=r"test.txt \(or wiki.test.tokens, .* does not download"):
        wikitext2(settings(root))
