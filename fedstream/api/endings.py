"""How a run ends that is not finished: exceptions that carry what there is of it."""

from __future__ import annotations

from fedstream.core.errors import FedstreamError
from fedstream.history.record import RunRecord


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a notebook's stop button ended the run; its services stopped in order."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__(f"interrupted: the results so far are fedstream.open({str(run.path)!r})")
        self.run = run
        """the run so far"""


class RunFailed(FedstreamError):
    """The run could not continue; the message says why."""

    def __init__(self, why: str, run: RunRecord) -> None:
        super().__init__(f"{why} (what there is of the run: {run.path})")
        self.run = run
        """the run so far"""
