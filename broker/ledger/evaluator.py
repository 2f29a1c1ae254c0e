"""The evaluator's operations on Redis: report, keep the best model, ask devices, end the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from fedstream.broker import blobs
from fedstream.broker.keys import TRAINERS
from fedstream.broker.ledger.base import FINISH_RUN, Finishing, Rights, packed
from fedstream.broker.ledger.queries import device_of
from fedstream.broker.scripts import Script
from fedstream.core.messages import (
    DevicesEvaluated,
    Evaluation,
    Event,
    Goal,
    Measured,
    StepProposed,
)
from fedstream.core.records import Best, Head, mapping

_PIN = Script("pin")
_TELL = Script("tell")
_OPEN_EVALUATION = Script("open_evaluation")
_ASK_DEVICES = Script("ask_devices")
_END_EVALUATION = Script("end_evaluation")

RIGHTS = Rights(
    # `run`: to end a run by the measurements of this evaluator and earlier ones.
    both=("run", "events", "best", "evaluation", "evaluations", "measured", "counts"),
    reads=("head", "models", "model:*", "kept", "owners", "pool", "alive", "concurrent", "open"),
    writes=("queue", "tasks", "tasks:*"),
    commands=("xread", "xadd", "hgetall", "hkeys", "smembers", "zrangebyscore", *blobs.READS),
    scripts=(FINISH_RUN, _PIN, _TELL, _OPEN_EVALUATION, _ASK_DEVICES, _END_EVALUATION),
)


@dataclass(frozen=True)
class OpenEvaluation:
    """An evaluation on the devices that is under way."""

    id: str
    version: int
    devices: tuple[int, ...]  # to be asked, in order
    deadline: float  # seconds since 1970, by Redis's clock
    model: Mapping[str, Any]  # the fields of an Evaluation that describe the version's model
    asked: Collection[int] = field(default_factory=frozenset)  # devices with an open task
    answered: Collection[int] = field(default_factory=frozenset)

    @classmethod
    def parsed(
        cls, flat: Sequence[bytes], asked: Iterable[bytes] = (), answered: Iterable[bytes] = ()
    ) -> OpenEvaluation | None:
        """Parse the key's fields, and the devices that the registers name; None without fields."""
        record = mapping(flat)
        if not record:
            return None
        about = msgpack.unpackb(record["about"])
        return cls(
            id=record["id"].decode(),
            version=int(record["version"]),
            devices=tuple(about["devices"]),
            deadline=int(record["until_ms"]) / 1000,
            model=about["model"],
            asked=frozenset(map(int, asked)),
            answered=frozenset(map(int, answered)),
        )

    @property
    def base(self) -> str:
        """The digest by which devices know the version."""
        return str(self.model["given"] or self.model["digest"])

    @property
    def waiting(self) -> list[int]:
        """The devices that have no task yet."""
        return [one for one in self.devices if one not in self.asked and one not in self.answered]

    def task(self, task: str, device: int) -> Evaluation:
        """The task of a device."""
        return Evaluation(
            task=task, device=device, version=self.version, deadline=self.deadline, **self.model
        )


@dataclass(frozen=True)
class EvaluatedDevice:
    """What became of a device's evaluation."""

    outcome: str
    measured: Measured | None  # the answer, if the device was measured


class EvaluatorLedger(Finishing):
    """The evaluator's view of the run, and its changes to it."""

    async def pin(self, blob: str) -> bool:
        """Keep a published model until the next event; False if it is gone already."""
        return bool(await self._run(_PIN, blob))

    async def tell(self, event: Event, found: Best | None = None, goal: Goal = "max") -> None:
        """Write an event for observers; keep the model ``found`` if it is better than the best.

        ``goal``: of the metric of ``found``, whose value is finite and whose model is pinned.
        """
        await self._run(_TELL, event.encode(), *_candidate(found, goal))

    async def propose(self, step: StepProposed) -> None:
        """Queue a scale of the rule's step; the updater ignores one that comes twice or late."""
        await self._client.call("XADD", self.keys.queue, "*", "m", step.encode())

    async def present(self, devices: int) -> Sequence[int]:
        """The devices of a run of ``devices`` that a live trainer serves now, in order."""
        owned, pool, alive = await self._client.pipeline(
            [
                ("HKEYS", self.keys.owners),
                ("SMEMBERS", self.keys.pool),
                ("ZRANGEBYSCORE", self.keys.alive, "(0", "+inf"),
            ]
        )
        if {*pool} & {*alive}:
            return range(devices)
        named = map(device_of, owned)
        return sorted(device for device in named if device is not None and device < devices)

    async def evaluation(self) -> OpenEvaluation | None:
        """Read the evaluation that is under way; None if there is none."""
        return OpenEvaluation.parsed(
            *await self._client.pipeline(
                [
                    ("HGETALL", self.keys.evaluation),
                    ("HKEYS", self.keys.evaluations),
                    ("HKEYS", self.keys.measured),
                ]
            )
        )

    async def open_evaluation(
        self, id_: str, head: Head, devices: Sequence[int], deadline: float, *, nbytes: int
    ) -> str:
        """Begin an evaluation of the newest version, whose float32 model has ``nbytes`` bytes.

        Returns 'begun', 'other' (one is under way) or 'moved' (another version is the newest).
        """
        model = {
            "digest": head.digest,
            "blob": head.blob,
            "size": head.encoded.size if head.encoded else nbytes,
            "chunks": head.chunks,
            "format": head.encoded.format if head.encoded else "f32",
            "given": head.encoded.digest if head.encoded else None,
        }
        about = msgpack.packb({"devices": list(devices), "model": model})
        reply = await self._run(
            _OPEN_EVALUATION,
            id_,
            head.version,
            head.given,
            head.blob,
            round(deadline * 1000),
            about,
        )
        return str(reply.decode())

    async def ask_devices(
        self, evaluation: OpenEvaluation, share: float, tasks: Sequence[Evaluation]
    ) -> tuple[int, int]:
        """Send tasks, in order, while fewer than a share of the workers have one.

        Returns of how many devices that is settled, as they have or had a task, and how many tasks
        may be open now; (0, 0) if the evaluation is over.
        """
        parts = [part for one in tasks for part in (one.task, one.device, one.encode())]
        settled, most = await self._run(_ASK_DEVICES, evaluation.id, repr(share), *parts)
        return int(settled), int(most)

    async def answers(self) -> dict[int, EvaluatedDevice]:
        """Read what became of the devices that have answered, in order of their numbers."""
        flat = await self._client.call("HGETALL", self.keys.measured)
        found = {}
        for device, data in zip(flat[::2], flat[1::2], strict=True):
            fields = msgpack.unpackb(data, raw=True)
            answer = fields[b"answer"]
            found[int(device)] = EvaluatedDevice(
                fields[b"outcome"].decode(), Measured.decode(answer) if answer else None
            )
        return dict(sorted(found.items()))

    async def end_evaluation(
        self,
        answered: int,
        ended: DevicesEvaluated,
        found: Best | None = None,
        goal: Goal = "max",
    ) -> str:
        """End an evaluation, in which so many devices have ``answered``, and queue its result.

        ``found``, ``goal``: as in :meth:`tell`, of the evaluated version.
        Returns 'ended', 'more' (other devices have answered since) or 'over' (it had ended).
        """
        reply = await self._run(
            _END_EVALUATION,
            ended.evaluation,
            answered,
            ended.devices,
            ended.encode(),
            TRAINERS,
            *_candidate(found, goal),
        )
        return str(reply.decode())


def _candidate(found: Best | None, goal: Goal) -> tuple[bytes, ...]:
    """The argument of scripts that keep a version's model if it is the best; () without one."""
    if found is None:
        return ()
    about = {
        "goal": goal,
        "metric": found.metric,
        "value": repr(found.value),
        "version": str(found.version),
        "digest": found.digest,
        "blob": found.blob,
    }
    return (packed(about),)
