"""WikiText-2 with an LSTM language model, as in FedAsync's experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedstream.broker.errors import DataError
from fedstream.trainer.data import gather
from fedstream.trainer.in_memory import InMemory, data_root, deal, read_text
from fedstream.trainer.splitting import Classes, Dirichlet, Natural, split
from fedstream.trainer.task import IGNORED, examples

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.utils.data import Dataset

    from fedstream.trainer.task import TaskSettings

_STEPS = 35
_WINDOWS_AT_ONCE = 16  # in evaluation: the scores of 560 targets take 75 MB


class Words(InMemory):
    """Next-word prediction: x and y of shape (T,), scores of shape (batch, words, T)."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean cross entropy over the batch's targets."""
        x, y = examples(model, batch)
        return _cross_entropy(model(x), y, "mean")

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        """``loss``, the mean cross entropy over all words, and ``perplexity``, its exponential.

        Puts the model into evaluation mode. Raises DataError if the data is empty.
        """
        model.eval()
        windows = len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
        if windows == 0:
            raise DataError("there is nothing to evaluate: the data set is empty")
        loss, words = torch.zeros((), dtype=torch.float64), 0
        with torch.no_grad():
            for rows in torch.split(torch.arange(windows), _WINDOWS_AT_ONCE):
                x, y = examples(model, gather(data, rows))
                loss += _cross_entropy(model(x), y, "sum").cpu()
                words += int((y != IGNORED).sum())
        loss /= words
        return {"perplexity": float(loss.exp()), "loss": float(loss)}


def _cross_entropy(scores: Tensor, y: Tensor, reduction: str) -> Tensor:
    """torch's cross entropy with words as the last dimension, which saves a third of the time.

    Measured with 33,278 words.
    """
    return cross_entropy(scores.transpose(1, 2).flatten(0, 1), y.flatten(), reduction=reduction)


class WordModel(nn.Module):
    """Two LSTM layers of 200 over word vectors of 200: (batch, T) to (batch, words, T).

    The FedAsync paper doesn't specify its model. This one was common at the time for this text,
    with gamma = 20 and batches of 20: PyTorch's word_language_model, including its dropout of .2
    and initial weights uniform on [-.1, .1]. It has 401 ``words`` + 643,200 parameters.
    """

    def __init__(self, words: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.embedding = nn.Embedding(words, 200)
        self.lstm = nn.LSTM(200, 200, num_layers=2, dropout=0.2, batch_first=True)
        self.scores = nn.Linear(200, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.scores.weight, -0.1, 0.1)
        nn.init.zeros_(self.scores.bias)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(x)))
        scores: Tensor = self.scores(self.dropout(states))
        return scores.transpose(1, 2)


def wikitext2(settings: TaskSettings) -> Words:
    """WikiText-2 with an LSTM language model, as in FedAsync's experiments (workshop, figure 3).

    The text is cut into windows of 35 words, and the LSTM's state starts from zero in each. A
    device gets consecutive windows, or random ones with ``iid``. The vocabulary is that of the
    training text.

    Raises DataError if the data is missing or empty, if the test text has words that the training
    text lacks and there is no ``<unk>`` to replace them, or if the partition is by classes.
    """
    folder = data_root("wikitext2", settings) / "wikitext-2"
    train, test = _words(folder, "train"), _words(folder, "test")
    numbers: dict[str, int] = {}
    for word in train:
        numbers.setdefault(word, len(numbers))
    windows = _windows([numbers[word] for word in train])
    devices = settings.devices or 100
    partition = settings.partition or Natural()
    if isinstance(partition, Classes | Dirichlet):
        raise DataError(
            f"task.partition.kind = {partition.kind!r}: a text has no classes to split it by; "
            "choose natural or iid"
        )
    rows = split(partition, windows.tensors[1].numpy(), devices, settings.seed)
    foreign = next((word for word in test if word not in numbers), None)
    if foreign is not None and "<unk>" not in numbers:
        raise DataError(
            f"{folder}: {foreign!r} of the test text is not in the training text, which has no "
            "<unk> either: use the files of WikiText-2, not of its raw edition"
        )
    known = [numbers[word if word in numbers else "<unk>"] for word in test]
    return Words(lambda: WordModel(len(numbers)), deal(windows, rows), _windows(known))


def _words(folder: Path, part: str) -> list[str]:
    """The words of a part of the text, with ``<eos>`` at the end of each line."""
    names = (f"{part}.txt", f"wiki.{part}.tokens")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"WikiText-2's {names[0]} (or {names[1]}, as it was published) is not in {folder}: "
            "set --data-root or FEDSTREAM_DATA to a folder that contains wikitext-2; fedstream "
            "does not download it"
        )
    lines = read_text(path).removesuffix("\n").split("\n")
    words = [word for line in lines for word in (*line.split(), "<eos>")]
    if len(words) < 2:
        raise DataError(f"{path} is empty: download it again")
    return words


def _windows(text: list[int]) -> TensorDataset:
    """x and y of shape (windows, 35): each word after the first is a target once.

    The last window is padded with word 0 and no target, which is harmless: an LSTM only looks back.
    """
    targets = len(text) - 1
    windows = -(-targets // _STEPS)
    x = torch.zeros(windows * _STEPS, dtype=torch.int64)
    y = torch.full_like(x, IGNORED)
    words = torch.tensor(text)
    x[:targets], y[:targets] = words[:-1], words[1:]
    return TensorDataset(x.view(windows, _STEPS), y.view(windows, _STEPS))
