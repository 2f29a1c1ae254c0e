"""Private runs under faults: the short form of `python -m tests.chaos.sums`, and of its checks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.private.sealing import Intent
from tests.chaos.sums import KINDS, K, Played, plan, play, playing
from tests.support import Hand
from tests.updater.journalled import backed_up, go_back

PLANS = 20
FAULTS = 3  # of a plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def test_plans_have_every_fault() -> None:
    assert {fault for seed in range(PLANS) for fault in plan(seed, FAULTS).faults} == set(KINDS)


@pytest.mark.parametrize("seed", range(PLANS))
async def test_no_task_is_opened_twice_and_no_sum_is_lost(
    redis: RedisSettings, keys: Keys, tmp_path: Path, seed: int
) -> None:
    outcome = await play(plan(seed, FAULTS), tmp_path, redis, keys)
    assert not outcome.complaints, "\n".join([str(outcome.plan), *outcome.complaints])


async def test_checks_can_fail(redis: RedisSettings, keys: Keys, tmp_path: Path) -> None:
    """Evidence that is altered after a run without faults: each alteration has its complaint."""
    async with playing(
        replace(plan(0, 0), rule="fedbuff", sigma=0.0), tmp_path, redis, keys
    ) as played:
        await played.play()
        for alter, says in (
            (_overlap, "was opened in 2 sums"),
            (_answer_otherwise, "got 2 different answers"),
            (_value, "is not the sum of the plain updates"),
        ):
            before = [*played.between.exchanges]
            alter(played)
            found = (await played.outcome()).complaints
            assert any(says in one for one in found), (says, found)
            played.between.exchanges = before


async def test_redis_falls_back_to_one_moment(
    client: Client, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to one of each key: counts and tasks would disagree as no lost write makes them."""
    await hand.create()
    ask = client.call

    async def amid_writes(*command: Any, **options: Any) -> Any:
        await hand.ledger.trigger(hand.scheduler.token, 10_000, await issued(), [hand.trigger()])
        return await ask(*command, **options)

    async def issued() -> int:
        return int(await ask("HGET", hand.keys.counts, "issued") or 0)

    with monkeypatch.context() as patched:
        patched.setattr(client, "call", amid_writes)
        backup = await backed_up(client)
    await go_back(client, backup)
    view = await hand.ledger.look()
    assert view.issued == len(view.open) == 1


def _overlap(played: Played) -> None:
    """The helper has also opened a batch without one of its updates."""
    [one, *_] = [one for one in played.between.exchanges if one.intent is not None]
    intent = Intent.decode(one.sent)
    fewer = intent.model_copy(update={"updates": intent.updates[1:], "weights": intent.weights[1:]})
    played.between.sent[fewer.digest] = fewer
    played.between.exchanges.append(replace(one, sent=fewer.encode()))
    assert len(fewer.updates) == K - 1


def _answer_otherwise(played: Played) -> None:
    [one, *_] = [one for one in played.between.exchanges if one.intent is not None]
    played.between.exchanges.append(replace(one, answer=bytes(len(one.answer))))


def _value(played: Played) -> None:
    first = min(played.devices.values)
    played.devices.values[first] = played.devices.values[first] + (1 << 20)
