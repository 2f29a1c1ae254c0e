"""Models of a journal as torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstream.core.layout import Layout, Model
from fedstream.journal import NotRecorded, Taken, opened
from fedstream.journal.errors import ONLY_SUMS
from fedstream.journal.inspection import model_at
from fedstream.journal.rebuild import recorded
from fedstream.journal.records import is_used
from fedstream.journal.updates import update_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def state_dict(model: Model) -> dict[str, Tensor]:
    """A model's tensors by name, with the shapes and dtypes of the task's module.

    Tied tensors appear once, under the first of their names.
    """
    import torch

    values = model.tensors()
    return {
        one.name: torch.tensor(values[one.name], dtype=getattr(torch, one.dtype))
        for one in model.layout.without_controls().whole
    }


def version(journal: Path, number: int) -> dict[str, Tensor]:
    """A version's state_dict, rebuilt from the nearest checkpoint. Raises JournalError."""
    with opened(journal) as chain:
        return state_dict(model_at(chain, number)[0])


def x_tau(journal: Path, at: tuple[str, int]) -> dict[str, Tensor]:
    """The model that an update was trained from. Raises JournalError."""
    entry, _, _ = _sent(journal, at, payload=False)
    return state_dict(_base(journal, entry))


def delta(journal: Path, at: tuple[str, int]) -> dict[str, Tensor]:
    """x_new - x_tau of an update's parameters, in float32. Raises JournalError.

    A delta is returned as sent; x_tau is subtracted from a model.
    """
    import torch

    entry, layout, update = _sent(journal, at, payload=True)
    if entry.upload.sends == "model":
        update.parameters[:] -= _base(journal, entry).parameters
    parameters = [one for one in layout.tensors if one.kind == "parameter"]
    parts = torch.split(torch.from_numpy(update.parameters), [one.count for one in parameters])
    return {one.name: part.reshape(one.shape) for one, part in zip(parameters, parts, strict=True)}


def _sent(journal: Path, at: tuple[str, int], *, payload: bool) -> tuple[Taken, Layout, Model]:
    """An update's record, the model's layout, and the sent model or delta, if asked for."""
    with opened(journal) as chain:
        name, offset = at
        segment = next(one for one in chain if one.path.name == name)
        record = segment.at(offset)
        entry = record.entry
        if not isinstance(entry, Taken):
            raise NotRecorded(f"{record.place.where}: is not an update")
        update = Model(segment.layout)
        if payload:
            if not is_used(entry):
                raise NotRecorded(
                    f"{record.place.where}: the bytes of updates that were {entry.outcome} are "
                    "not kept"
                )
            if not record.payload_bytes:
                recorded(record, None)
            if segment.head.masked:
                raise NotRecorded(f"{record.place.where}: {ONLY_SUMS}")
            update_of(segment, record, update)
        return entry, segment.layout, update


def _base(journal: Path, entry: Taken) -> Model:
    """x_tau. Raises NotRecorded if the journal's version tau is another model."""
    with opened(journal) as chain:
        model, digest = model_at(chain, entry.upload.tau)
    if digest != entry.upload.base:
        raise NotRecorded(
            f"{journal}: its version {entry.upload.tau} is not the model from which task "
            f"{entry.upload.task} was trained"
        )
    return model
