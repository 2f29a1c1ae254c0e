"""What is left of a run: in the journal, in the trainers' notes, and in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path

import msgpack
import numpy as np

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.published import read_newest
from fedstream.core.errors import BlobDamaged, BlobMissing, FedstreamError
from fedstream.core.layout import Model, vector_of
from fedstream.core.records import Head
from fedstream.journal import JournalError, segments
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.strategies import DeviceVectors
from tests.chaos.account import accounted, notes_of
from tests.chaos.checks import Facts, Production
from tests.chaos.effects import lived
from tests.chaos.unsent import disagreements
from tests.support import EveryRole


def replayed(folder: Path, like: str = "") -> Production:
    """What the project's replay and recovery give. ``like``: a digest, made as the run's are."""
    reached = (-1, "")
    try:
        with Replayer(folder) as replayer:
            for moment in replayer:
                reached = moment.version, moment.model.digest_like(like)
        with ExitStack() as opened:
            chain = [opened.enter_context(segment) for segment in segments(folder)]
            progress = recovered(chain[-1]).progress
    except (JournalError, IndexError) as error:
        return Production(reached, str(error) or "there is no journal")
    return Production(reached, "", _digests(progress.state.memory.devices if progress else None))


def _digests(vectors: DeviceVectors | None) -> dict[int, str]:
    return {d: vector_of(vectors[d]).digest() for d in vectors.heard} if vectors else {}


async def gathered(
    client: Client,
    keys: Keys,
    journal: Path,
    *,
    notes: Path | None = None,
    told: AbstractSet[tuple[int, str]] = frozenset(),
    files: Sequence[Path] = (),
    forged: AbstractSet[tuple[str, str]] = frozenset(),
    was_full: bool = False,
    findings: tuple[str, ...],
) -> Facts:
    """What journal and Redis say, once the services have stopped.

    ``notes``: the trainers' own account; ``told``: versions as a watcher saw them; ``files``:
    Redis's append-only ones. Without them, less can be held against the journal. ``was_full``:
    Redis was, for a while.
    """
    ledger = EveryRole(client, keys, "chaos")
    rows = await client.call("XRANGE", keys.queue, "-", "+")
    waiting = [msgpack.unpackb(fields[1], use_list=False) for _, fields in rows]
    admitted = await client.call("HKEYS", keys.admitted)
    head = await ledger.head()
    counts = await client.call("HGETALL", keys.counts)
    noted = notes_of(notes) if notes else None
    account = accounted(journal, noted)
    lives = tuple(lived(file, fell_back=number > 0) for number, file in enumerate(files))
    return Facts(
        account=account,
        production=replayed(journal, account.model),
        lives=lives,
        unsent=tuple(disagreements(lives, noted or {}, account.shape, was_full=was_full)),
        forged=frozenset(forged),
        told=frozenset(told),
        counts={name.decode(): int(n) for name, n in zip(counts[::2], counts[1::2], strict=True)},
        open=await client.call("HLEN", keys.open),
        queued=frozenset(one["task"] for one in waiting if one["k"] == "upload"),
        admitted=frozenset(task.decode() for task in admitted),
        head=(head.version, head.digest) if head else (-1, ""),
        model=await _model(client, keys, ledger, head) if head else "",
        quarantines=_quarantines(head) if head else (0, frozenset()),
        scale=head.step.scale if head and head.step else None,
        handed_out=await _handed_out(client, keys, ledger) if head else None,
        findings=findings,
    )


async def _model(client: Client, keys: Keys, ledger: EveryRole, head: Head) -> str:
    """The digest of what lies in Redis as the newest model, by which devices know it."""
    model = Model((await ledger.run()).layout)
    try:
        await read_newest(client, keys, head, model)
    except (BlobMissing, BlobDamaged) as error:
        return str(error)
    return head.given if head.encoded else model.digest_like(head.digest)


def _quarantines(head: Head) -> tuple[int, frozenset[int]]:
    return head.quarantines.taken, frozenset(head.quarantines.by_device)


async def _handed_out(client: Client, keys: Keys, ledger: EveryRole) -> dict[int, str] | None:
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
        except FedstreamError as error:
            found[device] = str(error)
    return found
