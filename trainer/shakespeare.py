"""Shakespeare's plays, character by character, as in the experiments of Anarchic Federated Learning
(AFL): a device is a speaking role.

AFL takes 143 roles and doesn't say which. Here, of all roles that are long enough to learn from and
to be tested on, ranked by length, as many as there are devices are taken at even distances in that
ranking. So they are as unequal as all are, and none of it depends on chance.
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
from fedstream.trainer.task import Natural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from fedstream.trainer.task import TaskSettings

# LEAF's 80 symbols; other characters count as blanks
SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_WINDOW = 80
_SHORTEST = 5 * (_WINDOW + 1)  # the last fifth, which is for testing, then holds a window
_TESTED = 10_000  # windows at most: 4 s of evaluation on two cores, accuracy to .005
_DEVICES = 143


@dataclass(frozen=True)
class Role:
    """Everything that one speaker says in one play, with single blanks between words."""

    play: str
    speaker: str
    text: str


class CharacterModel(nn.Module):
    """AFL's network (appendix E.1), which is LEAF's: (batch, 80) to scores of shape (batch, 80).

    Character vectors of 8, two LSTM layers of 100, dense on the last state: 133,520 parameters.
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
    """The next character after 80: x of shape (80,), y a number, for every place in a role's text.

    The first four fifths of a role are for training, the rest for testing, and no window reaches
    over. The test data is every k-th window of all devices' rests, 10,000 at most.

    Raises DataError if there are no plays, too few roles, or another partition is asked for.
    """
    partition = settings.partition or Natural()
    if not isinstance(partition, Natural):
        raise DataError(
            f"task.partition.kind = {partition.kind!r}: in shakespeare a device is a "
            f"speaking role; leave the partition out, or take natural"
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
    """Every role of the plays in a folder, by play and speaker. Raises DataError without plays.

    A play is a text file ``play.txt`` of lines ``SPEAKER<TAB>what is said``, and ``<TAB>what is
    said`` to go on. Nobody speaks before the first heading ``ACT``, ``<TAB>PROLOGUE`` or
    ``<TAB>INDUCTION``.
    """
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(
            f"no play, a .txt file, is in {folder}: point --data-root or FEDSTREAM_DATA to a "
            f"folder with shakespeare/plays in it; they are not downloaded"
        )
    return [
        Role(path.stem, speaker, text)
        for path in paths
        for speaker, text in sorted(_speakers(read_text(path)).items())
    ]


def chosen(roles: Sequence[Role], devices: int) -> list[Role]:
    """The roles that are devices, in the order given: the module says by which rule.

    Raises DataError if there are fewer roles of the length that is needed.
    """
    ranked = sorted(
        (number for number, role in enumerate(roles) if len(role.text) >= _SHORTEST),
        key=lambda number: -len(roles[number].text),
    )
    if devices > len(ranked):
        raise DataError(
            f"task.devices = {devices}, but {len(ranked)} of the plays' {len(roles)} roles have "
            f"the {_SHORTEST} characters that a device needs: take fewer devices"
        )
    middles = ((2 * i + 1) * len(ranked) // (2 * devices) for i in range(devices))
    return [roles[number] for number in sorted(ranked[middle] for middle in middles)]


_BEGIN = re.compile(r"ACT\b|\t(?:PROLOGUE|INDUCTION)\b")
_HEADING = re.compile(r"(?:ACT|SCENE)\b|\t(?:PROLOGUE|INDUCTION|EPILOGUE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")  # may go over several lines


def _speakers(play: str) -> dict[str, str]:
    """What each speaker says, stage directions and the play's title, which is repeated, left out.

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
        if not tab:  # a name that goes on in the next line; or a blank line, which ends it
            broken = head.strip()
            continue
        if head.strip():
            speaker = f"{broken} {head.strip()}".strip()
        broken = ""
        if speaker:
            said[speaker] += words.split()
    return {speaker: " ".join(words) for speaker, words in said.items()}


def _symbols(text: str) -> Tensor:
    """The numbers of a text's characters among the symbols."""
    table = np.full(128, SYMBOLS.index(" "))
    table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return torch.from_numpy(table[np.minimum(codes, 127)])  # 127 is no symbol either


def _windows(text: Tensor) -> TensorDataset:
    """Every 80 characters that follow each other, and the next: views of the text."""
    return TensorDataset(text[:-1].unfold(0, _WINDOW, 1), text[_WINDOW:])
