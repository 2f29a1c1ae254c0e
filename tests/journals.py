"""Journals made without any service: the updater's part, played by hand.

python -m tests.journals      # writes those of this release to tests/data/journals
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstream.core.digest import DigestAlgorithm
from fedstream.core.formats import format_of
from fedstream.core.given import given
from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Upload
from fedstream.core.records import NO_QUARANTINES
from fedstream.journal import (
    QUARANTINES,
    VECTORS,
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    SegmentHead,
    Standing,
    StepScaled,
    Taken,
    Writer,
)
from fedstream.journal.progress import Progress, Step, close_round, forget, take
from fedstream.journal.rebuild import quarantines_after, standing_of
from fedstream.journal.records import DROPPED_ROUNDS, EVALUATIONS, STEP_SCALES, WIRE_FORMATS
from fedstream.strategies import (
    AcedSettings,
    AfaCdSettings,
    AfaCsSettings,
    AflGuardSettings,
    BasgdSettings,
    Ca2flSettings,
    FadasSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    RingleaderSettings,
    RingmasterSettings,
    ScaffoldSettings,
    State,
    Strategy,
)
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.optimizers import Yogi
from fedstream.strategies.staleness import Polynomial, StepAlpha
from tests.support import layout_of

LAYOUT = layout_of(4)
GOLDEN = Path(__file__).parent / "data" / "journals"
FORMATS = ("bf16", "int8", "int4", "topk:0.1")


class Scribe:
    """A run whose every step is made by hand and written down.

    Updates are drawn from ``seed``; ``head`` holds fields of the segments' heads. Close it.
    """

    def __init__(
        self,
        folder: Path,
        strategy: Strategy | None = None,
        *,
        layout: Layout = LAYOUT,
        weights: bool = True,
        seed: int = 0,
        made_by: DigestAlgorithm = "sha256",
        **head: Any,
    ) -> None:
        self.folder = folder
        self.strategy = strategy or FedAsyncSettings()
        self.layout = layout
        self.weights = weights
        self.rng = np.random.default_rng(seed)
        self.records = 0
        self.quarantines = NO_QUARANTINES
        self.stored: dict[int, str] = {}  # device -> segment with its vector
        model = self.drawn()
        self.made_by = made_by  # what makes digests
        self.digests = {0: model.digest(made_by)}  # version -> digest
        self.given: dict[int, str] = {}  # the same as devices are given it, if that is encoded
        self.progress = Progress(State(0, model))
        about: dict[str, Any] = {
            "epoch": 1,
            "number": 0,
            "lineage": "line-1",
            "run": "demo",
            "task": "digits",
            "devices": 10,
            "versions": 1000,
            "seed": seed,
            "created": 1.0,
            "strategy": self.strategy.model_dump(mode="json"),
            "layout": layout.encode(),
            "release": "tests",
            "time": 1.0,
        }
        if self.strategy.adapt is not None:
            about["needs"] = (STEP_SCALES,)
        self.head = SegmentHead(**about | head)
        self._begin("begun")

    def close(self) -> None:
        """Everything is on disk."""
        self.writer.sync()
        self.writer.close()

    @property
    def version(self) -> int:
        """The newest."""
        return self.progress.state.version

    def drawn(self) -> Model:
        """The next random model."""
        model = Model(self.layout)
        model.floats[:] = self.rng.standard_normal(self.layout.floats)
        model.integers[:] = self.rng.integers(0, 100, self.layout.integers)
        return model

    def update(self, device: int | None = None, *, late: int = 0, **changes: Any) -> Taken:
        """An update arrives, ``late`` versions after the one that it was trained from.

        Its ``format`` may be another than f32; the first such one takes a segment of its own.
        """
        model = self.drawn()
        sent: Payload = model
        how = format_of(changes.get("format", "f32"))
        if not how.is_plain:
            if WIRE_FORMATS not in self.head.needs:
                needs = (*self.head.needs, WIRE_FORMATS)
                self.head = self.head.model_copy(update={"needs": needs})
                self.segment()
            sent = Payload(how.encoded(model))
            model = Model(self.layout)
            how.decode(sent.buffer, model)
        upload = self._upload(device, sent, late, **changes)
        rule = self.strategy.build(self.head.devices)
        before = self.progress
        step = take(rule, before, upload, model, Model(self.layout))
        assert step.decision
        if step.decision.outcome == "dropped":
            return self._taken(upload, sent, outcome="refused", reason=step.decision.reason)
        made = self._made(step)
        return self._taken(
            upload, sent, outcome=step.decision.outcome, weight=step.decision.weight, **made
        )

    def refuse(
        self, device: int | None = None, reason: str = "not finite", *, outcome: str = "refused"
    ) -> Taken:
        """An update arrives and is of no use."""
        model = self.drawn()
        upload = self._upload(device, model, 0)
        return self._taken(upload, model, outcome=outcome, reason=reason)

    def close_round(self, *, drops: bool = False) -> RoundClosed:
        """The round ends, whatever has arrived; ``drops``: in a segment of its own."""
        if drops:
            self.head = self.head.model_copy(update={"needs": (DROPPED_ROUNDS,)})
            self.segment()
        round_, held = self.version, self.progress.held
        rule = self.strategy.build(self.head.devices)
        made = self._made(close_round(rule, self.progress, round_, drops=drops))
        record = RoundClosed(
            entry=self._entry(),
            round=round_,
            time=self._time,
            received=self._time,
            **{"version": self.version, "dropped": len(held) if drops else 0, **made},
        )
        self.writer.append(record)
        return record

    def quarantine(self, *devices: int, release: bool = False, why: str = "") -> QuarantineSet:
        """Devices go into quarantine or are released; the first one takes a segment of its own."""
        if not self.quarantines.taken:
            self.head = self.head.model_copy(update={"needs": (QUARANTINES,)})
            self.segment()
        record = QuarantineSet(
            entry=self._entry(),
            devices=devices,
            release=release,
            why=why,
            version=self.version,
            time=self._time,
            received=self._time,
        )
        self.quarantines = quarantines_after(self.quarantines, record)
        if not release:
            rule = self.strategy.build(self.head.devices)
            self.progress = forget(rule, self.progress, devices)
        self.writer.append(record)
        return record

    def evaluate(self, **metrics: float) -> EvaluationEnded:
        """An evaluation of the newest version ends; the first one takes a segment of its own."""
        if EVALUATIONS not in self.head.needs:
            self.head = self.head.model_copy(update={"needs": (*self.head.needs, EVALUATIONS)})
            self.segment()
        entry = self._entry()
        record = EvaluationEnded(
            entry=entry,
            evaluation=f"evaluation-{self.records:04}",
            measured=self.version,
            base=self.digests[self.version],
            devices=3,
            outcomes={"measured": 2, "no test data": 1} if metrics else {"no answer in time": 3},
            sums={name: (10 * value, 10.0) for name, value in metrics.items()},
            metrics={f"devices_{name}": value for name, value in metrics.items()},
            version=self.version,
            time=self._time,
            received=self._time,
        )
        self.writer.append(record)
        return record

    def scale_step(self, scale: float) -> StepScaled:
        """The rule's step becomes ``scale`` times the configured one."""
        record = StepScaled(
            entry=self._entry(),
            at=self.version,
            scale=scale,
            key=self.strategy.step_key,
            rate=self.strategy.step_rate * scale,
            metric="loss",
            scores=((self.progress.scale, 0.75), (scale, 0.5)),
            version=self.version,
            time=self._time,
            received=self._time,
        )
        self.progress = replace(self.progress, scale=scale, scaled_at=self.version)
        self.writer.append(record)
        return record

    def segment(self, strategy: Strategy | None = None, *, epoch: int | None = None) -> None:
        """The next segment begins where this one ends; ``epoch``: its writer is another."""
        cut, follows = self.writer.size, self.writer.chain.hex()
        before = self.writer.path.name
        self.close()
        self.strategy = strategy or self.strategy
        self.head = self.head.model_copy(
            update={
                "epoch": epoch or self.head.epoch,
                "number": 0 if epoch else self.head.number + 1,
                "predecessor": before,
                "cut": cut,
                "follows": follows,
                "strategy": self.strategy.model_dump(mode="json"),
            }
        )
        self._begin("continued")

    def adopt(self) -> None:
        """Redis has another model than the journal: a new lineage begins with it."""
        before, cut = self.writer.path.name, self.writer.size
        follows = self.writer.chain.hex()
        self.close()
        self.head = self.head.model_copy(
            update={
                "epoch": self.head.epoch + 1,
                "number": 0,
                "predecessor": before,
                "cut": cut,
                "follows": follows,
                "lineage": f"line-{self.head.epoch + 1}",
            }
        )
        model = self.drawn()
        self.progress = Progress(State(self.version + 3, model))
        self.digests[self.version] = model.digest(self.made_by)
        self._begin("adopted")

    def _begin(self, why: str) -> None:
        standing: Standing
        standing, models = standing_of(
            self.progress,
            why,
            digest=self.digests[self.version],
            time=self._time,
            quarantines=self.quarantines.taken,
            quarantined=self.quarantines.groups,
        )
        vectors = self.progress.state.memory.devices
        here = sorted(vectors.changed) if vectors else []
        elsewhere = {device: name for device, name in self.stored.items() if device not in here}
        standing = standing.model_copy(
            update={"here": tuple(here), "elsewhere": tuple(elsewhere.items())}
        )
        needs = (*self.head.needs, VECTORS) if vectors else self.head.needs
        head = self.head.model_copy(update={"needs": needs})
        self.writer = Writer(self.folder, head, standing, *models, vectors=vectors)
        self.stored = elsewhere | dict.fromkeys(here, self.writer.path.name)
        if vectors:
            vectors.changed.clear()

    @property
    def _time(self) -> float:
        """A second and a half between two records."""
        return 2.0 + 1.5 * self.records

    def _entry(self) -> str:
        self.records += 1
        return f"{self.records}-0"

    def _upload(self, device: int | None, sent: Payload, late: int, **changes: Any) -> Upload:
        n, tau = self.records, max(0, self.version - late)
        about: dict[str, Any] = {
            "task": f"task-{n}",
            "attempt": "a1",
            "device": n % 10 if device is None else device,
            "trainer": "t",
            "tau": tau,
            "base": self.given.get(tau, self.digests.get(tau, "unknown")),
            "layout": self.layout.signature,
            "digest": sent.digest(self.made_by),
            "size": sent.buffer.nbytes,
            "samples": 10 + n % 3,
            "steps": 5,
            "lr": 0.1,
            "loss": 0.5,
            "sends": self.strategy.build().sends,
        }
        return Upload(**about | changes)

    def _made(self, step: Step) -> dict[str, Any]:
        """The step is done: version and, where it made one, its digest."""
        self.progress = step.after
        if step.made is None:
            return {"version": self.version}
        model, how = step.after.state.model, format_of(self.head.format)
        self.digests[self.version] = model.digest(self.made_by)
        made: dict[str, Any] = {"version": self.version, "digest": self.digests[self.version]}
        if self.version >= self.head.versions:
            made["finished"] = f"version {self.version} reached"
        if how.is_plain:
            return made
        sends = self.strategy.build().sends
        self.given[self.version] = given(
            model, how, version=self.version, sends=sends, digests=self.made_by
        ).digest
        return made | {"given": self.given[self.version]}

    def _taken(self, upload: Upload, sent: Payload, **about: Any) -> Taken:
        about.setdefault("version", self.version)
        before = about["version"] - ("digest" in about)  # a version more is this record's own
        record = Taken(
            entry=self._entry(),
            upload=upload,
            time=self._time,
            received=self._time - 0.5,
            staleness=before - upload.since,
            **about,
        )
        self.writer.append(record, *([sent] if self.weights else []))
        return record


def write_golden() -> None:
    """A small journal of each strategy, of each wire format of updates and models, one with
    quarantines, one with evaluations on the devices, one with a dropped round, one with a server
    optimizer, one with a robust mean and clipping, one with steps that adapt, and two with digests
    by BLAKE3 (all others are by SHA-256).

    With the digests of their versions.

    Those that are there stay: an older release's journals must be readable for ever.
    """
    rules: tuple[Strategy, ...] = (
        FedAsyncSettings(alpha_schedule=StepAlpha(at=4), max_staleness=3),
        FedAvgSettings(clients_per_round=3, weighting="samples"),
        FedBuffSettings(buffer_size=3, staleness=Polynomial()),
        AfaCdSettings(buffer_size=3),
        AfaCsSettings(buffer_size=3, max_staleness=1),
        ScaffoldSettings(buffer_size=3, server_lr=0.5),
        BasgdSettings(buckets=3, staleness=Polynomial()),
        AflGuardSettings(root=(0, 6), radius=1.6),
        Ca2flSettings(buffer_size=3, server_lr=0.5),
        AcedSettings(max_age=4),
        FadasSettings(buffer_size=3, delay_adaptive="code"),
        RingmasterSettings(max_staleness=3),
        RingleaderSettings(devices=3, server_lr=1.0),
    )
    journals: dict[str, tuple[Strategy, str]] = {rule.name: (rule, "f32") for rule in rules}
    journals["quarantine"] = FedAsyncSettings(), "f32"
    journals["evaluations"] = FedAsyncSettings(), "f32"
    journals["optimizer"] = FedBuffSettings(buffer_size=2, server=Yogi()), "f32"
    robust = FedBuffSettings(buffer_size=3, aggregate="geometric median", clip=1.5)
    journals["robust"] = robust, "f32"
    adapted = FedBuffSettings(buffer_size=2, server_lr=0.5, adapt=Adapt())
    journals["adapted"] = adapted, "f32"
    journals["dropped"] = FedAvgSettings(clients_per_round=3), "f32"
    blake3 = {"blake3": "f32", "blake3-models": "int8"}  # what they publish in
    journals["blake3"] = FedBuffSettings(buffer_size=3), "f32"
    journals["blake3-models"] = FedAsyncSettings(), "int8+zstd"
    for how in FORMATS:
        of_changes = format_of(how).of_changes
        journals[f"wire-{how.partition(':')[0]}"] = (
            FedBuffSettings(buffer_size=3) if of_changes else FedAsyncSettings(),
            how,
        )
    journals["wire-scaffold"] = ScaffoldSettings(buffer_size=3), "int4"
    journals["wire-zstd"] = FedAsyncSettings(), "int8+zstd"
    models = blake3 | {"models-int8": "int8", "models-nearest": "bf16+zstd"}
    journals["models-int8"] = FedAsyncSettings(), "bf16"
    journals["models-nearest"] = FedBuffSettings(buffer_size=3), "int4"
    for name, (rule, how) in journals.items():
        if (GOLDEN / name).exists():
            continue
        encoded = how != "f32"
        layout = layout_of(300, 2, 1) if encoded else layout_of(5, 2, 1)  # two blocks
        layout = layout.with_controls() if rule.build().controls else layout
        scribe = Scribe(
            GOLDEN / name,
            rule,
            layout=layout,
            format=models.get(name, "f32"),
            made_by="blake3" if name in blake3 else "sha256",
        )
        for n in range(12):
            late = n % 4 // 3 if rule.name == "fedavg" else n % 5
            # The others of the same run send float32.
            device = (0, 0, 1, 2, 2, 0)[n % 6] if rule.name == "ringleader" else None
            scribe.update(device, late=late, format=how if n % 4 else "f32")
            if n == 4:
                scribe.refuse()
            if n == 6:
                scribe.segment(epoch=3)
            if name == "quarantine" and n == 7:
                scribe.quarantine(2, 7, why="it poisons")
                scribe.refuse(2, "device quarantined")
            if name == "dropped" and n == 8:
                scribe.close_round(drops=True)
            if name == "evaluations" and n in (3, 7, 8):
                scribe.evaluate(**({"accuracy": n / 10, "loss": 1.5} if n != 7 else {}))
            if name == "adapted" and n in (3, 8):  # once within a batch
                scribe.scale_step(n / 4)
            if name == "quarantine" and n == 9:
                scribe.segment()
                scribe.quarantine(7, release=True)
        scribe.close_round()
        scribe.close()
        keep_golden(scribe)


def keep_golden(scribe: Scribe) -> None:
    """Pack a closed journal in its folder, and write the digests of its versions beside it."""
    for path in scribe.folder.iterdir():
        packed = gzip.compress(path.read_bytes(), mtime=0)
        path.with_name(f"{path.name}.gz").write_bytes(packed)
        path.unlink()
    made = {version: digest for version, digest in scribe.digests.items() if version}
    path = scribe.folder.with_name(f"{scribe.folder.name}.json")
    path.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    write_golden()
