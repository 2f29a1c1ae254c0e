"""The lease of a training task: what coordinator and trainers must agree on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedstream.runtime.config import Section


class LeaseSettings(Section):
    """A lease is renewed at a quarter of its time; when it runs out, another trainer may have it.

    Trainers renew from the event loop while they train in a thread, so the lease need not cover a
    task's duration, only a pause of the process.
    """

    seconds: Annotated[float, Field(gt=0)] = 15.0
    attempts: Annotated[int, Field(ge=1)] = 3  # deliveries after which a task is poison
