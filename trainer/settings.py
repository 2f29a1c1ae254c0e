"""The tables ``[trainer]`` and ``[trainer.anarchic]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fedstream.broker.keys import check_name
from fedstream.core.errors import ConfigError
from fedstream.core.messages import OWNED, POOL
from fedstream.runtime.config import Section
from fedstream.runtime.task_settings import Epochs, Steps
from fedstream.trainer.data import Processor, Threads


class InitiativeSettings(Section):
    """An anarchic trainer's own decisions: when to take part, with how many steps."""

    rate: Annotated[float, Field(gt=0)] = 1.0  # triggers per second while idle
    steps: Steps = Epochs()


class TrainerSettings(Section):
    """The devices that a trainer serves, and the resources that it may use."""

    site: str = POOL  # trainers of one site trust each other: they share a Redis user
    # Device numbers; (): a replica of the pool.
    owns: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=OWNED)] = ()
    anarchic: InitiativeSettings | None = None
    threads: Threads = 1  # of torch
    device: Processor = "cpu"  # of torch; updates are float32 either way
    blob_expiry_s: Annotated[float, Field(gt=0)] = 600.0  # of an update that is never admitted
    workspace_bytes: Annotated[int, Field(ge=0)] = 64 << 20  # larger workspaces are not saved
    workspace_expiry_s: Annotated[float, Field(gt=0)] = 3600.0
    # Memory for error feedback of owned devices; beyond it, the oldest is dropped.
    feedback_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    # The local tensors (Task.local) of all devices that this trainer may serve.
    local_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    local_dir: str | None = None  # folder for them; None: in Redis, for a day after each task
    # The trainer exits after a longer outage of Redis; None: it waits forever.
    redis_away_s: Annotated[float, Field(gt=0)] | None = None
    ends_with_run: bool | None = None  # True: exit with the run; else wait idle
    drain_s: Annotated[float, Field(gt=0)] = 20.0

    @model_validator(mode="after")
    def _site_owns(self) -> TrainerSettings:
        try:
            check_name("trainer.site", self.site)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.site != POOL and not self.owns:
            raise ValueError(
                f"trainer.site = {self.site!r} needs trainer.owns: only the site {POOL!r} serves "
                "devices that nobody owns"
            )
        return self
