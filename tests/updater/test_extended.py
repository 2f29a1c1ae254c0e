"""A finished run goes on, because it is to have more versions by now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.core.records import Run
from fedstream.journal import segments
from fedstream.journal.replay import Replayer
from fedstream.updater.service import Updater
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import backed_up, go_back, has_compared, makes, reasons, records


async def ends(hand: Hand, make: Any) -> None:
    """The run makes its two versions. One task stays open, and another's answer comes too late."""
    async with running(make(versions=2, start="other@7 digest"), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        _, answered = await hand.open(2)
        late = await hand.trained(answered, 8.0)
        await hand.admitted(4.0)
        await hand.reaches(2)
        await hand.slip_in(late)
        await wait_until(lambda: reasons(hand, "given_up", {"run finished": 1}))


async def is_now(hand: Hand, state: str, versions: int) -> Run:
    """The run's record, as soon as Redis has this."""

    async def found() -> Run | None:
        run = await hand.ledger.run()
        return run if (run.state, run.versions) == (state, versions) else None

    run: Run = await wait_until(found)
    return run


async def compared(updater: Updater) -> None:
    """It has found Redis where the journal is."""
    await wait_until(lambda: hasattr(updater, "_loop") and has_compared(updater))


def standings(folder: Path) -> list[tuple[int, int, str | None, str]]:
    """Each segment: its first version, the last to make, why the run is over, where it is from."""
    chain = segments(folder)
    for segment in chain:
        segment.close()
    return [(s.standing.version, s.head.versions, s.standing.finished, s.head.start) for s in chain]


@pytest.mark.parametrize("emptied", [False, True])
async def test_finished_run_is_extended(
    make: Any, hand: Hand, client: Client, folder: Path, emptied: bool
) -> None:
    await ends(hand, make)
    before = await hand.ledger.look()
    if emptied:
        await client.call("FLUSHALL")
    async with running(make(goal=4), context()):
        await hand.reaches(2)
        run = await is_now(hand, "running", 4)
        assert (run.why, run.finished, run.start) == (None, None, "other@7 digest")
        view = await hand.ledger.look()
        assert view.outcomes["applied"] == 2
        # The task that was open is so still, unless it went with Redis.
        assert (view.issued, len(view.open)) == (before.issued, not emptied)
        assert view.reasons("given_up").get("lost with Redis", 0) == emptied
        await hand.balanced()
        await hand.join()
        for n in (3, 4):
            await hand.admitted(4.0)
            await hand.reaches(n)
            await hand.balanced()
        run = await is_now(hand, "finished", 4)
        assert run.why == "version 4 reached"
    over = "version 2 reached"
    assert standings(folder)[:3] == [
        (0, 2, None, "other@7 digest"),
        (2, 2, over, "other@7 digest"),
        (2, 4, None, "other@7 digest"),
    ]
    assert [one.finished for one in records(folder)] == [None, over, None, None, run.why]
    with Replayer(folder) as replayer:
        assert [moment.version for moment in replayer] == [1, 2, 2, 3, 4]
        assert replayer.checkpoints >= 2


@pytest.mark.parametrize("goal", [0, 1, 2])
async def test_finished_run_stays_finished_without_a_higher_goal(
    make: Any, hand: Hand, goal: int
) -> None:
    await ends(hand, make)
    async with running(updater := make(goal=goal), context()):
        await compared(updater)
        run = await hand.ledger.run()
        assert (run.state, run.versions, run.why) == ("finished", 2, "version 2 reached")


async def test_running_run_can_be_extended_too(make: Any, hand: Hand) -> None:
    await makes(hand, make(versions=2), 4.0)
    await makes(hand, make(goal=3), 4.0, 4.0)
    assert (await hand.ledger.run()).why == "version 3 reached"


async def test_a_run_is_extended_again_and_again_with_a_new_redis_each_time(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    """As `fedstream run --resume --versions N` does, whose Redis ends with it."""
    await ends(hand, make)
    for goal in (3, 4):
        await client.call("FLUSHALL")
        async with running(make(goal=goal), context()):
            await hand.reaches(goal - 1)
            await is_now(hand, "running", goal)
            await hand.join()
            await hand.admitted(4.0)
            await hand.reaches(goal)
            assert (await is_now(hand, "finished", goal)).why == f"version {goal} reached"
            await hand.balanced()
    goals = dict.fromkeys(goal for _, goal, _, _ in standings(folder))
    assert [*goals] == [2, 3, 4]
    with Replayer(folder) as replayer:
        assert {moment.version for moment in replayer} == {1, 2, 3, 4}  # each was made again


async def test_extension_outlives_a_redis_that_does_not_know_of_it(
    make: Any, hand: Hand, client: Client
) -> None:
    """The updater was killed before it told Redis, or Redis fell back: the journal decides."""
    before = ("state", "finished", "versions", 2, "why", "version 2 reached", "finished", "3.5")
    await ends(hand, make)
    backup = await backed_up(client)
    async with running(make(goal=3), context()):
        await is_now(hand, "running", 3)
        await client.call("HSET", hand.keys.run, *before)  # while it leads
        await is_now(hand, "running", 3)
    await go_back(client, backup)  # while nobody does
    async with running(make(goal=2), context()):  # its successor has the old configuration
        await is_now(hand, "running", 3)
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(3)
        await is_now(hand, "finished", 3)
        await client.call("HSET", hand.keys.run, *before)
        assert (await is_now(hand, "finished", 3)).why == "version 3 reached"
        await hand.balanced()


async def test_extended_run_can_end_at_its_target(make: Any, hand: Hand) -> None:
    """Someone else ends it: that holds for every updater of the same goal."""
    await ends(hand, make)
    async with running(make(goal=9), context()):
        await is_now(hand, "running", 9)
        await hand.ledger.finish("accuracy 0.9 at version 2")
        await hand.join()
    async with running(updater := make(goal=9), context()):
        await compared(updater)
        run = await hand.ledger.run()
        assert (run.state, run.why) == ("finished", "accuracy 0.9 at version 2")
    async with running(make(goal=10), context()):
        await is_now(hand, "running", 10)


async def test_adopted_run_is_extended(make: Any, hand: Hand, folder: Path) -> None:
    await ends(hand, make)
    shutil.rmtree(folder)
    async with running(make(goal=3, adopt=True), context()):
        await is_now(hand, "running", 3)
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(3)
        await is_now(hand, "finished", 3)
        await hand.balanced()
