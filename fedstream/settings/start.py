"""Version 0 of a run: drawn from its seed, or an existing model (`run.start`).

A start is ``DIR@VERSION``, a version in a run's journal, ``DIR``, its newest one, or a safetensors
file. Only the model is taken: the strategy's memory begins empty, and control variates with zero.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstream.core.errors import ConfigError
from fedstream.core.layout import OF_INTEGERS, Floats, Integers, Layout, Model, Tensor
from fedstream.journal import JournalError, newest_version, opened
from fedstream.journal.inspection import model_at
from fedstream.runtime.plugins import NotTrusted
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:
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
        model = _of_file(parsed.path, task, model, where)
        said = f"{parsed.path.name} {_digest(model)}"
    else:
        model, said = _of_version(parsed, model, where)
    frozen = model.layout.unshared.model().floats if model.layout.unshared else ()
    if not (np.isfinite(model.floats).all() and np.isfinite(frozen).all()):
        raise ConfigError(f"{where}: the model has values that are not finite: choose another one")
    return model, said


def _of_version(start: StartingPoint, ours: Model, where: str) -> tuple[Model, str]:
    """A journal's version as a model like ``ours``; and its run's name, version and digest."""
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
            hint = f" (that run trained the task {head.task!r})"
            _check(theirs.whole, ours.layout, where, hint=hint)
            found, digest = model_at(chain, version)
            values = _flat(found)
    except NotTrusted as error:
        raise ConfigError(
            f"{where}: that run's own strategy is needed to rebuild the version, and loading it "
            "runs its code: if you trust it, write the model to a file, and start from that: "
            f"fedstream journal export {start.path} --version {version} --out FILE{_FILE} "
            "--trust-recorded-code"
        ) from error
    except JournalError as error:
        raise ConfigError(f"{where}: {error}") from error
    return _filled(ours, values), f"{head.run}@{version} {digest}"


def _of_file(path: Path, task: Task, ours: Model, where: str) -> Model:
    """The tensors of a safetensors file as a model like ``ours``."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        os.close(open_regular(path))  # of a pipe, the next line would wait for a writer
        found: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error  # safetensors' OSErrors have none
        raise ConfigError(f"{where}: cannot be read: {why}") from error
    theirs, values = [], {}
    for tensor in ours.layout.without_controls().whole:
        if (one := found.get(tensor.name)) is None:
            continue
        dtype = str(one.dtype).removeprefix("torch.")
        theirs.append(Tensor(tensor.name, tuple(one.shape), dtype, tensor.kind))
        is_integer = tensor.kind in OF_INTEGERS
        flat = one.to(torch.int64 if is_integer else torch.float32).flatten().numpy()
        values[tensor.name] = flat
    _check(theirs, ours.layout, where)
    if more := [name for name in found if name not in values]:
        with torch.random.fork_rng(devices=[]):
            named = task.model().state_dict()  # with every name of a tied tensor
        if foreign := [name for name in more if name not in named]:
            raise _foreign(f"{where} does not fit the task's model", foreign[0])
    return _filled(ours, values)


def _digest(model: Model) -> str:
    """The digest of a model without its controls."""
    plain = Model(model.layout.without_controls())
    plain.parameters[:], plain.buffers[:] = model.parameters, model.buffers
    plain.integers[:] = model.integers
    return plain.digest()


def _flat(model: Model) -> dict[str, Floats | Integers]:
    """A model's tensors as flat vectors, by name, with the unshared ones."""
    models = [model] if model.layout.unshared is None else [model, model.layout.unshared.model()]
    return {tensor.name: values for one in models for tensor, values in one.flat()}


def _filled(ours: Model, values: Mapping[str, Floats | Integers]) -> Model:
    """A model like ``ours`` with these values; the controls stay."""
    layout, unshared = ours.layout, ours.layout.unshared
    if unshared is not None:
        frozen = Model(unshared.layout)
        for tensor, vector in frozen.flat():
            vector[:] = values[tensor.name]
        whole = replace(unshared, digest=frozen.digest(), values=frozen.itself)
        layout = replace(layout, unshared=whole)
    model = Model(layout, ours.buffer)
    for tensor, vector in model.flat():
        vector[:] = values[tensor.name]
    return model


def _check(there: Iterable[Tensor], layout: Layout, where: str, *, hint: str = "") -> None:
    """Raise ConfigError, naming the first tensor that differs from the task's model."""
    theirs, ours = ({t.name: t for t in tensors} for tensors in (there, layout.whole))
    for name, tensor in ours.items():
        if tensor.kind != "control" and theirs.get(name) != tensor:
            has = _described(theirs[name]) if name in theirs else "missing"
            raise ConfigError(
                f"{where} does not fit the task's model{hint}: {name} is {has} there, and "
                f"{_described(tensor)} in the task"
            )
    if more := [name for name in theirs if name not in ours]:
        raise _foreign(f"{where} does not fit the task's model{hint}", more[0])


def _foreign(what: str, name: str) -> ConfigError:
    return ConfigError(f"{what}: it also has {name}, which the task lacks")


def _described(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a number"
    return f"{shape} {tensor.dtype} ({tensor.kind})"
