"""Trainers and updaters of releases that write chunks of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client
from fedstream.journal import Taken
from tests.support import Hand, context, counted, layout_of, model_of, running, written_in
from tests.updater.journalled import records

LARGE = layout_of(CHUNK // 4 + 10)  # two of our chunks


async def test_update_with_other_chunk_sizes_is_applied(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    """The journal says nothing about chunks: it has the bytes themselves."""
    hand.layout = LARGE
    async with running(make(), context()):
        await hand.join()
        [trigger] = await hand.open()
        upload = await hand.trained(trigger, 4.0, write=False)
        key = hand.keys.update(upload.blob)
        chunks = await written_in(client, key, model_of(LARGE, 4.0), 1 << 17)
        said = upload.model_copy(update={"chunks": chunks})
        assert await hand.admit(said) == [("admitted", "")]
        await hand.reaches(1)
        version = (await hand.published())[-1]
        assert set((await hand.model(version)).floats.tolist()) == {2.0}
        await hand.balanced()
    [taken] = [one for one in records(folder) if isinstance(one, Taken)]
    assert (taken.upload, taken.outcome) == (upload, "applied")


async def test_model_with_other_chunk_sizes_is_complete(
    make: Any, hand: Hand, client: Client
) -> None:
    """After an updater of another release, ours goes on from its model and writes none again."""
    hand.layout = LARGE
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
    version = (await hand.published())[-1]
    model, key = await hand.model(version), hand.keys.model(version.blob)
    await client.call("UNLINK", key)
    chunks = await written_in(client, key, model, 1 << 17)
    await client.call("HSET", hand.keys.head, "chunks", chunks)
    about = context()
    async with running(make(), about):
        await hand.admitted(6.0)
        await hand.reaches(2)
    assert counted(about, "fedstream_models_repaired_total") == 0
    assert [one.version for one in await hand.published()] == [0, 1, 2]
    assert [one.chunks for one in await hand.published()] == [2, 2, 2]
