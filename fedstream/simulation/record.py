"""The journal of a simulated run, like the updater's but with virtual times."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedstream.coordinator.rounds import Rounds
from fedstream.core.messages import DevicesEvaluated, Outcome, StepProposed, Upload
from fedstream.journal import EvaluationEnded, RoundClosed, SegmentHead, StepScaled, Taken, Writer
from fedstream.journal.rebuild import standing_of
from fedstream.journal.records import (
    DROPPED_ROUNDS,
    EVALUATIONS,
    STEP_SCALES,
    UNSHARED,
    WIRE_FORMATS,
)
from fedstream.settings.plugin_sources import part_sources
from fedstream.strategies import sources_of

if TYPE_CHECKING:
    from pathlib import Path

    from fedstream.core.layout import Payload
    from fedstream.journal.progress import Progress, Step
    from fedstream.journal.records import Counted
    from fedstream.settings.config import Settings
    from fedstream.simulation.arrivals import RoundOver
    from fedstream.trainer.goals import Goals


@dataclass(frozen=True, slots=True)
class Happened:
    """Facts about an entry that only the simulation knows."""

    n: int  # number of the entry in the run
    time: float
    digest: str | None  # of the version it made, if any
    given: str | None  # digest of the published model, if encoded
    finished: str | None  # why the run ended with it, if it did


class SimulationRecorder:
    """Writer of a journal: one segment, with a record for every update and end of a round."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        devices: int,
        progress: Progress,
        digest: str,
        start: str,
        goal: Goals,
        lineage: str,
    ) -> None:
        """Begin the journal. Raises JournalError; Fenced if there is one already.

        ``digest``: of version 0. ``start``: its source. ``goal``: of metrics. ``lineage``: the
        run's id. All are for the segment's head.
        """
        self._settings = settings.journal
        needs = [] if settings.wire.of_updates.is_plain else [WIRE_FORMATS]
        if isinstance(settings.policy, Rounds) and settings.policy.too_few == "drop":
            needs.append(DROPPED_ROUNDS)
        if progress.state.model.layout.unshared is not None:
            needs.append(UNSHARED)
        if settings.evaluator.on_devices is not None:
            needs.append(EVALUATIONS)
        if settings.strategy.adapt is not None:
            needs.append(STEP_SCALES)
        head = SegmentHead(
            needs=tuple(sorted(needs)),
            epoch=1,
            number=0,
            lineage=lineage,
            run=settings.run.name,
            task=settings.task.name,
            devices=devices,
            versions=settings.run.versions,
            seed=settings.run.seed,
            created=0.0,
            strategy=settings.rule.model_dump(mode="json"),
            layout=progress.state.model.layout.encode(),
            release=f"numpy {np.__version__}, {platform.machine()}, simulated",
            time=time.time(),
            start=start,
            goal=dict(goal) or None,
            stop_metric=settings.run.stop_metric,
            sources=sources_of(settings.rule),
            parts=part_sources(settings),
            format=settings.wire.of_models.name,
        )
        standing, models = standing_of(progress, "begun", digest=digest, time=0.0)
        self._writer = Writer(folder, head, standing, *models)

    def taken(
        self, upload: Upload, sent: Payload, step: Step, about: Happened, sizes: Counted
    ) -> None:
        """Record a used update. ``sent``: its received bytes."""
        decision = step.decision
        if decision is None or decision.outcome == "dropped":
            raise RuntimeError("an update that was not used")
        self._add(
            upload,
            about,
            decision.outcome,
            decision.staleness,
            step.after.state.version,
            weight=decision.weight,
            payload=(sent,) if self._settings.weights else (),
            sizes=sizes,
        )

    def refused(
        self, upload: Upload, reason: str, version: int, about: Happened, sizes: Counted
    ) -> None:
        """Record a refused update."""
        late = version - upload.tau
        self._add(upload, about, "refused", late, version, reason=reason, sizes=sizes)

    def _add(
        self,
        upload: Upload,
        about: Happened,
        outcome: Outcome,
        staleness: int,
        version: int,
        *,
        reason: str = "",
        weight: float = 0.0,
        payload: tuple[Payload, ...] = (),
        sizes: Counted = (),
    ) -> None:
        record = Taken(
            entry=f"{about.n}-0",
            upload=upload,
            outcome=outcome,
            reason=reason,
            staleness=staleness,
            weight=weight,
            version=version,
            digest=about.digest,
            given=about.given,
            time=about.time,
            received=about.time,
            finished=about.finished,
            sizes=sizes,
        )
        self._writer.append(record, *payload)

    def round_over(
        self, over: RoundOver, round_: int, version: int, about: Happened, dropped: int
    ) -> None:
        """Record the end of the round based on ``round_``; ``dropped``: the number of updates."""
        record = RoundClosed(
            entry=f"{about.n}-0",
            round=round_,
            why=over.why,
            version=version,
            digest=about.digest,
            dropped=dropped,
            given=about.given,
            time=about.time,
            received=about.time,
            finished=about.finished,
        )
        self._writer.append(record)

    def evaluated(self, ended: DevicesEvaluated, version: int, about: Happened) -> None:
        """Record an evaluation on the devices."""
        self._writer.append(
            EvaluationEnded(
                entry=f"{about.n}-0",
                evaluation=ended.evaluation,
                measured=ended.version,
                base=ended.base,
                devices=ended.devices,
                outcomes=ended.outcomes,
                sums=ended.sums,
                metrics=ended.metrics,
                version=version,
                time=about.time,
                received=about.time,
            )
        )

    def scaled(self, proposed: StepProposed, key: str, rate: float, about: Happened) -> None:
        """Record a change of the step's scale. ``rate``: the value of the strategy's ``key``."""
        self._writer.append(
            StepScaled(
                entry=f"{about.n}-0",
                at=proposed.at,
                scale=proposed.scale,
                key=key,
                rate=rate,
                metric=proposed.metric,
                scores=proposed.scores,
                version=proposed.at,
                time=about.time,
                received=about.time,
            )
        )

    def close(self) -> None:
        """Sync everything to disk and close the journal."""
        self._writer.sync()
        self._writer.close()
