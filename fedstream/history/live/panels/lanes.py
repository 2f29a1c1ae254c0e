"""Who has what: a lane for each trainer or gateway, with its tasks by phase."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from fedstream.history.live.scene import PHASES, Phase, Scene, SeenTask, SeenWorker

LANES = 25  # one by one; the others together
NAMED = 4  # tasks of one phase of a lane, one by one
_SILENT = 0.5  # of the time after which a trainer is struck off


@dataclass(frozen=True)
class LaneTask:
    """A task in a lane."""

    device: int
    seconds: float  # in this phase


@dataclass(frozen=True)
class LanePhase:
    """A lane's tasks in one phase, of which the longest there come first."""

    name: Phase
    count: int
    tasks: tuple[LaneTask, ...]  # at most ``NAMED``


@dataclass(frozen=True)
class Lane:
    """A trainer, a gateway, or nobody in particular."""

    name: str
    kind: str  # trainer, gateway, with no trainer, others, gone
    host: str
    answers: int | None
    owns: int | None  # devices; 0: it serves all that nobody owns
    heard_s: float | None  # since it said something; None: nothing is known, or it signed off
    is_silent: bool  # for long enough to wonder
    phases: tuple[LanePhase, ...]

    @property
    def tasks(self) -> int:
        """In all phases."""
        return sum(phase.count for phase in self.phases)


@dataclass(frozen=True)
class Lanes:
    """The lanes that are shown."""

    lanes: tuple[Lane, ...]
    left_out: int  # workers that are in the lane of the others, or not even known by name
    tasks: int  # known one by one; of more, only the numbers by phase are known
    open: int


def lanes(scene: Scene) -> Lanes:
    """The lanes of a scene: those with most tasks, by name, then the others together.

    A task that nobody has taken is in a lane of its own; so are tasks of a trainer that is gone.
    """
    tasks: dict[str, list[SeenTask]] = defaultdict(list)
    for one in scene.tasks:
        tasks[one.lane].append(one)
    known = {worker.name: worker for worker in scene.workers}
    by_work = sorted(known, key=lambda name: (-len(tasks.get(name, ())), _naturally(name)))
    shown = sorted(by_work[:LANES], key=_naturally)
    found = [_of_worker(known[name], tasks.get(name, []), scene) for name in shown]
    gone = [one for name, own in tasks.items() if name and name not in known for one in own]
    rest = [one for name in by_work[LANES:] for one in tasks.get(name, ())]
    left_out = max(0, scene.tally.trainers - len(shown))
    for name, kind, some in (
        ("with no trainer", "with no trainer", tasks.get("", [])),
        ("not on the register", "gone", gone),
    ):
        if some:
            found.append(Lane(name, kind, "", None, None, None, False, _phases(some, scene.now)))
    if left_out:
        found.append(
            Lane(
                f"{left_out:,} others", "others", "", None, None, None, False,
                _phases(rest, scene.now),
            )
        )  # fmt: skip
    return Lanes(tuple(found), left_out, len(scene.tasks), scene.tally.tasks)


def _naturally(name: str) -> list[tuple[int, str]]:
    """A key by which trainer-9 comes before trainer-10."""
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+|[0-9])", name)
    return [(int(number or -1), text) for number, text in parts]


def _of_worker(worker: SeenWorker, tasks: list[SeenTask], scene: Scene) -> Lane:
    heard = None if worker.heard is None else max(0.0, scene.now - worker.heard)
    limit = _SILENT * scene.settings.coordinator.trainer_silence_s
    return Lane(
        worker.name, "gateway" if worker.is_gateway else "trainer", worker.host, worker.answers,
        worker.owns, heard, heard is not None and heard > limit, _phases(tasks, scene.now),
    )  # fmt: skip


def _phases(tasks: list[SeenTask], now: float) -> tuple[LanePhase, ...]:
    found = []
    for name in PHASES:
        mine = sorted((one for one in tasks if one.phase == name), key=lambda one: one.phase_since)
        named = tuple(LaneTask(one.device, max(0.0, now - one.phase_since)) for one in mine[:NAMED])
        found.append(LanePhase(name, len(mine), named))
    return tuple(found)
