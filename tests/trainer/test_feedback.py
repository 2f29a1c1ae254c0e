"""What a format leaves unsent of a device's update goes into its next one, exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.ledger.trainer import TrainerLedger
from fedstream.broker.streams import Entry
from fedstream.core.errors import ConfigError
from fedstream.core.formats import format_of
from fedstream.core.layout import Floats, Model
from fedstream.core.messages import POOL, Upload
from fedstream.runtime.service import Context
from fedstream.trainer.metrics import TrainerMetrics
from fedstream.trainer.saved_work import Feedback
from fedstream.trainer.settings import TrainerSettings
from tests.support import Hand, context, counted, running
from tests.trainer.adding import Make, answers

ONE_OF_FOUR = format_of("topk:0.25")
FROM_ZERO = "fedstream_trainer_feedback_from_zero_total"


async def sent(hand: Hand, upload: Upload) -> list[float]:
    """The parameters that the updater would decode."""
    chunk = await hand.client.call("HGET", hand.keys.update(upload.blob), 0)
    model = Model(hand.layout)
    format_of(upload.format).decode(np.frombuffer(chunk, np.uint8), model)
    return [float(value) for value in model.parameters]


async def asks(hand: Hand, device: int, count: int) -> Upload:
    """A task for a device: its answer, which is the run's ``count``-th."""
    await hand.open(device=device)
    upload = (await answers(hand, count))[-1]
    assert isinstance(upload, Upload)
    return upload


async def workspaces(hand: Hand) -> list[str]:
    names = await hand.client.call("KEYS", hand.keys.workspace(POOL, "*"))
    return sorted(name.decode().rpartition("/")[2] for name in names)


async def test_pool_makes_up_for_what_another_replica_left_unsent(hand: Hand, make: Make) -> None:
    await hand.create(sends="delta")
    first, second = context(), context()
    async with running(make("t1", wire=ONE_OF_FOUR), first):
        one = await asks(hand, 3, 1)
    async with running(make("t2", wire=ONE_OF_FOUR), second):
        two = await asks(hand, 3, 2)
        other = await asks(hand, 4, 3)
    assert one.format == "topk:0.25"
    assert await sent(hand, one) == [1, 0, 0, 0]
    assert await sent(hand, two) == [0, 2, 0, 0]
    assert await sent(hand, other) == [1, 0, 0, 0]
    assert (counted(first, FROM_ZERO), counted(second, FROM_ZERO)) == (1, 1)
    assert await workspaces(hand) == ["unsent.3", "unsent.4"]  # nothing staged is left
    expiry = await hand.client.call("PTTL", hand.keys.workspace(POOL, "unsent.3"))
    assert 0 < expiry <= 3_600_000


async def test_owner_remembers_by_itself(hand: Hand, make: Make) -> None:
    await hand.create(sends="delta")
    settings, life = TrainerSettings(owns=(3,)), context()
    async with running(make("owner", settings=settings, wire=ONE_OF_FOUR), life):
        await hand.announce("owner", 3)
        updates = [await sent(hand, await asks(hand, 3, n)) for n in (1, 2, 3)]
    assert updates == [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 0]]
    assert counted(life, FROM_ZERO) == 1
    assert await workspaces(hand) == []
    async with running(make("owner", settings=settings, wire=ONE_OF_FOUR), context()):
        assert await sent(hand, await asks(hand, 3, 4)) == [1, 0, 0, 0]  # lost with the process


async def test_formats_fit_for_models_feed_nothing_back(hand: Hand, make: Make) -> None:
    await hand.create(sends="delta")
    life = context()
    async with running(make(wire=format_of("int8")), life):
        assert await sent(hand, await asks(hand, 3, 1)) == [1, 1, 1, 1]
    assert await workspaces(hand) == []
    assert counted(life, FROM_ZERO) == 0


async def test_run_that_takes_models_takes_no_format_of_changes(hand: Hand, make: Make) -> None:
    await hand.create()
    with pytest.raises(ConfigError, match=r"wire.update = 'topk:0.25': .* topk is too coarse for"):
        await make(wire=ONE_OF_FOUR).run(context())


# one answer, by hand

UNSENT = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture
def life() -> Context:
    return context()


def feedback(hand: Hand, life: Context, **settings: object) -> Feedback:
    return Feedback(
        hand.client,
        TrainerLedger(hand.client, hand.keys, "t"),
        hand.keys,
        TrainerSettings.model_validate(settings),
        4,
        TrainerMetrics(life.registry),
        life.log,
    )


async def answered(hand: Hand, kept: Feedback, unsent: Floats, *, again: bool = False) -> list[str]:
    """A device's update is answered with what it left unsent: what was said each time."""
    await hand.open(device=3)
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task)
    said = []
    for _ in range(2 if again else 1):
        keys = await kept.stage(3, upload.attempt, unsent)
        said.append(await hand.outbox.answer(hand.keys.tasks, entry, upload, renamed=keys))
    kept.answered(3, unsent, said="said" in said)
    return said


def lost(life: Context, reason: str) -> float:
    """How often error feedback was lost for this reason."""
    return counted(life, "fedstream_trainer_feedback_lost_total", reason=reason)


async def test_answer_repeated_keeps_what_it_left_unsent_once(hand: Hand, life: Context) -> None:
    await hand.create(sends="delta")
    kept = feedback(hand, life)
    assert await answered(hand, kept, UNSENT, again=True) == ["said", "over"]
    found = await kept.of(3)
    assert found is not None
    assert found.tolist() == UNSENT.tolist()
    assert await workspaces(hand) == ["unsent.3"]


async def test_attempt_that_lost_its_lease_leaves_it_as_it_was(hand: Hand, life: Context) -> None:
    await hand.create(sends="delta")
    kept = feedback(hand, life)
    await answered(hand, kept, UNSENT)
    upload = await hand.trained(hand.trigger(device=3))
    stale = Entry("0-1", b"")
    keys = await kept.stage(3, upload.attempt, 2 * UNSENT)
    assert await hand.outbox.answer(hand.keys.tasks, stale, upload, renamed=keys) == "over"
    found = await kept.of(3)
    assert found is not None
    assert found.tolist() == UNSENT.tolist()
    assert await workspaces(hand) == ["unsent.3"]


async def test_without_room_the_next_update_begins_from_zero(hand: Hand, life: Context) -> None:
    """What was kept before is in the update that was just said: it must not stay."""
    await hand.create(sends="delta")
    await answered(hand, feedback(hand, context()), UNSENT)
    tight = feedback(hand, life, workspace_bytes=15)
    assert await answered(hand, tight, UNSENT) == ["said"]
    assert lost(life, "no room") == 1
    assert await workspaces(hand) == []
    assert await feedback(hand, context()).of(3) is None


async def test_full_redis_keeps_none_and_takes_the_answer(
    hand: Hand, life: Context, any_redis: RedisSettings
) -> None:
    await hand.create(sends="delta")
    used, _ = await hand.ledger.memory()
    kept = feedback(hand, life)
    await hand.client.call("CONFIG", "SET", "maxmemory", 2 * used - (1 << 16))
    try:
        assert await answered(hand, kept, UNSENT) == ["said"]
    finally:
        await hand.client.call("CONFIG", "SET", "maxmemory", 0)
    assert await workspaces(hand) == []
    assert lost(life, "no room") == 1
    assert await answered(hand, kept, UNSENT) == ["said"]
    assert lost(life, "no room") == 1


@pytest.mark.parametrize(
    "data", [b"", b"123", bytes(15), bytes(17), np.full(4, np.nan, "<f4").tobytes()]
)
async def test_unusable_feedback_counts_as_zero(hand: Hand, life: Context, data: bytes) -> None:
    await hand.create(sends="delta")
    kept = feedback(hand, life)
    await hand.client.call("SET", hand.keys.workspace(POOL, "unsent.3"), data)
    assert await kept.of(3) is None
    assert counted(life, FROM_ZERO) == 1
    assert lost(life, "unusable") == (data != b"")


async def test_owner_forgets_where_an_answer_may_have_been_said(hand: Hand, life: Context) -> None:
    kept = feedback(hand, life, owns=(3, 4))
    kept.answered(3, UNSENT, said=True)
    kept.answered(4, UNSENT, said=True)
    kept.answered(3, 2 * UNSENT, said=False)
    kept.answered(3, 2 * UNSENT, said=False)
    assert lost(life, "in doubt") == 1
    assert await kept.of(3) is None
    assert await kept.of(4) is UNSENT


async def test_owners_memory_is_bounded(hand: Hand, life: Context) -> None:
    """Two devices' fit: that of the one answered longest ago is dropped."""
    kept = feedback(hand, life, owns=(3, 4, 5), feedback_bytes=40)
    for device in (3, 4, 3, 5):
        kept.answered(device, UNSENT, said=True)
    assert lost(life, "no room") == 1
    assert [await kept.of(device) is not None for device in (3, 4, 5)] == [True, False, True]


async def test_what_an_outlier_left_is_counted_once_it_is_not_sent(hand: Hand, make: Make) -> None:
    """Nobody has so much left unsent of usual updates: the receiver refused what it was left of."""
    await hand.create(sends="delta")
    life, outlier = context(), np.full(4, 1e6, "<f4")
    await hand.client.call("SET", hand.keys.workspace(POOL, "unsent.3"), outlier.tobytes())
    async with running(make("t1", wire=ONE_OF_FOUR), life):
        assert await sent(hand, await asks(hand, 3, 1)) == [1, 0, 0, 0]
        assert await sent(hand, await asks(hand, 3, 2)) == [0, 2, 0, 0]
    assert (lost(life, "outlier"), counted(life, FROM_ZERO)) == (1, 0)
