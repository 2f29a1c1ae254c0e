"""A run that nothing interrupts, to compare what is remembered of every device with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker import blobs
from fedstream.core.layout import Floats, Layout, Model, vector_of
from fedstream.core.messages import Upload
from fedstream.journal import Taken, segments
from fedstream.journal.progress import Progress, take
from fedstream.journal.rebuild import recovered
from fedstream.strategies import (
    AcedSettings,
    AfaCsSettings,
    Ca2flSettings,
    DeviceVectors,
    FadasSettings,
    FedBuffSettings,
    ScaffoldSettings,
    State,
    Strategy,
)
from fedstream.strategies.optimizers import Adam
from tests.journals import Scribe
from tests.support import Hand, layout_of, model_of, wait_until

M = 10
AFA_CS = AfaCsSettings(buffer_size=2, server_lr=0.5)
SCAFFOLD = ScaffoldSettings(buffer_size=2)
CA2FL = Ca2flSettings(buffer_size=2)
ACED = AcedSettings(buffer_size=2, max_age=2)
FADAS = FadasSettings(buffer_size=2, tau_c=0, delay_adaptive="code")
ADAM = FedBuffSettings(buffer_size=2, server=Adam())
EACH = pytest.mark.parametrize("rule", [AFA_CS, SCAFFOLD, CA2FL, ACED], ids=lambda rule: rule.name)
FIRST, SECOND = "00000001-000000.journal", "00000001-000001.journal"


def layout_for(rule: Strategy, layout: Layout | None = None) -> Layout:
    """The layout of a run by the rule."""
    layout = layout or layout_of(4)
    return layout.with_controls() if rule.build(M).controls else layout


class Twin:
    """The same run without any updater: nothing ever interrupts it."""

    def __init__(self, rule: Strategy, layout: Layout) -> None:
        self.rule = rule.build(M)
        self.layout = layout
        self.progress = Progress(State(0, model_of(layout)))
        self.digests = {0: self.progress.state.model.digest()}
        self.taken = 0

    @property
    def version(self) -> int:
        return self.progress.state.version

    @property
    def vectors(self) -> DeviceVectors | None:
        return self.progress.state.memory.devices

    def values(self) -> list[float]:
        """What the next device sends."""
        drawn = np.random.default_rng(self.taken).standard_normal(self.layout.floats)
        return [float(value) for value in drawn.astype(np.float32)]

    def take(self, upload: Upload, values: list[float]) -> Taken:
        """The next update arrives: its record."""
        model, spare = model_of(self.layout, *values), Model(self.layout)
        step = take(self.rule, self.progress, upload, model, spare)
        self.progress, self.taken = step.after, self.taken + 1
        assert step.decision
        assert step.decision.outcome != "dropped"
        if step.made:
            self.digests[self.version] = step.after.state.model.digest()
        return Taken(
            entry=f"{self.taken}-0",
            upload=upload,
            outcome=step.decision.outcome,
            staleness=step.decision.staleness,
            weight=step.decision.weight,
            version=self.version,
            digest=self.digests[self.version] if step.made else None,
            time=1.0,
            received=1.0,
        )


def files(folder: Path) -> set[str]:
    """The segments that are there."""
    return {path.name for path in folder.glob("*.journal")}


def same(found: DeviceVectors | None, wanted: DeviceVectors | None) -> bool:
    """Whether both remember the same of every device, to the bit."""
    assert found is not None
    assert wanted is not None
    assert (found.devices, found.names) == (wanted.devices, wanted.names)
    keys = [*range(found.devices), *found.names]
    noted = (found.heard, [*found.numbers.items()]) == (wanted.heard, [*wanted.numbers.items()])
    return noted and all(found[key].tobytes() == wanted[key].tobytes() for key in keys)


def on_disk(folder: Path) -> DeviceVectors | None:
    """What an updater that begins now would remember."""
    chain = segments(folder)
    found = recovered(chain[-1])
    for segment in chain:
        segment.close()
    assert found.progress
    return found.progress.state.memory.devices


async def come(hand: Hand, twin: Twin, *devices: int) -> None:
    """These devices answer, one after the other, in the live run and in its twin."""
    for device in devices:
        [trigger] = await hand.open(device=device)
        values = twin.values()
        upload = await hand.trained(trigger, *values, sends="delta")
        await hand.slip_in(upload)
        twin.take(upload, values)
        await wait_until(lambda: so_far(hand, twin))


async def so_far(hand: Hand, twin: Twin) -> bool:
    head = await hand.ledger.head()
    at = (twin.version, len(twin.progress.held))
    return head is not None and (head.version, head.buffered) == at


async def as_the_twin(hand: Hand, twin: Twin) -> None:
    """Every version that was told is the twin's."""
    told = {version.version: version.digest for version in await hand.published()}
    assert told == {version: twin.digests[version] for version in told}
    assert max(told) == twin.version


async def handed_out(hand: Hand, device: int) -> Floats | None:
    """What Redis has of a device."""
    vector = vector_of(np.zeros(hand.layout.parameters, np.float32))
    there = await blobs.recall(hand.client, hand.keys.device(device), vector)
    return vector.floats if there else None


async def handed_out_as(hand: Hand, vectors: DeviceVectors | None) -> bool:
    """Whether Redis has of every device what the vectors say, and of no other."""
    assert vectors is not None
    for device in range(M):
        found = await handed_out(hand, device)
        if device not in vectors.heard:
            assert found is None
        elif found is None or found.tobytes() != vectors[device].tobytes():
            return False
    return True


def two(folder: Path, rule: Strategy, **options: Any) -> Scribe:
    """Three segments; the third has devices 4 and 5, and device 0 to 3 are in the second."""
    scribe = Scribe(folder, rule, layout=layout_for(rule, options.pop("layout", None)), **options)
    for devices in (range(4), (4, 5), (0, 4, 1)):
        for device in devices:
            scribe.update(device, sends="delta")
        if devices != (0, 4, 1):
            scribe.segment()
    scribe.close()
    return scribe
