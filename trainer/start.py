"""Where training starts: at a version, or where an interrupted task stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedstream.broker.layout import Floats, Layout, Model
    from fedstream.trainer.workspace import Workspace


@dataclass(frozen=True)
class Start:
    """Where training starts or resumes."""

    version: int  # tau
    digest: str  # of x_tau, as it was given
    model: Model  # x_tau
    device_control: Floats | None = None  # c_i
    saved: Workspace | None = None

    @classmethod
    def resumed(cls, saved: Workspace, layout: Layout) -> Start:
        """Where an interrupted task stopped; ``layout`` is that of its models."""
        _, x_tau = saved.models(layout)
        return cls(saved.version, saved.base, x_tau, saved.device_control, saved)
