"""The journal lost its end, and an update turns out not to be the lost one.

It was mixed in before its digest could tell. Whatever comes of adopting Redis's version instead,
it must not stay mixed in: it is still in the queue.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.core.errors import Unavailable
from fedstream.core.messages import Upload
from fedstream.core.records import Head
from fedstream.journal import Taken
from fedstream.strategies import AfaCsSettings, FedBuffSettings, Strategy
from fedstream.updater.recovery import Recovery
from fedstream.updater.state import RunState
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import held, records

BUFFER = FedBuffSettings(buffer_size=3)
SILO = AfaCsSettings(buffer_size=3, server_lr=1.0)


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def others_than_the_lost(
    make: Any, hand: Hand, folder: Path, rule: Strategy, *values: float
) -> list[Upload]:
    """The journal has version 1, and lost version 2; the queue has other updates of version 1."""
    aside = folder.with_name("aside")
    async with running(make(rule), context()):
        await hand.join()
        for lost in (False, True):
            for _ in range(3):
                await hand.admitted(9.0, sends="delta")
            await hand.reaches(1 + lost)
            await wait_until(hand.queue_is_empty)
            if not lost:
                shutil.copytree(folder, aside)
    shutil.rmtree(folder)
    shutil.move(aside, folder)
    about = {"sends": "delta", "tau": 1, "base": await hand.ledger.digest(1)}
    return [await hand.admitted(value, **about) for value in values]


@pytest.mark.parametrize("errors", [0, 2])
async def test_no_update_is_mixed_in_twice_after_a_failed_adoption(
    make: Any,
    hand: Hand,
    client: Client,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: int,
) -> None:
    """Redis is emptied while its version is adopted, at once or after it was away."""
    kept = await others_than_the_lost(make, hand, folder, BUFFER, 3.0, 6.0, 30.0)
    real, tries = Recovery.adopt, 0

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        nonlocal tries
        tries += 1
        if tries <= errors:
            raise Unavailable("Redis is away")
        await client.call("FLUSHALL")
        return await real(recovery, state, ahead)

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(make(BUFFER, adopt=True, lease_s=0.4), context()):
        await wait_until(lambda: tries > errors)
        await wait_until(lambda: held(hand, 2))
        await hand.join()
        last = await hand.admitted(12.0, sends="delta")
        await hand.reaches(2)
        version = (await hand.published())[-1]
        model = await hand.model(version)
    assert [update.task for update in version.updates] == [
        kept[0].task,
        kept[1].task,
        last.task,
    ]
    assert model.floats.tolist() == [9.0 + 7.0] * 4  # (3 + 6 + 12) / 3: the 30 went with Redis


async def test_adopting_leaves_no_trace_of_what_was_not_journalled(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices' vectors that it goes on with are the journal's."""
    uploads = await others_than_the_lost(make, hand, folder, SILO, 3.0, 6.0, 30.0)
    journalled = {record.upload.device for record in records(folder) if isinstance(record, Taken)}
    assert not journalled & {upload.device for upload in uploads}
    real, adopted = Recovery.adopt, list[set[int]]()

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        found = await real(recovery, state, ahead)
        vectors = found and found.progress.state.memory.devices
        assert vectors
        adopted.append(set(vectors.heard))
        return found

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(make(SILO, adopt=True), context()):
        await wait_until(lambda: adopted)
    assert adopted == [journalled]
