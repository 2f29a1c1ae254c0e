"""The end of a local run, and notices for its user.

Pure functions of an observer's view of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstream.coordinator.cooldowns import most_refused, no_device_works
from fedstream.core.messages import POOL, Event
from fedstream.core.records import Tally
from fedstream.history.display import failing
from fedstream.history.timeline import History
from fedstream.runtime.process import INTERRUPTED

_MEASURED_WITHIN_S = 120.0  # time limit for evaluating the last version


@dataclass(frozen=True)
class Ending:
    """The end of a run."""

    state: Literal["finished", "interrupted", "failed"]
    why: str
    note: str = ""  # further information for the user

    @property
    def code(self) -> int:
        """Exit code."""
        return {"finished": 0, "interrupted": INTERRUPTED, "failed": 1}[self.state]


def ending(
    history: History,
    view: Tally | None,
    *,
    tested: bool,
    finished_s: float,
    on_devices_s: float | None = None,
) -> Ending | None:
    """The end of the run; None while it continues.

    ``tested``: the task has test data, so the last version is measured. ``finished_s``: seconds
    since the run was first seen finished. ``on_devices_s``: time limit of evaluations on the
    devices; None: there are none.
    """
    if view is None:
        return None
    tried = len(history.failed_devices - view.head.quarantines.by_device.keys())
    if why := no_device_works(history.failed, tried, view.askable):
        return Ending("failed", f"{why}: {_last_error(history.errors)}")
    # Counted in the pool only: a site must not end the operator's run.
    if history.refused >= most_refused(refused := view.reasons("refused"), view.run.devices):
        why = f"{history.refused} updates in a row were refused ({', '.join(refused)})"
        return Ending("failed", f"{why}: the model can't make progress")
    if view.run.state != "finished":
        return None
    why = view.run.why or ""
    is_tried = view.head.version == history.tried
    if is_tried and history.unmeasured is not None:
        failure = _last_line(history.unmeasured)
        return Ending("failed", f"{why}, but it could not be measured: {failure}")
    is_tried = is_tried or not tested
    lacks_devices = on_devices_s is not None and history.devices_tried != view.head.version
    if is_tried and not lacks_devices:
        return Ending("finished", why)
    # An evaluation of an earlier version may have to end before that of the last one.
    within_s = _MEASURED_WITHIN_S + 2 * (on_devices_s or 0.0)
    if finished_s > within_s:
        where = " on the devices" if is_tried else ""
        late = f"the last version was not measured{where} within {within_s:.0f} s"
        return Ending("finished", why, late)
    return None


def notices(history: History, view: Tally | None, out: Path) -> Iterator[tuple[str, str]]:
    """Notices for the user: a key and a line each; each key is shown only once.

    ``out``: the output folder.
    """
    for kind, event in history.errors.items():
        yield f"error {kind}", _raised(event)
    yield from history.notices(journal=True)
    if view is None:
        return
    if history.disk_full:
        yield "full", f"{out}: the disk is full: the updater is waiting for space"
    if view.failing:  # told again when twice as many fail
        asked = "it is" if len(view.failing) == 1 else "they are"
        text = f"{failing(view.failing_devices)}: {asked} asked less often"
        yield f"failing {len(view.failing).bit_length()}", text
    for reason in view.reasons("refused"):
        yield (
            f"refused {reason}",
            f"updates are being refused: {reason} (for counts, see fedstream status)",
        )
    for reason in view.reasons("dead"):
        yield f"dead {reason}", f"a task is dead: it {reason} (for counts, see fedstream status)"


def _raised(event: Event) -> str:
    what = "the test data" if event.device is None else f"device {event.device}"
    where = f"{what} at version {event.version} ({event.service})"
    return f"the task raised on {where}:\n{(event.text or '').rstrip()}"


def _last_error(errors: Mapping[tuple[str, str], Event]) -> str:
    ours = [event for (site, _), event in errors.items() if site == POOL]
    return _last_line(ours[-1]) if ours else "they killed their trainers"


def _last_line(event: Event) -> str:
    """Last line of an error's traceback."""
    text = (event.text or "").strip()
    return text.splitlines()[-1] if text else "see the logs"
