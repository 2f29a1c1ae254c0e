"""Version 0 of a run: drawn from its seed, or an existing model (`run.start`).

A start is ``DIR@VERSION``, a version in a run's journal, ``DIR``, its newest one, or a safetensors
file. Only the model is taken: the strategy's memory begins empty, and control variates with zero.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstream.core.errors import ConfigError
from fedstream.core.layout import OF_INTEGERS, Layout, Model, Tensor
from fedstream.journal import JournalError, newest_version, opened
from fedstream.journal.inspection import model_at
from fedstream.runtime.plugins import NotTrusted
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedstream.trainer.task import Task

_FILE = ".safetensors"
_VERSION = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True)
class StartingPoint:
    """The source of a version 0."""

    path: Path
    version: int | None = None  # None: a file, or the journal's newest version

    @classmethod
    def parsed(cls, text: str) -> StartingPoint:
        """Read ``run.start``; a folder whose own name ends in @NUMBER is that folder."""
        found = _VERSION.fullmatch(text)
        if found is None or Path(text).exists():
            return cls(Path(text))
        return cls(Path(found[1]), int(found[2]))

    @property
    def absolute(self) -> str:
        """The same source with an absolute path, for any working directory."""
        at = "" if self.version is None else f"@{self.version}"
        return f"{self.path.absolute()}{at}"


def first_model(
    task: Task, seed: int, start: str | None, *, controls: bool = False
) -> tuple[Model, str]:
    """Version 0, and its source for the run's record ('' if it was drawn).

    Raises ConfigError if ``start`` cannot be read, or does not fit the task's model.
    """
    from fedstream.trainer.task import initial

    model = initial(task, seed, controls=controls)
    if start is None:
        return model, ""
    where = f"run.start = {start!r} (--from)"
    parsed = StartingPoint.parsed(start)
    if parsed.path.suffix == _FILE:
        said = f"{parsed.path.name} {_load_file(parsed.path, model, where)}"
    else:
        said = _load_version(parsed, model, where)
    if not np.isfinite(model.floats).all():
        raise ConfigError(f"{where}: the model has values that are not finite: choose another one")
    return model, said


def _load_version(start: StartingPoint, into: Model, where: str) -> str:
    """Take over a version from a journal; return its run's name, version and digest."""
    try:
        with opened(start.path) as chain:
            oldest, newest = chain[0].standing.version, newest_version(chain)
            version = newest if start.version is None else start.version
            if not oldest <= version <= newest:
                raise ConfigError(
                    f"{where}: the journal has versions {oldest} to {newest}: choose one of these"
                )
            head = chain[-1].head
            theirs = Layout.decode(head.layout).without_controls()
            _check(
                theirs.tensors,
                into.layout,
                where,
                hint=f" (that run trained the task {head.task!r})",
            )
            found, digest = model_at(chain, version)
    except NotTrusted as error:
        raise ConfigError(
            f"{where}: that run's own strategy is needed to rebuild the version, and loading it "
            "runs its code: if you trust it, write the model to a file, and start from that: "
            f"fedstream journal export {start.path} --version {version} --out FILE{_FILE} "
            "--trust-recorded-code"
        ) from error
    except JournalError as error:
        raise ConfigError(f"{where}: {error}") from error
    into.parameters[:], into.buffers[:] = found.parameters, found.buffers
    into.integers[:] = found.integers
    return f"{head.run}@{version} {digest}"


def _load_file(path: Path, into: Model, where: str) -> str:
    """Take over the tensors of a safetensors file; return the model's digest."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        os.close(open_regular(path))  # of a pipe, the next line would wait for a writer
        found: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error  # safetensors' OSErrors have none
        raise ConfigError(f"{where}: cannot be read: {why}") from error
    layout = into.layout.without_controls()
    theirs = []
    for tensor in layout.tensors:
        if (values := found.get(tensor.name)) is None:
            continue
        dtype = str(values.dtype).removeprefix("torch.")
        theirs.append(Tensor(tensor.name, tuple(values.shape), dtype, tensor.kind))
    _check(theirs, layout, where)
    taken = Model(layout)
    floats, integers = taken.floats, taken.integers
    for tensor in layout.tensors:
        vector: NDArray[np.float32] | NDArray[np.int64]
        if tensor.kind in OF_INTEGERS:
            vector, integers = integers[: tensor.count], integers[tensor.count :]
        else:
            vector, floats = floats[: tensor.count], floats[tensor.count :]
        vector[:] = found[tensor.name].to(torch.from_numpy(vector).dtype).flatten().numpy()
    into.parameters[:], into.buffers[:] = taken.parameters, taken.buffers
    into.integers[:] = taken.integers
    return taken.digest()


def _check(there: Iterable[Tensor], layout: Layout, where: str, *, hint: str = "") -> None:
    """Raise ConfigError, naming the first tensor that differs from the task's model."""
    theirs, ours = ({t.name: t for t in tensors} for tensors in (there, layout.tensors))
    for name, tensor in ours.items():
        if tensor.kind != "control" and theirs.get(name) != tensor:
            has = _described(theirs[name]) if name in theirs else "missing"
            raise ConfigError(
                f"{where} does not fit the task's model{hint}: {name} is {has} there, and "
                f"{_described(tensor)} in the task"
            )
    if more := [name for name in theirs if name not in ours]:
        raise ConfigError(
            f"{where} does not fit the task's model{hint}: it also has {more[0]}, which the task "
            "lacks"
        )


def _described(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a number"
    return f"{shape} {tensor.dtype} ({tensor.kind})"
