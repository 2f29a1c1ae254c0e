"""The lease of a training task, on which coordinator and trainers must agree."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedstream.runtime.config import Section


class LeaseSettings(Section):
    """A task's lease, renewed after a quarter of its time; once it expires, others may take over.

    Trainers renew from the event loop while they train in a thread, so the lease need only outlast
    a pause of the process, not the task.
    """

    seconds: Annotated[float, Field(gt=0)] = 15.0
    attempts: Annotated[int, Field(ge=1)] = 3  # deliveries after which a task is poison
