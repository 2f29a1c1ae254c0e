"""A long run's journal, written as fast as it can be read: by FedAsync, a version an update.

All records are what an updater would have written, and a replay gives the same models. Only the
updates are drawn from a few, and one device's are far from the others'.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from fedstream.core.layout import Layout, Model, Tensor
from fedstream.core.messages import Upload
from fedstream.history.report import METRICS
from fedstream.journal import SegmentHead, Taken, Writer
from fedstream.journal.frames import FILE_BYTES, file_parts, filled, packed
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import standing_of
from fedstream.strategies import FedAsyncSettings, State

DEVICES = 100
POISONED = 7  # its updates are far from the others', from the middle of the run on
SEGMENT = 4000  # versions, as usual
LATE = 4  # updates are trained from one of as many newest versions
_BUFFER = 4 << 20  # bytes that are written at once
_SHIFT = np.float32(30.0)


class _Drawn:
    """The updates that devices send, each with its digest."""

    def __init__(self, layout: Layout, count: int) -> None:
        rng = np.random.default_rng(0)
        self.models = [Model(layout) for _ in range(2 * count)]
        for number, model in enumerate(self.models):
            model.floats[:] = rng.standard_normal(layout.floats, np.float32)
            if number >= count:  # the poisoned ones
                model.floats[:] += _SHIFT
        self.digests = [model.digest() for model in self.models]
        self.count = count

    def __call__(self, version: int, *, poisoned: bool) -> int:
        return version % self.count + self.count * poisoned


def write(folder: Path, versions: int, parameters: int = 4, *, weights: int | None = None) -> Path:
    """Write a run's folder; return it.

    ``weights``: only updates of the newest segments, with at least so many versions, have their
    bytes; None: all have.
    """
    layout = Layout(
        (
            Tensor("weight", (parameters - 1,), "float32", "parameter"),
            Tensor("bias", (1,), "float32", "parameter"),
        )
    )
    rule, sample = FedAsyncSettings(), _sample(layout)
    weigh = [rule.build().weigh(LATE, LATE - late, 10) for late in range(LATE)]
    drawn = _Drawn(layout, 8 if parameters > 1000 else 512)
    head = SegmentHead(
        epoch=1,
        number=0,
        lineage="long",
        run="long",
        task="none",
        devices=DEVICES,
        versions=versions,
        seed=0,
        created=1.7e9,
        strategy=rule.model_dump(mode="json"),
        layout=layout.encode(),
        release="benchmark",
        time=1.7e9,
    )
    x, step = Model(layout), np.empty(layout.floats, np.float32)
    x.floats[:] = 0.0
    ends = [*range(0, versions, SEGMENT), versions]
    for number, (first, last) in enumerate(pairwise(ends)):
        kept = weights is None or last > versions - weights
        writer = _begun(folder / "journal", head, x, first)
        at, chain, path = writer.size, writer.chain, writer.path
        parts = file_parts(path.read_bytes()[:FILE_BYTES])
        assert parts is not None
        buffer = bytearray()
        with path.open("r+b") as file:
            file.seek(at)
            for version in range(first + 1, last + 1):
                late, device = min(version - 1, version * 7 % LATE), version * 37 % DEVICES
                which = drawn(version, poisoned=device == POISONED and version > versions // 2)
                update = drawn.models[which]
                np.subtract(update.floats, x.floats, out=step)
                np.multiply(step, np.float32(weigh[late]), out=step)
                apart = float(np.sqrt(np.dot(step, step))) / weigh[late]
                np.add(x.floats, step, out=x.floats)
                message = _message(
                    sample, version, late, device, drawn.digests[which], apart, x, weigh[late]
                )
                size = update.buffer.nbytes if kept else 0
                record, chain = packed(
                    message, payload=size, synced=0, offset=at, follows=chain, salt=parts[1]
                )
                buffer += record
                buffer += bytes(-len(record) % 4096)
                if kept:
                    buffer += update.buffer.data
                    buffer += bytes(-size % 4096)
                at += filled(len(record)) + filled(size)
                if len(buffer) >= _BUFFER:
                    file.write(buffer)
                    buffer.clear()
            file.write(buffer)
        about = {"number": number + 1, "predecessor": path.name, "cut": at, "follows": chain.hex()}
        head = head.model_copy(update=about)
    _measure(folder, versions)
    return folder


def _begun(folder: Path, head: SegmentHead, model: Model, version: int) -> Writer:
    standing, models = standing_of(
        Progress(State(version, model)),
        "continued" if version else "begun",
        digest=model.digest(),
        time=1.7e9 + version / 20,
    )
    writer = Writer(folder, head, standing, *models, cached=True)
    writer.close()
    return writer


def _sample(layout: Layout) -> Taken:
    """A record of which only some fields differ from one to the next."""
    upload = Upload(
        task="task",
        attempt="a1",
        device=0,
        trainer="trainer-1",
        tau=0,
        base="b" * 64,
        layout=layout.signature,
        digest="d" * 64,
        size=layout.nbytes,
        samples=10,
        steps=5,
        lr=0.1,
    )
    return Taken(
        entry="0-0",
        upload=upload,
        outcome="applied",
        staleness=0,
        weight=0.0,
        version=1,
        digest="d" * 64,
        time=0.0,
        received=0.0,
    )


def _message(
    sample: Taken,
    version: int,
    late: int,
    device: int,
    digest: str,
    apart: float,
    made: Model,
    weight: float,
) -> bytes:
    time = 1.7e9 + version / 20
    upload = sample.upload.__dict__ | {
        "task": f"task-{version:08}",
        "device": device,
        "tau": version - 1 - late,
        "digest": digest,
        "samples": 10 + device,
        "loss": 2.0 / (1 + version / 1000),
        "seconds": 0.1 * (1 + late),
    }
    return sample.encode(
        entry=f"{version}-0",
        upload=upload,
        staleness=late,
        weight=weight,
        version=version,
        digest=made.digest(),
        time=time,
        received=time - 0.01,
        sizes=(apart, 0.0, 0.0),
    )


def _measure(folder: Path, versions: int) -> None:
    """Measure every tenth version: one of them far worse than its neighbours."""
    worst = versions // 3 // 10 * 10
    lines = ["version,seconds,updates,total_updates,accuracy,test_loss"]
    for version in range(0, versions + 1, 10):
        accuracy = 0.1 if version == worst else 0.9 - 0.8 / (1 + version / 500)
        lines.append(f"{version},{version / 20},10,{version},{accuracy:.4f},{1 - accuracy:.4f}")
    (folder / METRICS).write_text("\n".join(lines) + "\n")
