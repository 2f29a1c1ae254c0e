"""What is left of a run: in the journal, computed anew from its beginning, and in Redis."""

from __future__ import annotations

from pathlib import Path

from broker import blobs
from broker.client import Client
from broker.errors import BlobDamaged, BlobMissing
from broker.keys import Keys
from broker.layout import Model
from broker.ledger import Head, Ledger
from broker.messages import RoundEnd, Upload, decode
from tests.chaos.checks import Facts, Journalled
from tests.chaos.watcher import Lives, Watcher
from updater.journal import JournalError, RoundClosed, Taken, segments
from updater.replay import Replayer


def journalled(folder: Path) -> Journalled:
    """The records that count and what they give; where it is damaged, as far as that goes."""
    records: list[Taken | RoundClosed] = []
    begun = replayed = (-1, "")
    try:
        begun = replayed = _beginning(folder)
        with Replayer(folder) as replayer:
            for moment in replayer:
                records.append(moment.message)
                replayed = moment.version, moment.model.digest()
    except JournalError as error:
        return Journalled(begun, tuple(records), replayed, str(error))
    return Journalled(begun, tuple(records), replayed, "")


def _beginning(folder: Path) -> tuple[int, str]:
    chain = segments(folder)
    for segment in chain:
        segment.close()
    if not chain:
        raise JournalError(f"{folder}: there is no journal")
    return chain[0].standing.version, chain[0].standing.digest


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
