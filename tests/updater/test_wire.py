"""Encoded updates through coordinator and updater: used if they are sound, else refused.

What is refused is counted by its reason, and the model stays as it was.
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.errors import Undecodable
from fedstream.core.formats import format_of
from fedstream.core.layout import Model, Payload
from fedstream.core.messages import Trigger, Upload
from fedstream.journal import Taken, segments
from fedstream.journal.records import WIRE_FORMATS
from fedstream.journal.replay import Replayer
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.strategies import FedBuffSettings
from tests.support import Hand, context, layout_of, model_of, running, wait_until
from tests.updater.journalled import HALF, records

LAYOUT = layout_of(300)  # two blocks
EACH = FedBuffSettings(buffer_size=1)  # takes deltas
HEAD = 2 * 4  # bytes of the two scales


@pytest.fixture
def hand(hand: Hand) -> Hand:
    hand.layout = LAYOUT
    return hand


@pytest.fixture
def coordinator(hand: Hand, redis: RedisSettings) -> Callable[[], Coordinator]:
    return lambda: Coordinator(
        CoordinatorSettings(),
        LeaseSettings(),
        keys=hand.keys,
        redis=redis,
        name="c",
        anarchic=False,
    )


@asynccontextmanager
async def pipeline(hand: Hand, coordinator: Coordinator, updater: Any) -> AsyncIterator[None]:
    async with running(coordinator, context()), running(updater, context()):
        await hand.join()
        yield


def encoded(name: str, value: float = 1.0) -> bytes:
    return format_of(name).encoded(model_of(LAYOUT, value)).tobytes()


async def written(hand: Hand, task: Trigger, data: bytes, name: str, **changes: object) -> Upload:
    """An update of these bytes; its answer is not said yet."""
    payload = Payload(np.frombuffer(data, np.uint8))
    about = {"format": name, "size": len(data), "digest": payload.digest(), "sends": "delta"}
    upload = await hand.trained(task, write=False, **about | changes)
    await blobs.write(hand.client, hand.keys.update(upload.blob), payload, expire_s=60)
    return upload


async def answered(hand: Hand, data: bytes, name: str, **changes: object) -> Upload:
    """A trainer answers a task with these bytes."""
    [task] = await hand.open()
    upload = await written(hand, task, data, name, **changes)
    await hand.client.call("XADD", hand.keys.inbox("pool"), "*", "m", upload.encode())
    return upload


async def newest(hand: Hand) -> tuple[int, str]:
    head = await hand.ledger.head()
    assert head is not None
    return head.version, head.digest


async def refused(hand: Hand, reason: str) -> None:
    async def is_counted() -> bool:
        return (await hand.ledger.look()).reasons("refused") == {reason: 1}

    await wait_until(is_counted, what=f"refused: {reason}")


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def framed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


NAN, NEGATIVE = (struct.pack("<f", one) for one in (math.nan, -1.0))
FRAME = encoded("int8+zstd")
BOMB = framed(bytes(1 << 28))
BEYOND = struct.pack("<IH", 1, 0x3F80) + b"\xac\x02"  # one value, 300 places on
BY_CONTENT = {  # one for each reason; tests/core/test_formats.py has every way to it
    "negative scale": ("int8", with_bytes(encoded("int8"), 0, NEGATIVE), "wire scale"),
    "scale that is not a number": ("int4", with_bytes(encoded("int4"), 0, NAN), "wire scale"),
    "index beyond the last": ("topk:0.1", BEYOND, "wire index"),
    "more values than announced": ("topk:0.1", struct.pack("<I", 31) + bytes(90), "wire length"),
    "frame with a tail": ("int8+zstd", FRAME + b"\0", "wire length"),
    "bomb": ("int8+zstd", BOMB[:400], "wire bomb"),
    "value that is not a number": (
        "bf16",
        with_bytes(encoded("bf16"), 2, b"\xc0\x7f"),
        "not finite",
    ),
}
BY_WORD = {
    "unknown format": ("int2", encoded("int8"), {}, "wire format"),
    "models in four bits": ("int4", encoded("int4"), {"sends": "model"}, "wire format"),
    "a byte too few": ("int8", encoded("int8")[:-1], {}, "size"),
    "too many values": ("topk:0.01", encoded("topk:0.5"), {}, "size"),
}


@pytest.mark.parametrize("name", BY_CONTENT)
async def test_undecodable_update_never_reaches_the_model(
    name: str, make: Any, coordinator: Callable[[], Coordinator], hand: Hand, folder: Path
) -> None:
    how, data, reason = BY_CONTENT[name]
    async with pipeline(hand, coordinator(), make(EACH)):
        before = await newest(hand)
        bad = await answered(hand, data, how)
        await refused(hand, reason)
        assert await newest(hand) == before
        await answered(hand, encoded(how), how)
        await hand.reaches(1)
        await hand.balanced()
    taken = [one for one in records(folder) if isinstance(one, Taken)]
    assert [(one.outcome, one.reason) for one in taken] == [("refused", reason), ("applied", "")]
    assert (taken[0].upload.task, taken[0].upload.format) == (bad.task, how)


async def test_what_formats_save_is_counted_once(
    make: Any, coordinator: Callable[[], Coordinator], hand: Hand
) -> None:
    sent = {"int8": encoded("int8"), "topk:0.1+zstd": encoded("topk:0.1+zstd")}
    async with pipeline(hand, coordinator(), make(EACH)):
        for number, (how, data) in enumerate(sent.items(), 1):
            upload = await answered(hand, data, how)
            await hand.client.call("XADD", hand.keys.inbox("pool"), "*", "m", upload.encode())
            await hand.reaches(number)
        await answered(hand, model_of(LAYOUT, 2.0).buffer.tobytes(), "f32")
        await hand.reaches(3)
        size = sum(map(len, sent.values()))
        assert (await hand.ledger.look()).encoded == {
            "updates": 2,
            "bytes": size,
            "smaller_by": pytest.approx(2 * 1200 / size, abs=0.01),
        }


@pytest.mark.parametrize("name", BY_WORD)
async def test_impossible_format_is_not_admitted(
    name: str, make: Any, coordinator: Callable[[], Coordinator], hand: Hand, folder: Path
) -> None:
    how, data, changes, reason = BY_WORD[name]
    rule = HALF if changes else EACH
    async with pipeline(hand, coordinator(), make(rule)):
        before = await newest(hand)
        bad = await answered(hand, data, how, **changes)
        await refused(hand, reason)
        assert await newest(hand) == before
        assert not await hand.client.call("EXISTS", hand.keys.update(bad.blob))
        await hand.balanced()
    assert records(folder) == []


@pytest.mark.parametrize("name", BY_WORD)
async def test_updater_refuses_what_admission_should_have(
    name: str, make: Any, hand: Hand, folder: Path
) -> None:
    how, data, changes, reason = BY_WORD[name]
    rule = HALF if changes else EACH
    async with running(make(rule), context()):
        await hand.join()
        [task] = await hand.open()
        await hand.slip_in(await written(hand, task, data, how, **changes))
        await refused(hand, reason)
        assert await hand.version() == 0
        await hand.balanced()
    [taken] = records(folder)
    assert isinstance(taken, Taken)
    assert (taken.outcome, taken.reason) == ("refused", reason)


def test_bomb_takes_no_memory() -> None:
    """The frame says what it holds, and nobody asks for more."""
    assert zstandard.get_frame_parameters(BOMB[:400]).content_size == 1 << 28
    data, into = np.frombuffer(BOMB[:400], np.uint8), Model(LAYOUT)
    tracemalloc.start()
    try:
        with pytest.raises(Undecodable, match="a frame of 268435456 bytes"):
            format_of("int8+zstd").decode(data, into)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


FORMATS = ("f32", "bf16", "int8", "int4", "topk:0.1", "int8+zstd", "f32+zstd")


async def test_trainers_of_one_run_may_use_different_formats(
    make: Any, coordinator: Callable[[], Coordinator], hand: Hand, folder: Path
) -> None:
    wanted = model_of(LAYOUT, 0.0)
    async with pipeline(hand, coordinator(), make(EACH)):
        for version, name in enumerate(FORMATS, 1):
            data = encoded(name, float(version))
            update = Model(LAYOUT)
            format_of(name).decode(np.frombuffer(data, np.uint8), update)
            wanted.floats[:] += update.floats
            await answered(hand, data, name)
            await hand.reaches(version)
        model = await hand.model((await hand.published())[-1])
        assert np.allclose(model.floats, wanted.floats)
        await hand.balanced()
        _, digest = await newest(hand)
    # one for the run, one from the first encoded update on
    assert [WIRE_FORMATS in one.head.needs for one in segments(folder)] == [False, True]
    with Replayer(folder) as replayer:
        digests = [moment.message.digest for moment in replayer if moment.identical]
    assert len(digests) == len(FORMATS)
    assert digests[-1] == digest
    # the next updater goes on from there, in a segment that says so from the beginning
    async with pipeline(hand, coordinator(), make(EACH, name="updater-1")):
        await answered(hand, encoded("int8"), "int8")
        await hand.reaches(len(FORMATS) + 1)
    assert [WIRE_FORMATS in one.head.needs for one in segments(folder)] == [False, True, True]


async def test_emptied_redis_comes_back_with_encoded_updates(
    make: Any, coordinator: Callable[[], Coordinator], hand: Hand
) -> None:
    async with pipeline(hand, coordinator(), make(EACH)):
        for version in (1, 2):
            await answered(hand, encoded("int4"), "int4")
            await hand.reaches(version)
        before = await newest(hand)
    await hand.client.call("FLUSHALL")
    async with running(make(EACH, name="updater-1"), context()):
        await hand.reaches(2)
        assert await newest(hand) == before


async def test_large_update_is_decoded_beside_the_loop(
    make: Any, coordinator: Callable[[], Coordinator], hand: Hand
) -> None:
    hand.layout = layout_of(1_200_000)
    data = format_of("int8").encoded(model_of(hand.layout, 1.0)).tobytes()
    async with pipeline(hand, coordinator(), make(EACH)):
        await answered(hand, data, "int8")
        await hand.reaches(1)
        model = await hand.model((await hand.published())[-1])
        assert np.allclose(model.floats, 1.0)
