"""Texts: Shakespeare's plays by characters (AFL), and WikiText-2 by words (FedAsync).

Each of Shakespeare's devices is a speaking role. AFL takes 143 roles and doesn't say which. Here,
all roles that are long enough for training and testing are ranked by length, and one role per
device is taken at even intervals. So the chosen roles vary in length as all roles do, and the
choice involves no chance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.in_memory import InMemory, data_root, deal, read_text
from fedstream.trainer.partitions import Classes, Dirichlet, Natural, split
from fedstream.trainer.task import IGNORED, examples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.utils.data import Dataset

    from fedstream.trainer.task import TaskSettings

# LEAF's 80 symbols; all other characters become blanks
SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_WINDOW = 80
_SHORTEST = 5 * (_WINDOW + 1)  # so that the last fifth, for testing, holds at least one window
_TESTED = 10_000  # windows at most: 4 s of evaluation on two cores, accuracy within .005
_DEVICES = 143


@dataclass(frozen=True)
class Role:
    """The text of one speaker in one play, with words separated by single blanks."""

    play: str
    speaker: str
    text: str


class CharacterModel(nn.Module):
    """AFL's network (appendix E.1), which is LEAF's: (batch, 80) to scores of shape (batch, 80).

    Embeddings of size 8, two LSTM layers of 100, and a dense layer on the last state: 133,520
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(SYMBOLS), 8)
        self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.scores = nn.Linear(100, len(SYMBOLS))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.scores(states[:, -1])
        return scores


def shakespeare(settings: TaskSettings) -> InMemory:
    """Predict the next character from the last 80: x of shape (80,), y a symbol's number.

    The first four fifths of a role are for training and the rest for testing; no window crosses
    that border. The test data is at most 10,000 evenly spaced windows from all devices' test parts.

    Raises DataError if there are no plays, too few roles, or the partition is not ``natural``.
    """
    partition = settings.partition or Natural()
    if not isinstance(partition, Natural):
        raise DataError(
            f"task.partition.kind = {partition.kind!r}: in shakespeare a device is a speaking "
            "role; leave out the partition, or choose natural"
        )
    folder = data_root("shakespeare", settings) / "shakespeare" / "plays"
    roles = pick_roles(roles_in(folder), settings.devices or _DEVICES)
    shares, tests = [], []
    for role in roles:
        text = _symbols(role.text)
        end = len(text) * 4 // 5
        shares.append(_character_windows(text[:end]))
        tests.append(_character_windows(text[end:]))
    total = sum(len(test) for test in tests)
    rows = torch.arange(min(total, _TESTED)) * total // min(total, _TESTED)
    x, y = (torch.cat(parts) for parts in zip(*(test.tensors for test in tests), strict=True))
    return InMemory(CharacterModel, shares, TensorDataset(x[rows], y[rows]))


def roles_in(folder: Path) -> list[Role]:
    """Every role in a folder of plays, sorted by play and speaker.

    Raises DataError if there are no plays. A play is a text file ``play.txt`` of lines
    ``SPEAKER<TAB>what is said``, continued by lines ``<TAB>what is said``. Speech starts after the
    first heading ``ACT``, ``<TAB>PROLOGUE`` or ``<TAB>INDUCTION``.
    """
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(
            f"no plays (.txt files) in {folder}: set --data-root or FEDSTREAM_DATA to a folder "
            "that contains shakespeare/plays; fedstream does not download them"
        )
    return [
        Role(path.stem, speaker, text)
        for path in paths
        for speaker, text in sorted(_speakers(read_text(path)).items())
    ]


def pick_roles(roles: Sequence[Role], devices: int) -> list[Role]:
    """Pick a role per device by the module's rule, keeping their order.

    Raises DataError if there are fewer sufficiently long roles than devices.
    """
    ranked = sorted(
        (number for number, role in enumerate(roles) if len(role.text) >= _SHORTEST),
        key=lambda number: -len(roles[number].text),
    )
    if devices > len(ranked):
        raise DataError(
            f"task.devices = {devices}, but {len(ranked)} of the plays' {len(roles)} roles have "
            f"the {_SHORTEST} characters that a device needs: use fewer devices"
        )
    middles = ((2 * i + 1) * len(ranked) // (2 * devices) for i in range(devices))
    return [roles[number] for number in sorted(ranked[middle] for middle in middles)]


_BEGIN = re.compile(r"ACT\b|\t(?:PROLOGUE|INDUCTION)\b")
_HEADING = re.compile(r"(?:ACT|SCENE)\b|\t(?:PROLOGUE|INDUCTION|EPILOGUE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")  # may span several lines


def _speakers(play: str) -> dict[str, str]:
    """The text of each speaker, without stage directions and repetitions of the play's title.

    A speaker's name may begin on a line of its own, without a tab.
    """
    said: defaultdict[str, list[str]] = defaultdict(list)
    title = play.strip().partition("\n")[0].strip()
    begun, speaker, broken = False, "", ""
    for line in _DIRECTION.sub("", play).split("\n"):
        begun = begun or _BEGIN.match(line) is not None
        if not begun or line.strip() == title:
            continue
        if _HEADING.match(line):
            speaker = broken = ""
            continue
        head, tab, words = line.partition("\t")
        if not tab:  # a name that continues on the next line; or a blank line, which ends it
            broken = head.strip()
            continue
        if head.strip():
            speaker = f"{broken} {head.strip()}".strip()
        broken = ""
        if speaker:
            said[speaker] += words.split()
    return {speaker: " ".join(words) for speaker, words in said.items()}


def _symbols(text: str) -> Tensor:
    """The symbol numbers of a text's characters."""
    table = np.full(128, SYMBOLS.index(" "))
    table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return torch.from_numpy(table[np.minimum(codes, 127)])  # 127 is not a symbol either


def _character_windows(text: Tensor) -> TensorDataset:
    """Every run of 80 characters, and the character after it, as views of the text."""
    return TensorDataset(text[:-1].unfold(0, _WINDOW, 1), text[_WINDOW:])


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
                x, y = examples(model, self.gather(data, rows))
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
    windows = _word_windows([numbers[word] for word in train])
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
    return Words(lambda: WordModel(len(numbers)), deal(windows, rows), _word_windows(known))


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


def _word_windows(text: list[int]) -> TensorDataset:
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
