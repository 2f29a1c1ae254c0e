"""Devices' vectors in a live run, and in Redis."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.scripts import Script
from fedstream.core.errors import BlobDamaged, ConfigError, Fenced
from fedstream.journal import VECTORS, Taken, segments
from fedstream.journal.replay import Replayer
from fedstream.strategies import Strategy
from fedstream.strategies.optimizers import ServerSgd
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.journalled import fails, held, reasons, records
from tests.updater.vectors.twin import (
    ACED,
    ADAM,
    AFA_CS,
    CA2FL,
    FADAS,
    SCAFFOLD,
    M,
    Twin,
    as_the_twin,
    come,
    handed_out,
    handed_out_as,
    on_disk,
    same,
    so_far,
)


@pytest.mark.parametrize(
    "rule", [AFA_CS, SCAFFOLD, ADAM, CA2FL, ACED, FADAS], ids=lambda rule: rule.name
)
async def test_updater_killed_between_checkpoints_gives_the_same_bits(
    make: Any, hand: Hand, folder: Path, rule: Strategy, twin: Twin
) -> None:
    few = {"segment_versions": 2}
    async with running(make(rule, **few), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2, 3, 0, 1, 0)  # the last one is buffered
    assert same(on_disk(folder), twin.vectors)
    async with running(make(rule, **few), context()):
        await come(hand, twin, 3, 2)
    async with running(make(rule, **few), context()):
        await come(hand, twin, 0, 2, 1, 0, 1)
    await as_the_twin(hand, twin)
    assert same(on_disk(folder), twin.vectors)
    chain = segments(folder)
    assert all(segment.head.needs == (VECTORS,) for segment in chain[1:])
    built = rule.build(M)
    devices = built.remembered or 0
    named = {*range(devices, devices + len(built.vector_names))}
    assert not devices or any(segment.standing.elsewhere for segment in chain)
    for before, segment in pairwise(chain):  # of each what changed, and no more
        written = [record.message for record in before.records(segment.follows)]
        heard = {message.upload.device for message in written if isinstance(message, Taken)}
        cleared = {*segment.standing.here} - heard - named
        assert {*segment.standing.here} == (heard | cleared if devices else set()) | named
        assert not cleared or rule is ACED
    with Replayer(folder) as replayer:
        made = {m.version: m.model.digest() for m in replayer if m.identical}
    assert made == {n: digest for n, digest in twin.digests.items() if n}


async def test_number_of_devices_cannot_change_on_restart(make: Any, hand: Hand) -> None:
    async with running(make(AFA_CS), context()):
        await hand.join()
    fewer = AFA_CS.model_copy(update={"devices": 4})
    await fails(make(fewer), ConfigError, r"strategy\.devices: run .* with 10, not 4")


async def test_optimizer_with_other_vectors_is_refused_on_restart(make: Any, hand: Hand) -> None:
    async with running(make(ADAM), context()):
        await hand.join()
    plain = ADAM.model_copy(update={"server": ServerSgd()})
    said = r"strategy: run .* keeps other vectors .*\(adam m and adam v, not no vectors\)"
    await fails(make(plain), ConfigError, said)


# handed out


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_is_in_redis_before_its_task_ends(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    commit = Script("commit")._sha.encode()
    async with Proxy(redis) as proxy, running(make(rule, redis=proxy.settings), context()):
        await hand.join()
        await come(hand, twin, 3)
        assert await handed_out_as(hand, twin.vectors)
        proxy.refuse = lambda data: commit in data
        [trigger] = await hand.open(device=4)
        values = twin.values()
        upload = await hand.trained(trigger, *values, sends="delta")
        await hand.slip_in(upload)
        twin.take(upload, values)
        await wait_until(lambda: handed_out_as(hand, twin.vectors))
        assert trigger.task in {task.task for task in (await hand.ledger.look()).open}
        proxy.refuse = None
        await hand.reaches(1)


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_controls_are_restored_after_a_restart_and_an_emptied_redis(
    make: Any, hand: Hand, client: Client, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule, lease_s=0.4), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2)
        await client.call("FLUSHALL")
        await hand.reaches(1)  # whoever sees the version finds the controls
        assert await handed_out_as(hand, twin.vectors)
    await client.call("HSET", hand.keys.device(1), "0", bytes(16))  # half-written when it died
    await client.call("DEL", hand.keys.device(2))
    async with running(make(rule, lease_s=0.4), context()):
        await wait_until(lambda: whole(hand))
        assert await handed_out_as(hand, twin.vectors)
        await hand.join()
        await come(hand, twin, 1)
        assert await handed_out_as(hand, twin.vectors)
    assert (await hand.published())[-1].digest == twin.digests[2]


async def whole(hand: Hand) -> bool:
    try:
        return await handed_out(hand, 1) is not None and await handed_out(hand, 2) is not None
    except BlobDamaged:
        return False


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_of_a_buffered_update_is_restored_with_it(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path, rule: Strategy, twin: Twin
) -> None:
    async with Proxy(redis) as proxy:
        async with running(make(rule, redis=proxy.settings), context()):
            await hand.join()
            proxy.refuse = lambda data: hand.keys.device(5).encode() in data
            [trigger] = await hand.open(device=5)
            values = twin.values()
            upload = await hand.trained(trigger, *values, sends="delta")
            await hand.slip_in(upload)
            twin.take(upload, values)
            await wait_until(lambda: len(records(folder)) == 1)
        assert await handed_out(hand, 5) is None
        assert not await held(hand, 1)  # journalled, and Redis knows nothing of it
    async with running(make(rule), context()):
        await wait_until(lambda: held(hand, 1))
        assert await handed_out_as(hand, twin.vectors)
        await wait_until(hand.queue_is_empty)
        await come(hand, twin, 5)
        assert await handed_out_as(hand, twin.vectors)
    await as_the_twin(hand, twin)
    assert len(records(folder)) == 2


@pytest.mark.parametrize("rule", [SCAFFOLD.model_copy(update={"max_staleness": 0})])
async def test_refused_update_hands_out_nothing(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    hand_out = Script("hand_out")._sha.encode()
    handed_out = 0

    def counted(data: bytes) -> bool:
        nonlocal handed_out
        handed_out += hand_out in data
        return False

    async with Proxy(redis) as proxy, running(make(rule, redis=proxy.settings), context()):
        proxy.refuse = counted
        await hand.join()
        await come(hand, twin, 3, 4)
        before = handed_out
        assert before >= 2
        [trigger] = await hand.open(device=3)
        base = (await hand.published())[0]
        await hand.slip_in(
            await hand.trained(trigger, *twin.values(), sends="delta", tau=0, base=base.digest)
        )
        await wait_until(lambda: reasons(hand, "refused", {"too stale": 1}))
        assert handed_out == before
        assert await handed_out_as(hand, twin.vectors)


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_trainers_ignore_a_fenced_updaters_vectors(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    """It sleeps past its lease between its record and its commit; what it had sent comes late."""
    hand_out = Script("hand_out")._sha.encode()
    late: list[bytes] = []

    def asleep(data: bytes) -> bool:
        if hand_out in data:
            late.append(data)
            proxy.reading.clear()
        return hand_out in data

    async with Proxy(redis) as proxy:
        sleeper = make(rule, name="sleeper", redis=proxy.settings, lease_s=0.4)
        async with running(sleeper, context(), may_fail=True) as work:
            await hand.join()
            await come(hand, twin, 3)
            proxy.refuse = asleep
            [trigger] = await hand.open(device=3)
            values = twin.values()
            upload = await hand.trained(trigger, *values, sends="delta")
            await hand.slip_in(upload)
            twin.take(upload, values)
            await wait_until(lambda: late)
            async with running(make(rule, name="successor"), context()):
                await wait_until(lambda: so_far(hand, twin))
                await come(hand, twin, 3)
                await arrives(hand, late[0])
                assert await handed_out_as(hand, twin.vectors)
                proxy.refuse = None
                proxy.reading.set()
                await wait_until(work.done, what="it ends")
                error = work.exception()
                assert isinstance(error, BaseExceptionGroup)
                assert error.split(Fenced)[1] is None
                assert await handed_out_as(hand, twin.vectors)
                assert await hand.client.call("PTTL", hand.keys.device(3)) == -1
    await as_the_twin(hand, twin)


async def arrives(hand: Hand, data: bytes) -> None:
    """What was under way when its sender's connection was cut; Redis says that it is fenced."""
    host, _, port = hand.client.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            while b"fenced" not in await reader.readline():
                assert not reader.at_eof()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("rule", [SCAFFOLD])
@pytest.mark.parametrize("lost", ["its end", "all of it"])
async def test_adopting_redis_model_adopts_its_controls(
    lost: str, make: Any, hand: Hand, folder: Path, tmp_path: Path, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await come(hand, twin, 0, 1)
        shutil.copytree(folder, tmp_path / "copy")
        await come(hand, twin, 1, 2)
    shutil.rmtree(folder)
    if lost == "its end":
        shutil.move(tmp_path / "copy", folder)
    async with running(make(rule, adopt=True), context()):
        await wait_until(lambda: adopted(folder))
        assert await handed_out_as(hand, twin.vectors)
        await come(hand, twin, 0, 2)
    assert same(on_disk(folder), twin.vectors)
    assert (await hand.published())[-1].digest == twin.digests[3]


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_is_the_mean_again_after_an_abandoned_batch(
    make: Any, hand: Hand, folder: Path, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2)  # the last one is buffered
    shutil.rmtree(folder)
    async with running(make(rule, adopt=True), context()):
        await wait_until(lambda: adopted(folder))
    async with running(make(rule), context()):  # which has it from the segment's beginning
        for device in (3, 0):
            [trigger] = await hand.open(device=device)
            await hand.slip_in(await hand.trained(trigger, *twin.values(), sends="delta"))
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    vectors = on_disk(folder)
    assert vectors is not None
    assert vectors.heard == {0, 1, 2, 3}
    c = (await hand.model((await hand.published())[-1])).controls
    mean = np.mean([vectors[device] for device in range(M)], axis=0)
    assert c.tolist() == pytest.approx(mean.tolist(), abs=1e-6)
    with Replayer(folder) as replayer:  # from the adopted version on
        assert [m.version for m in replayer if m.identical] == [2]


def adopted(folder: Path) -> bool:
    chain = segments(folder)
    return bool(chain) and chain[-1].standing.why == "adopted"
