"""Devices whose tasks fail time after time: which ends count, and how long such a device rests."""

from __future__ import annotations

import pytest

from fedstream.coordinator.cooldowns import rest_after
from fedstream.core.messages import GiveUp, Trigger, Withdraw
from fedstream.core.reasons import DEADLINE_PASSED
from fedstream.core.records import Commit, End, Failing
from tests.support import Hand


async def known(hand: Hand, device: int = 3) -> Failing | None:
    """What is noted of a device."""
    _, changes = await hand.ledger.changes()
    return changes.failing.get(device)


def given_up(task: Trigger, reason: str = "raised OSError", *, failing: int = 0) -> GiveUp:
    return GiveUp(
        task=task.task,
        attempt="1",
        device=task.device,
        trainer="t",
        reason=reason,
        failing=failing,
    )


@pytest.fixture
async def run(hand: Hand) -> Hand:
    await hand.create()
    return hand


async def test_rest_doubles_from_the_second_failure_and_ends_with_a_success(run: Hand) -> None:
    for n in range(1, 12):
        [task] = await run.open(device=3)
        await run.admit(given_up(task))
        now = (await run.ledger.tally()).now
        found = await known(run)
        assert found is not None
        assert (found.tasks, found.reason) == (n, "raised OSError")
        assert found.until - now == pytest.approx(rest_after(n), abs=0.5)
        assert set((await run.ledger.tally()).failing) == ({3} if n > 1 else set())
    assert rest_after(11) == rest_after(10) == 300.0
    upload = await run.admitted()
    assert await run.commit(1, upload.model_copy(update={"device": 3})) == "done"
    assert await known(run) is None


@pytest.mark.parametrize(
    ("reason", "counts"), [("digest", True), ("not finite", True), ("too stale", False)]
)
async def test_refused_update_counts_unless_the_run_is_the_reason(
    run: Hand, reason: str, counts: bool
) -> None:
    upload = await run.admitted()
    end = End(
        task=upload.task,
        attempt=upload.attempt,
        device=upload.device,
        outcome="refused",
        reason=reason,
    )
    commit = Commit(held=[], mean_staleness=0.0, ends=[end])
    assert (await run.ledger.commit(run.updater.token, commit)).what == "done"
    found = await known(run, upload.device)
    assert (found and found.reason) == (reason if counts else None)


@pytest.mark.parametrize(
    ("reason", "of_round", "versions", "blamed"),
    [
        ("became too stale", None, 1, True),
        ("became too stale", None, 2, False),
        ("round over", None, 1, True),
        ("round over", 0, 0, True),
        ("round over", 0, 1, False),
        ("run finished", None, 2, True),
        ("device revoked", None, 2, True),
    ],
)
async def test_device_is_excused_only_by_what_is_so(
    hand: Hand, reason: str, of_round: int | None, versions: int, blamed: bool
) -> None:
    """A site says why a task is given up, for a device that may have asked for these words."""
    await hand.create(max_staleness=1)
    [task] = await hand.open(device=3, version=of_round)
    for version in range(1, versions + 1):
        await hand.commit(version)
    assert await hand.admit(given_up(task, reason)) == [("given_up", reason)]
    assert (await known(hand) is not None) == blamed


async def test_device_is_not_blamed_for_the_end_of_the_run(hand: Hand) -> None:
    await hand.create(versions=1)
    [task] = await hand.open(device=3)
    await hand.commit(1, finish="version 1 reached")
    await hand.admit(given_up(task, "run finished"))
    assert await known(hand) is None


async def test_device_is_not_blamed_for_an_owner_that_leaves(run: Hand) -> None:
    await run.announce("t", 3)
    await run.open(device=3)
    assert await run.ledger.leave(b"t") == 1
    assert await known(run) is None


async def test_withdrawn_task_counts_only_if_a_trainer_took_it(run: Hand) -> None:
    waiting, taken = [(await run.open(device=device))[0] for device in (4, 3)]
    [(first, _), _] = await run.take()
    await run.client.call("XGROUP", "SETID", run.keys.tasks, "trainers", "0")
    await run.client.call("XACK", run.keys.tasks, "trainers", first.id)  # nobody has it again
    await run.ledger.ask(Withdraw(tasks=(waiting.task, taken.task), why=DEADLINE_PASSED))
    assert await run.dispatch() == ["withdrawn"]
    assert await known(run, 4) is None
    assert await known(run, 3) is not None


@pytest.mark.parametrize(
    ("others", "site", "blamed"),
    [((), "pool", True), (("u",), "pool", False), (("u",), "north", True)],
)
async def test_device_is_not_blamed_for_a_trainer_that_fails_beside_others(
    run: Hand, others: tuple[str, ...], site: str, blamed: bool
) -> None:
    for name in ("t", *others):
        await run.announce(name)
    if site != "pool":
        await run.announce("t", 3, site=site)
    [task] = await run.open(device=3)
    [(_, reason)] = await run.admit(given_up(task, failing=3), site=site)
    assert reason == "raised OSError"
    assert (await known(run) is not None) == blamed


async def test_resting_device_gets_no_task_by_its_own_trigger(run: Hand) -> None:
    own = [run.trigger(origin="ann", device=3) for _ in range(5)]
    for trigger in own[:2]:
        assert await run.take_up(trigger) == ["sent"]
        await run.admit(given_up(trigger))
    assert await run.take_up(own[2]) == ["resting"]
    assert (await run.ledger.look()).reasons("stray") == {"trigger for a resting device": 1}
    now_ms = int(1000 * (await run.ledger.tally()).now)
    for trigger, until_ms in ((own[3], now_ms - 1), (own[4], now_ms + 400_000)):
        await run.client.call("HSET", run.keys.failing, 3, f"2 {until_ms} raised OSError")
        assert await run.take_up(trigger) == ["sent"], "over, or longer than any rest"
        await run.admit(given_up(trigger))
    await run.balanced()


async def test_foreign_values_among_failing_devices_do_no_harm(run: Hand) -> None:
    junk: dict[str, str | bytes] = {
        "3": b"\xff",
        "4": "one two",
        "x": "2 3 y",
        "5": "2 3000 raised OSError",
    }
    for field, value in junk.items():
        await run.client.call("HSET", run.keys.failing, field, value)
    assert (await run.ledger.tally()).failing == {5: Failing(2, 3.0, "raised OSError")}
    [task] = await run.open(device=3)
    await run.admit(given_up(task))
    found = await known(run)
    assert found is not None
    assert found.tasks == 1
