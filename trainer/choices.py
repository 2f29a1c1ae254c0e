"""Per-device solvers.

Anarchic Federated Learning, section 3: 'each worker is able to completely take control of its own
optimization process'. The configuration (``solvers``) gives groups of devices a solver of their
own, and :meth:`fedstream.trainer.task.Task.solver_of` any single device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedstream.runtime.config import Section
from fedstream.trainer.compression import Compression
from fedstream.trainer.solvers import DriftCorrected, Proximal, Sgd, SolverSettings

if TYPE_CHECKING:
    from fedstream.trainer.task import Task

_SETTINGS: TypeAdapter[SolverSettings] = TypeAdapter(SolverSettings)
_KINDS: dict[str, type[Sgd]] = {"sgd": Sgd, "proximal": Proximal, "scaffold": DriftCorrected}


class SolverGroup(Section):
    """The solver of some devices; keys left out are taken from ``solver``."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    kind: Literal["sgd", "proximal", "scaffold"] | None = None
    lr: float | None = None
    batch_size: int | None = None
    sampling: Literal["passes", "fresh"] | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    rho: float | None = None
    compression: Compression | None = None

    def of(self, usual: SolverSettings) -> SolverSettings:
        """The usual solver with these devices' changes. Raises ValidationError."""
        kind = self.kind or usual.kind
        known = _KINDS[kind].model_fields
        given = self.model_dump(exclude_none=True, exclude={"devices"})
        kept = {key: value for key, value in usual.model_dump().items() if key in known}
        return _SETTINGS.validate_python(kept | given | {"kind": kind})


class Solvers:
    """Every device's solver."""

    def __init__(self, usual: SolverSettings, groups: Sequence[SolverGroup] = ()) -> None:
        """Raises ValueError if a group's solver is invalid, or a device is in two groups."""
        self.usual = usual
        self.others: dict[int, SolverSettings] = {}
        for n, group in enumerate(groups):
            try:
                solver = group.of(usual)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(str(part) for part in first["loc"][1:])
                raise ValueError(f"solvers[{n}].{key}: {first['msg']}") from error
            for device in group.devices:
                if device in self.others:
                    raise ValueError(f"solvers[{n}].devices: device {device} is listed twice")
                self.others[device] = solver

    def __getitem__(self, device: int) -> SolverSettings:
        return self.others.get(device, self.usual)


def chosen(task: Task, device: int, solvers: Solvers) -> SolverSettings:
    """The solver that a device trains with. Raises TypeError if the task returns anything else."""
    solver = task.solver_of(device, solvers[device])
    if not isinstance(solver, Sgd):
        raise TypeError(
            f"solver_of() must return the settings of a solver, not {type(solver).__name__}; "
            "for example solver.model_copy(update={'lr': 0.1})"
        )
    return solver
