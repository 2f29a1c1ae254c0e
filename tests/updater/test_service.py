"""The updater against a real Redis: what it publishes, what it refuses, and what it survives."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import BlobMissing, ConfigError
from fedstream.core.layout import Model
from fedstream.core.messages import Event, Upload
from fedstream.core.records import Best
from fedstream.journal import Taken
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, State, Update
from fedstream.strategies.staleness import Constant, Polynomial
from fedstream.updater.intake import BATCH
from tests.support import (
    Hand,
    Proxy,
    context,
    counted,
    full,
    layout_of,
    model_of,
    running,
    wait_until,
    written_in,
)
from tests.updater.journalled import HALF, fails, records, refused

# the run of things


@pytest.mark.parametrize("wrong_s", [3600.0])
async def test_every_update_makes_a_version_that_lists_it(
    make: Any,
    hand: Hand,
    client: Client,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    wrong_s: float,
) -> None:
    """Its time is Redis's, whatever the updater's clock shows."""
    now = time.time
    began = now()
    monkeypatch.setattr(time, "time", lambda: now() + wrong_s)
    async with running(make(FedAsyncSettings(alpha=0.5, staleness=Polynomial(a=1))), context()):
        await hand.join()
        [stale_task] = await hand.open()
        stale = await hand.trained(stale_task, 8.0)  # from version 0
        first = await hand.admitted(4.0)
        await hand.reaches(1)
        assert await hand.admit(stale) == [("admitted", "")]
        await hand.reaches(2)
    zero, one, two = await hand.published()
    assert [v.parent for v in (zero, one, two)] == [None, 0, 1]
    assert [(u.task, u.staleness, u.weight, u.tau) for u in one.updates] == [
        (first.task, 0, 0.5, 0)
    ]
    assert [(u.task, u.staleness, u.weight, u.tau) for u in two.updates] == [
        (stale.task, 1, 0.25, 0)
    ]
    created = (await hand.ledger.run()).created
    assert began <= created <= zero.time <= one.time <= two.time <= now()
    assert (await hand.model(one)).floats.tolist() == [2, 2, 2, 2]
    assert (await hand.model(two)).floats.tolist() == [3.5, 3.5, 3.5, 3.5]
    assert [(e.outcome, e.version, e.staleness, e.weight) for e in await hand.events()] == [
        ("applied", 1, 0, 0.5),
        ("applied", 2, 1, 0.25),
    ]
    head = await hand.ledger.head()
    assert head
    assert head.mean_staleness == pytest.approx(0.1)
    assert await hand.queue() == []
    assert await client.call("EXISTS", keys.queued(first.blob), keys.queued(stale.blob)) == 0
    await hand.balanced()


async def test_small_update_is_read_in_one_exchange(make: Any, hand: Hand) -> None:
    """What admission has checked nobody asks again."""
    updater = make()
    exchanges: list[list[Any]] = []
    real = updater._client.pipeline

    async def pipeline(commands: Any, **options: Any) -> Any:
        exchanges.append([tuple(command) for command in commands])
        return await real(commands, **options)

    updater._client.pipeline = pipeline
    async with running(updater, context()):
        await hand.join()
        upload = await hand.admitted(4.0)
        await hand.reaches(1)
    key = hand.keys.queued(upload.blob)
    about = [some for some in exchanges if any(key in c and c[0] != "EVALSHA" for c in some)]
    assert about == [[("HGET", key, b"size"), ("HGET", key, 0)]]


async def test_long_queue_is_applied_in_order(make: Any, hand: Hand) -> None:
    """Buffers are used again and updates are read ahead: no version may suffer for it.

    Only the newest of what is committed together is written: each of the others is superseded.
    """
    hand.layout = layout_of(1000, integers=1)
    rng = np.random.default_rng(3)
    rule = HALF.build()
    updater = make(keep_versions=64)
    async with running(updater, context()):
        await hand.join()
        state = State(0, model_of(hand.layout))
        digests = [state.model.digest()]
        for trigger in await hand.open(40):
            values = rng.standard_normal(1000)
            upload = await hand.trained(trigger, *values, tau=0)
            head0 = await hand.ledger.digest(0)
            await hand.said(upload.model_copy(update={"base": head0}))
            arrived = Update(model_of(hand.layout, *values), 0, 0, 1, 1, 0.1)
            state, _ = rule.receive(state, arrived, Model(hand.layout))
            digests.append(state.model.digest())
        group = hand.inbox
        for entry in (await group.claim(idle_ms=0, most=9, own=True, count=100))[0]:
            upload = Upload.decode(entry.data)
            assert await hand.ledger.admit(entry, upload, size_limit=1 << 20) == ("admitted", "")
        await hand.reaches(40)
        versions = await hand.published()
        assert [version.digest for version in versions] == digests
        left = (await hand.ledger.kept()).values()
        assert 40 in left
        for number in left:
            await hand.model(versions[number])  # checks the digest
        assert len(updater._intake.spares.models) <= 4 * BATCH


# refusals


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ((1.0, math.nan, 1.0, 1.0), {}, "not finite"),
        ((-math.inf, 1.0, 1.0, math.inf), {}, "not finite"),
        ((6.0, 6.0, 6.0, 6.0), {}, "norm too large"),
        ((1.0,), {"digest": "0" * 64}, "digest"),
        ((1.0,), {"layout": "another"}, "layout"),
        ((1.0,), {"tau": 5}, "unknown base"),
        ((1.0,), {"write": False}, "blob missing"),
    ],
)
async def test_bad_updates_are_refused_counted_and_never_reach_the_model(
    make: Any,
    hand: Hand,
    client: Client,
    keys: Keys,
    values: tuple[float, ...],
    changes: dict[str, Any],
    reason: str,
) -> None:
    with_metrics = context()
    async with running(make(max_norm=10.0), with_metrics):
        await hand.join()
        before = await hand.ledger.head()
        assert before
        [trigger] = await hand.open()
        upload = await hand.trained(trigger, *values, **changes)
        await hand.slip_in(upload)
        await refused(hand, reason)
        told = {"refused": 1, f"refused:{reason}": 1}
        assert await hand.ledger.head() == replace(before, journalled=told)
        assert await hand.queue() == []
        assert await client.call("EXISTS", keys.queued(upload.blob)) == 0
        [event] = await hand.events()
        assert (event.task, event.outcome, event.reason) == (trigger.task, "refused", reason)
        await hand.admitted(1.0)  # and the next one is taken as if nothing had happened
        await hand.reaches(1)
        await hand.balanced()
    labels = {"outcome": "refused", "reason": reason}
    assert counted(with_metrics, "fedstream_updates_total", **labels) == 1


async def test_staleness_is_determined_when_applying(make: Any, hand: Hand) -> None:
    """Both were fresh when they were admitted; the second was read ahead for nothing."""
    strategy = FedAsyncSettings(alpha=0.5, staleness=Constant(), max_staleness=0)
    async with running(make(strategy), context()):
        await hand.join()
    uploads = [await hand.trained(task, 1.0) for task in await hand.open(3)]
    assert await hand.admit(*uploads) == [("admitted", "")] * 3
    updater = make(strategy)
    async with running(updater, context()):
        await refused(hand, "too stale", 2)
        assert await hand.version() == 1
        assert updater._intake.arrived == {}
        await hand.admitted(1.0)
        await hand.reaches(2)
        await hand.balanced()


async def test_queued_junk_becomes_dead_letters(make: Any, hand: Hand, client: Client) -> None:
    async with running(make(), context()):
        await hand.join()
        await client.call("XADD", hand.keys.queue, "*", "m", b"junk")
        await hand.admitted(1.0)
        await hand.reaches(1)
        assert (await hand.ledger.look()).dead == 1
        assert await hand.queue() == []


# what it keeps


async def test_newest_models_are_kept_by_count(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    async with running(make(keep_versions=3), context()):
        await hand.join()
        for number in range(1, 6):
            await hand.admitted(4.0)
            await hand.reaches(number)
        assert list((await hand.ledger.kept()).values()) == [3, 4, 5]
        names = await client.call("KEYS", keys.model("*"))
        assert {name.decode() for name in names} == {
            keys.model(version.blob) for version in (await hand.published())[3:]
        }
        oldest, *_ = await hand.published()
        with pytest.raises(BlobMissing):
            await hand.model(oldest)


async def test_best_and_measured_models_outlast_the_others(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    """Each until there is another one: then it goes with the next version, like any old model."""

    async def measured(version: int, value: float) -> None:
        """Of a version that is the newest meanwhile, as the evaluator reports it."""
        made = (await hand.published())[version]
        found = Best("accuracy", value, version, made.given or made.digest, made.blob)
        assert await hand.ledger.pin(made.blob)
        await hand.ledger.tell(evaluation(version), found, "max")

    async def makes(*numbers: int) -> list[int]:
        for number in numbers:
            await hand.admitted(4.0)
            await hand.reaches(number)
        return list((await hand.ledger.kept()).values())

    async with running(make(keep_versions=2), context()):
        await hand.join()
        assert await makes(1) == [0, 1]
        await measured(1, 0.9)
        assert await makes(2, 3, 4) == [1, 3, 4]
        await measured(4, 0.8)
        assert await hand.ledger.pin((await hand.published())[4].blob)
        assert await makes(5, 6, 7) == [1, 4, 6, 7]
        await hand.ledger.tell(evaluation(4))
        assert await makes(8) == [1, 7, 8]
        await measured(8, 0.95)
        assert await makes(9, 10, 11) == [8, 10, 11]
    async with running(make(keep_versions=2), context()):  # which knows it from Redis
        assert await makes(12, 13) == [8, 12, 13]
        await hand.model((await hand.published())[8])
        names = await client.call("KEYS", keys.model("*"))
        assert len(names) == 3


def evaluation(version: int) -> Event:
    return Event(what="evaluation", service="evaluator", time=1.0, version=version)


@pytest.mark.parametrize(("models", "kept"), [(3.5, [1, 2, 3]), (2.5, [2, 3]), (0, [2, 3])])
async def test_newest_models_are_kept_by_bytes_and_at_least_two(
    make: Any, hand: Hand, models: float, kept: list[int]
) -> None:
    async with running(make(keep_bytes=int(models * hand.layout.nbytes)), context()):
        await hand.join()
        for number in range(1, 4):
            await hand.admitted(4.0)
            await hand.reaches(number)
        assert list((await hand.ledger.kept()).values()) == kept


async def test_full_redis_drops_older_models_and_the_run_continues(
    make: Any, hand: Hand, client: Client, redis: RedisSettings
) -> None:
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()) as updater:
        await hand.join()
        for number in range(1, 4):
            await hand.admitted(4.0)
            await hand.reaches(number)
        made = (await hand.published())[2]
        found = Best("accuracy", 0.9, 2, made.digest, made.blob)
        await hand.ledger.tell(evaluation(2), found)
        proxy.reading.clear()  # memory is to run out while an update waits
        await hand.admitted(4.0)
        async with full(client):
            proxy.reading.set()
            await wait_until(lambda: kept(hand, [3]))
            assert await hand.version() == 3
            freed = await hand.ledger.best()
            assert freed is not None
            assert (freed.version, freed.blob) == (2, None)
            assert not updater.done()
        await hand.reaches(4)
        await hand.balanced()


async def kept(hand: Hand, versions: list[int]) -> bool:
    return list((await hand.ledger.kept()).values()) == versions


# the end


async def test_run_finishes_at_the_last_version_and_gives_up_the_rest(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    async with running(make(versions=3), context()):
        await hand.join()
        uploads = [await hand.trained(task, 4.0) for task in await hand.open(6)]
        assert await hand.admit(*uploads) == [("admitted", "")] * 6
        await hand.reaches(3)
        await wait_until(hand.queue_is_empty)
        view = await hand.ledger.look()
        assert (view.run.state, view.run.why) == ("finished", "version 3 reached")
        assert view.outcomes["applied"] == 3
        assert view.reasons("given_up") == {"run finished": 3}
        assert view.open == ()
        assert await client.call("KEYS", keys.queued("*")) == []
        await hand.balanced()


async def test_externally_finished_run_accepts_no_updates(make: Any, hand: Hand) -> None:
    updater = make()
    async with running(updater, context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        upload = await hand.trained((await hand.open())[0], 4.0)
        await hand.ledger.finish("accuracy 0.9 reached")
        await wait_until(lambda: updater._loop.state.finished)
        await hand.slip_in(upload)  # was admitted in the last moment
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 1
        assert (await hand.ledger.look()).reasons("given_up") == {"run finished": 1}
        await hand.balanced()


async def test_strategy_must_match_the_runs(make: Any, hand: Hand) -> None:
    async with running(make(), context()):
        await hand.reaches(0)
    await fails(make(FedAvgSettings()), ConfigError, r"strategy\.name: .* created with fedasync")


async def test_stopping_releases_the_role(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    stopping = context()
    async with running(make(), stopping) as updater:
        await hand.reaches(0)
        stopping.stop.set()
        await wait_until(updater.done, what="it ends")
        assert await client.call("EXISTS", keys.leader("updater")) == 0


async def test_updater_is_alive_during_a_slow_version_0(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.updater.recovery._BEAT_S", 0.01)
    ready, watched, beats = threading.Event(), context(), list[str]()
    monkeypatch.setattr(watched.health, "beat", beats.append)
    updater = make()
    create_run = updater._create_run

    def slowly() -> Any:
        assert ready.wait(60)
        return create_run()

    monkeypatch.setattr(updater, "_create_run", slowly)
    async with running(updater, watched):
        await wait_until(lambda: beats.count("queue") > 5)
        assert await hand.version() == -1
        ready.set()
        await hand.reaches(0)


# chunks of other sizes, of other releases


TWO_CHUNKS = layout_of(CHUNK // 4 + 10)  # two of our chunks


async def test_update_with_other_chunk_sizes_is_applied(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    """The journal says nothing about chunks: it has the bytes themselves."""
    hand.layout = TWO_CHUNKS
    async with running(make(), context()):
        await hand.join()
        [trigger] = await hand.open()
        upload = await hand.trained(trigger, 4.0, write=False)
        key = hand.keys.update(upload.blob)
        chunks = await written_in(client, key, model_of(TWO_CHUNKS, 4.0), 1 << 17)
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
    hand.layout = TWO_CHUNKS
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
