"""Journals that tests write: short, of several segments, poisoned, and changed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstream.core.layout import Layout, Model, Tensor
from fedstream.trainer import vector
from fedstream.trainer.descent import solve
from fedstream.trainer.loading import load_task
from fedstream.trainer.partitions import Iid
from fedstream.trainer.solvers import Sgd, Work
from fedstream.trainer.task import TaskSettings, initial
from tests.journals import Scribe
from tests.support import model_of

Command = Callable[..., tuple[int, str, str]]


FIRST, SECOND = "00000001-000000.journal", "00000001-000001.journal"


class By(Scribe):
    """A scribe to whom every model is told: ``coming`` is the next."""

    def __init__(self, folder: Path, coming: Model, **about: Any) -> None:
        self.coming = coming
        super().__init__(folder, layout=coming.layout, **about)

    def drawn(self) -> Model:
        return self.coming.copy()

    def brings(self, device: int, *floats: float, **about: Any) -> None:
        self.coming = model_of(self.layout, *floats)
        self.update(device, **about)


def two_segments(folder: Path, seed: int = 0, **about: Any) -> None:
    """Versions 0 to 6 and 6 to 12, with a refusal in each."""
    scribe = Scribe(folder, seed=seed, **about)
    for _ in range(2):
        for late in range(6):
            scribe.update(late=late % 2)
        scribe.refuse(3)
        if scribe.version == 6:
            scribe.segment()
    scribe.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written(folder: Path, *updates: tuple[int, float], **about: Any) -> Path:
    """A journal of these updates: device and value."""
    scribe = By(
        folder, model_of(Layout((Tensor("w", (2,), "float32", "parameter"),)), 0.0), **about
    )
    for device, value in updates:
        scribe.brings(device, value)
    scribe.close()
    return folder


UPDATES = ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0))


class Digits(By):
    """Devices that learn the digits, one after the other."""

    def __init__(self, folder: Path, **about: Any) -> None:
        self.task = load_task("digits", TaskSettings(partition=Iid()))
        self.module = self.task.model()
        super().__init__(folder, initial(self.task, 0), **about)

    def learns(self, device: int, scale: float = 1.0) -> None:
        """The device trains from the newest model; scaled, it poisons the next."""
        vector.load(self.progress.state.model, self.module)
        work = Work(
            device=device,
            task="t",
            version=self.version,
            seed=self.version,
            steps=10,
            epochs=None,
            solver=Sgd(),
            cancelled=lambda: False,
        )
        solve(self.task, self.module, self.task.device_data(device), work)
        self.coming = Model(self.layout)
        vector.read(self.module, self.coming)
        self.coming.floats *= scale
        self.update(device)
