"""Per-device solvers.

Anarchic Federated Learning, section 3: 'each worker is able to completely take control of its own
optimization process'. The configuration (``solvers``) gives groups of devices a solver of their
own, and :meth:`fedstream.trainer.task.Task.solver_of` any single device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema

from fedstream.broker.errors import ConfigError
from fedstream.runtime.alternatives import OneOf
from fedstream.runtime.config import Section, check
from fedstream.trainer.solvers import SOLVERS, Solver, SolverSettings

if TYPE_CHECKING:
    from fedstream.trainer.task import Task


class SolverGroup(Section):
    """The solver of some devices; keys left out are taken from ``solver``.

    Which other keys there are depends on the solver, so they are checked by :meth:`of`.
    """

    model_config = ConfigDict(extra="allow")

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    kind: str | None = None

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str | None) -> str | None:
        if kind is None:
            return None
        try:
            return SOLVERS.find(kind).name
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def of(self, usual: SolverSettings, at: str = "solvers") -> SolverSettings:
        """The usual solver with these devices' changes. Raises ConfigError; ``at`` is our place."""
        kind = self.kind or usual.kind
        model = type(usual) if kind == usual.kind else SOLVERS.find(kind).value
        given = self.model_dump(mode="json", exclude_none=True, exclude={"devices"})
        known = model.model_fields
        kept = {key: v for key, v in usual.model_dump(mode="json").items() if key in known}
        return check(model, kept | given | {"kind": kind}, at)


@dataclass(frozen=True)
class _Group(OneOf):
    """Annotation of a group, which only changes a solver: so that a recording's is not trusted."""

    def __get_pydantic_core_schema__(
        self, base: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler(base)

    def models(self, *_tags: object, recorded: bool = False) -> list[type[BaseModel]]:
        """The group itself: which keys it has is checked when the solver is known."""
        return [SolverGroup]


SolverGroups: TypeAlias = tuple[Annotated[SolverGroup, _Group(SOLVERS)], ...]


class Solvers:
    """Every device's solver."""

    def __init__(self, usual: SolverSettings, groups: Sequence[SolverGroup] = ()) -> None:
        """Raises ValueError if a group's solver is invalid, or a device is in two groups."""
        self.usual = usual
        self.others: dict[int, SolverSettings] = {}
        for n, group in enumerate(groups):
            try:
                solver = group.of(usual, f"solvers[{n}]")
            except ConfigError as error:
                raise ValueError(str(error)) from error
            for device in group.devices:
                if device in self.others:
                    raise ValueError(f"solvers[{n}].devices: device {device} is listed twice")
                self.others[device] = solver

    def __getitem__(self, device: int) -> SolverSettings:
        return self.others.get(device, self.usual)


def chosen(task: Task, device: int, solvers: Solvers) -> SolverSettings:
    """The solver that a device trains with. Raises TypeError if the task returns anything else."""
    solver = task.solver_of(device, solvers[device])
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver_of() must return the settings of a solver, not {type(solver).__name__}; "
            "for example solver.model_copy(update={'lr': 0.1})"
        )
    return solver
