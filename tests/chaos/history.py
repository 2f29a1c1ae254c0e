"""What is left of a run: in the journal, computed anew from its beginning, and in Redis."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from broker import blobs
from broker.client import Client
from broker.errors import BlobDamaged, BlobMissing
from broker.keys import Keys
from broker.layout import Model, vector_of
from broker.ledger import Ledger
from broker.messages import RoundEnd, Upload, decode
from broker.records import Head
from tests.chaos.checks import Facts, Journalled
from tests.chaos.watcher import Lives, Watcher
from updater.journal import JournalError, RoundClosed, Taken, segments
from updater.rebuild import recovered
from updater.replay import Replayer
from updater.strategies import DeviceVectors


def journalled(folder: Path) -> Journalled:
    """The records that count and what they give; where it is damaged, as far as that goes."""
    records: list[Taken | RoundClosed] = []
    begun = replayed = (-1, "")
    vectors: DeviceVectors | None = None
    drift = 0.0
    try:
        begun = replayed = _beginning(folder)
        with Replayer(folder) as replayer:
            for moment in replayer:
                records.append(moment.message)
                replayed = moment.version, moment.model.digest()
                vectors = moment.step.after.state.memory.devices
                if moment.identical and vectors is not None:
                    drift = max(drift, _drift(moment.model, vectors))
        again = _recovered(folder)
    except JournalError as error:
        return Journalled(begun, tuple(records), replayed, str(error))
    return Journalled(
        begun, tuple(records), replayed, "", _digests(vectors), _digests(again), drift
    )


def _beginning(folder: Path) -> tuple[int, str]:
    chain = segments(folder)
    for segment in chain:
        segment.close()
    if not chain:
        raise JournalError(f"{folder}: there is no journal")
    return chain[0].standing.version, chain[0].standing.digest


def _recovered(folder: Path) -> DeviceVectors | None:
    """What an updater that begins now would remember of the devices."""
    with ExitStack() as opened:
        chain = [opened.enter_context(segment) for segment in segments(folder)]
        progress = recovered(chain[-1]).progress
    return progress.state.memory.devices if progress else None


def _digests(vectors: DeviceVectors | None) -> dict[int, str]:
    return {d: vector_of(vectors[d]).digest() for d in vectors.heard} if vectors else {}


def _drift(model: Model, vectors: DeviceVectors) -> float:
    """How far c is from the mean of all c_i, at most; 0 for a rule that has no c."""
    if not model.layout.controls:
        return 0.0
    mean = np.mean([vectors[device] for device in range(len(vectors))], axis=0)
    return float(np.abs(model.controls - mean).max())


async def gathered(
    redis: Lives, keys: Keys, journal: Path, watcher: Watcher, *, findings: tuple[str, ...]
) -> Facts:
    """What journal, Redis and the watcher say, once the services have stopped."""
    client = redis.client
    ledger = Ledger(client, keys, "chaos")
    rows = await client.call("XRANGE", keys.queue, "-", "+")
    waiting = [decode(fields[1], Upload, RoundEnd) for _, fields in rows]
    admitted = await client.call("HKEYS", keys.admitted)
    head = await ledger.head()
    counts = await client.call("HGETALL", keys.counts)
    return Facts(
        journal=journalled(journal),
        published=frozenset(watcher.published),
        seen=watcher.seen, life=redis.life,
        queued=frozenset(one.task for one in waiting if isinstance(one, Upload)),
        admitted=frozenset(task.decode() for task in admitted),
        counts={name.decode(): int(n) for name, n in zip(counts[::2], counts[1::2], strict=True)},
        open=await client.call("HLEN", keys.open),
        head=(head.version, head.digest) if head else (-1, ""),
        model=await _model(client, keys, ledger, head) if head else "",
        handed_out=await _handed_out(client, keys, ledger) if head else None,
        findings=findings,
    )  # fmt: skip


async def _model(client: Client, keys: Keys, ledger: Ledger, head: Head) -> str:
    """The digest of what lies in Redis as the newest model."""
    model = Model((await ledger.run()).layout)
    try:
        await blobs.read(client, keys.model(head.blob), model, digest=head.digest)
    except (BlobMissing, BlobDamaged) as error:
        return str(error)
    return model.digest()


async def _handed_out(client: Client, keys: Keys, ledger: Ledger) -> dict[int, str] | None:
    """The digests of what lies in Redis of the devices; None if the rule hands nothing out."""
    run = await ledger.run()
    if not run.layout.controls:
        return None
    found = {}
    for device in range(run.devices):
        vector = vector_of(np.empty(run.layout.parameters, np.float32))
        try:
            if await blobs.recall(client, keys.device(device), vector):
                found[device] = vector.digest()
        except (BlobMissing, BlobDamaged) as error:
            found[device] = str(error)
    return found
