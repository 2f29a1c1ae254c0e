"""The offer of a task to a device, and the advice whether to continue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedstream.core import reasons
from fedstream.core.formats import F32
from fedstream.core.messages import Assignment, Evaluation
from fedstream.core.records import head_of
from fedstream.protocol.messages import (
    MEASUREMENT_ROUTE,
    MODEL_ROUTE,
    UPDATE_ROUTE,
    Advice,
    EvaluationOffer,
    ExpectedMeasurement,
    ExpectedUpdate,
    Offer,
    OfferedEvaluation,
    OfferedModel,
    OfferedTask,
)

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.device_sessions import Held
    from fedstream.core.formats import Format
    from fedstream.core.records import Head, Run
    from fedstream.protocol.messages import OfferedPrivacy

GO_ON = Advice(go_on=True)


def offer(
    task: Assignment,
    attempt: str,
    run: Run,
    model: OfferedModel,
    update: Format,
    now: float,
    *,
    private: OfferedPrivacy | None = None,
    heartbeat_s: float,
) -> Offer:
    """Offer a task, to be trained from the newest version.

    ``update``: the wanted format of the update. ``now``: seconds since 1970, by the clock of the
    task's deadline.
    """
    return Offer(
        task=OfferedTask(
            id=task.task,
            device=task.device,
            seed=task.seed,
            steps=task.steps,
            epochs=task.epochs,
            seconds=task.seconds,
            left_s=None if task.deadline is None else max(0.0, task.deadline - now),
        ),
        attempt=attempt,
        model=model,
        unshared=_unshared(run),
        update=ExpectedUpdate(
            url=UPDATE_ROUTE.format(task=task.task, attempt=attempt),
            sends=run.sends,
            format=update.name,
            layout=run.layout.signature,
            most=update.sizes(run.layout)[1],
        ),
        private=private,
        heartbeat_s=heartbeat_s,
    )


def evaluation_offer(
    task: Evaluation,
    attempt: str,
    run: Run,
    model: OfferedModel,
    now: float,
    *,
    heartbeat_s: float,
) -> EvaluationOffer:
    """Offer an evaluation; the arguments are as for an offer."""
    return EvaluationOffer(
        task=OfferedEvaluation(
            id=task.task, device=task.device, left_s=max(0.0, task.deadline - now)
        ),
        attempt=attempt,
        model=model,
        unshared=_unshared(run),
        measurement=ExpectedMeasurement(
            url=MEASUREMENT_ROUTE.format(task=task.task, attempt=attempt),
            layout=run.layout.signature,
        ),
        heartbeat_s=heartbeat_s,
    )


def _unshared(run: Run) -> OfferedModel | None:
    unshared = run.layout.unshared
    return None if unshared is None else model(run, head_of(unshared))


def model(run: Run, head: Head, changes: str | None = None) -> OfferedModel:
    """Offer a version's model. ``changes``: the URL of the changes since the device's model."""
    return OfferedModel(
        version=head.version,
        digest=head.given,
        format=model_format(head),
        size=head.encoded.size if head.encoded else run.layout.nbytes,
        url=MODEL_ROUTE.format(digest=head.given),
        changes=changes,
    )


def model_format(head: Head) -> str:
    """The name of a published model's format."""
    return head.encoded.format if head.encoded else F32.name


def format_for(formats: Sequence[str], wanted: Format) -> Format:
    """The format for a device's updates: the wanted one if the device knows it, else float32.

    ``formats``: the formats that the device knows; ``topk`` stands for ``topk`` with any share.
    """
    kind = f"{wanted.kind}{'+zstd' if wanted.zstd else ''}"
    return wanted if {wanted.name, kind} & {*formats} else F32


def overdue(task: Assignment | Evaluation, head: Head, now: float) -> str | None:
    """The reason to give up a task of a present device, if it is overdue; else None.

    ``now``: seconds since 1970.
    """
    if task.deadline is not None and now > task.deadline:
        return reasons.DEADLINE_PASSED
    if isinstance(task, Assignment) and task.version not in (None, head.version):
        return reasons.ROUND_OVER
    return None


def advice(held: Held, attempt: str, run: Run, head: Head, now: float) -> Advice:
    """The advice to a device that works on a task. ``now``: seconds since 1970."""
    if run.state == "finished" and isinstance(held.task, Assignment):
        return Advice(go_on=False, why="run over")
    if attempt != held.attempt or overdue(held.task, head, now) is not None:
        return Advice(go_on=False, why="given up")
    # For untrusted sites, staleness counts from the hand-out, which came before the offer.
    if (
        run.max_staleness is not None
        and held.tau is not None
        and held.task.version is None
        and head.version - held.tau > run.max_staleness
    ):
        return Advice(go_on=False, why="too stale")
    return GO_ON
