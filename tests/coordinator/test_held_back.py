"""What holds the scheduler back is shown for as long as it does."""

from __future__ import annotations

from fedstream.broker.client import Client, RedisSettings
from fedstream.coordinator.policies import InFlight
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings
from fedstream.coordinator.scheduling import HELD_BY
from tests.support import Hand, context, running, wait_until


async def test_held_back_shows_each_reason_only_while_it_applies(
    hand: Hand, redis: RedisSettings, client: Client
) -> None:
    await hand.create()
    await hand.scheduler.release()
    scheduler = Scheduler(
        SchedulerSettings(max_queue=4),
        InFlight(n=3),
        keys=hand.keys,
        redis=redis,
        name="scheduler-0",
        seed=7,
    )
    watched = context()

    def shown() -> dict[str, float | None]:
        value = watched.registry.get_sample_value
        return {by: value("fedstream_held_back", {"by": by}) for by in HELD_BY}

    free = dict.fromkeys(HELD_BY, 0.0)
    async with running(scheduler, watched):
        await wait_until(lambda: shown() == free)
        await client.pipeline([("XADD", hand.keys.queue, "*", "m", b"x") for _ in range(4)])
        await hand.announce("ann")  # an event, at which it looks
        await wait_until(lambda: shown() == free | {"queue": 1.0})
        await client.call("XTRIM", hand.keys.queue, "MAXLEN", 0)
        await hand.announce("bob")
        await wait_until(lambda: shown() == free)
