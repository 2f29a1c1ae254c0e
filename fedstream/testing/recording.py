"""Drawn updates, bitwise comparison of states, and a journal like an updater's, for checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstream.core.layout import Layout, Model, Tensor
from fedstream.core.messages import Upload
from fedstream.journal import VECTORS, RoundClosed, SegmentHead, Taken, Writer
from fedstream.journal.progress import Progress, close_round, take
from fedstream.journal.rebuild import standing_of
from fedstream.strategies import Memory, State, Strategy, Update

DEVICES = 6
LATEST = 4  # largest drawn staleness


@dataclass(frozen=True)
class DrawnUpdate:
    """A drawn update, relative to the newest version."""

    number: int
    device: int
    late: int  # wanted staleness
    samples: int
    steps: int
    lr: float
    moved: Model  # x_new - x_tau, except for buffers and integers

    def update(self, state: State, sends: str, late: int | None = None) -> Update:
        tau = max(0, state.version - (self.late if late is None else late))
        model = self.moved.copy()
        if sends == "model":
            model.parameters[:] += state.model.parameters
        return Update(
            model=model,
            tau=tau,
            device=self.device,
            samples=self.samples,
            steps=self.steps,
            lr=self.lr,
        )


# states, compared by their bits


@dataclass(frozen=True)
class MemoryPrint:
    model: str | None
    arrivals: int
    weight: float
    vectors: tuple[tuple[int | str, bytes], ...]
    numbers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StatePrint:
    version: int
    model: str
    memory: MemoryPrint


def memory_print(memory: Memory) -> MemoryPrint:
    vectors = memory.devices
    kept: list[int | str] = []
    if vectors is not None:
        kept = [*sorted(vectors.heard), *vectors.names]
    return MemoryPrint(
        memory.model.digest() if memory.model is not None else None,
        memory.arrivals,
        memory.weight,
        tuple((key, vectors[key].tobytes()) for key in kept) if vectors is not None else (),
        tuple(vectors.numbers.items()) if vectors is not None else (),
    )


def state_print(state: State) -> StatePrint:
    return StatePrint(state.version, state.model.digest(), memory_print(state.memory))


def layout_of(*, controls: bool) -> Layout:
    """Parameters, statistics, and integers of each kind."""
    layout = Layout(
        (
            Tensor("weight", (4, 3), "float32", "parameter"),
            Tensor("mean", (3,), "float32", "buffer"),
            Tensor("ids", (2,), "int64", "integer"),
            Tensor("seen", (), "int64", "counter"),
        )
    )
    return layout.with_controls() if controls else layout


def drawn(layout: Layout, rng: np.random.Generator, scale: float) -> Model:
    model = Model(layout)
    model.floats[:] = scale * rng.standard_normal(layout.floats)
    model.integers[:] = 0
    model.integers[layout.counters] = rng.integers(0, 1000, 1)
    return model


def filled(layout: Layout, byte: int) -> Model:
    model = Model(layout)
    model.buffer[:] = byte
    return model


_SEGMENT = 7  # arrivals per segment, so that checkpoints split batches


class Recording:
    """Records arrivals like an updater, in several segments."""

    def __init__(
        self, folder: Path, strategy: Strategy, first: Model, arrivals: Sequence[DrawnUpdate]
    ) -> None:
        """``first``: version 0, which this object owns afterwards."""
        self._folder = folder
        self._rule = strategy.build(DEVICES)
        self._arrivals = arrivals
        self._progress = Progress(State(0, first))
        self._digests = {0: first.digest()}
        self._stored: dict[int, str] = {}
        self._entries = 0
        self._head = SegmentHead(
            epoch=1,
            number=0,
            lineage="check",
            run="check",
            task="check",
            devices=DEVICES,
            versions=10**6,
            seed=0,
            created=0.0,
            layout=first.layout.encode(),
            release="check",
            strategy=strategy.model_dump(mode="json"),
            time=0.0,
        )

    def play(self) -> State:
        """Record everything; return a copy of the last state."""
        writer = self._begun("begun")
        for arrival in self._arrivals:
            if arrival.number % _SEGMENT == 0:
                writer.sync()
                writer.close()
                self._head = self._head.model_copy(
                    update={
                        "number": self._head.number + 1,
                        "predecessor": writer.path.name,
                        "cut": writer.size,
                        "follows": writer.chain.hex(),
                    }
                )
                writer = self._begun("continued")
            if arrival.number % (2 * _SEGMENT) == _SEGMENT + 2 and self._rule.rounds != "never":
                writer.append(self._round_over())
            writer.append(*self._taken(arrival))
        writer.sync()
        writer.close()
        return self._progress.state

    def _begun(self, why: str) -> Writer:
        state = self._progress.state
        standing, models = standing_of(
            self._progress, why, digest=self._digests[state.version], time=0.0
        )
        vectors = state.memory.devices
        here = sorted(vectors.changed) if vectors is not None else []
        elsewhere = {d: name for d, name in self._stored.items() if d not in here}
        standing = standing.model_copy(
            update={"here": tuple(here), "elsewhere": tuple(elsewhere.items())}
        )
        head = self._head.model_copy(update={"needs": (VECTORS,) if vectors is not None else ()})
        writer = Writer(self._folder, head, standing, *models, vectors=vectors)
        self._stored = elsewhere | dict.fromkeys(here, writer.path.name)
        if vectors is not None:
            vectors.changed.clear()
        return writer

    def _entry(self) -> str:
        self._entries += 1
        return f"{self._entries}-0"

    def _made(self, version: int) -> dict[str, Any]:
        """The fields of the version after a record, and its digest if the record made it."""
        state = self._progress.state
        if state.version == version:
            return {"version": version}
        self._digests[state.version] = state.model.digest()
        return {"version": state.version, "digest": self._digests[state.version]}

    def _round_over(self) -> RoundClosed:
        round_ = self._progress.state.version
        self._progress = close_round(self._rule, self._progress, round_).after
        return RoundClosed(
            entry=self._entry(), round=round_, time=0.0, received=0.0, **self._made(round_)
        )

    def _taken(self, arrival: DrawnUpdate) -> tuple[Any, ...]:
        before = self._progress.state
        update = arrival.update(before, self._rule.sends)
        late = before.version - update.tau
        upload = Upload(
            task=f"task-{arrival.number}",
            attempt="1",
            device=arrival.device,
            trainer="check",
            tau=update.tau,
            base=self._digests[update.tau],
            layout=update.model.layout.signature,
            digest=update.model.digest(),
            size=update.model.layout.nbytes,
            lr=arrival.lr,
            samples=arrival.samples,
            steps=arrival.steps,
            sends=self._rule.sends,
        )
        about: dict[str, Any] = {
            "entry": self._entry(),
            "upload": upload,
            "staleness": late,
            "time": 0.0,
            "received": 0.0,
        }
        payload = update.model.copy()
        step = take(
            self._rule, self._progress, upload, update.model, filled(update.model.layout, 0xFF)
        )
        decision = step.decision
        if decision is None:
            raise RuntimeError("an update without a decision")
        if decision.outcome == "dropped":
            about |= {"outcome": "refused", "reason": decision.reason, "version": before.version}
            return (Taken(**about),)
        self._progress = step.after
        about |= {"outcome": decision.outcome, "weight": decision.weight}
        return Taken(**about, **self._made(before.version)), payload
