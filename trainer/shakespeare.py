"""Shakespeare's plays, character by character, as in Anarchic Federated Learning (AFL).

Each device is a speaking role. AFL takes 143 roles and doesn't say which. Here, all roles that are
long enough for training and testing are ranked by length, and one role per device is taken at even
intervals. So the chosen roles vary in length as all roles do, and the choice involves no chance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.broker.errors import DataError
from fedstream.trainer.in_memory import InMemory, data_root, read_text
from fedstream.trainer.splitting import Natural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from fedstream.trainer.task import TaskSettings

# LEAF's 80 symbols; all other characters become blanks
SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_WINDOW = 80
_SHORTEST = 5 * (_WINDOW + 1)  # so that the last fifth, for testing, holds at least one window
_TESTED = 10_000  # windows at most: 4 s of evaluation on two cores, accuracy within .005
_DEVICES = 143


@dataclass(frozen=True)
class Role:
    """Everything that one speaker says in one play, words separated by single blanks."""

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
    roles = chosen(roles_in(folder), settings.devices or _DEVICES)
    shares, tests = [], []
    for role in roles:
        text = _symbols(role.text)
        end = len(text) * 4 // 5
        shares.append(_windows(text[:end]))
        tests.append(_windows(text[end:]))
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


def chosen(roles: Sequence[Role], devices: int) -> list[Role]:
    """The roles chosen as devices by the module's rule, in the order given.

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


def _windows(text: Tensor) -> TensorDataset:
    """Every run of 80 characters, and the character after it, as views of the text."""
    return TensorDataset(text[:-1].unfold(0, _WINDOW, 1), text[_WINDOW:])
