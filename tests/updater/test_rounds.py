"""The updater against a real Redis, in rounds: a buffer of updates, and how rounds end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.layout import Model
from fedstream.core.messages import CloseRound, RoundEnd
from fedstream.journal import RoundClosed, segments
from fedstream.journal.replay import Replayer
from fedstream.strategies import (
    AfaCsSettings,
    FedAvgSettings,
    FedBuffSettings,
    State,
    Strategy,
    Update,
)
from tests.support import Hand, context, counted, layout_of, model_of, running, wait_until
from tests.updater.journalled import held, records


async def test_journal_keeps_buffered_updates_until_their_version(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    async with running(make(FedAvgSettings(clients_per_round=3)), context()):
        await hand.join()
        uploads = [await hand.admitted(3.0), await hand.admitted(6.0)]
        await wait_until(lambda: held(hand, 2))
        assert await hand.queue() == []
        assert await client.call("EXISTS", *(keys.queued(u.blob) for u in uploads)) == 0
        assert await hand.version() == 0
        head = await hand.ledger.head()
        assert head
        assert head.held == tuple(upload.device for upload in uploads)
        uploads.append(await hand.admitted(0.0))
        await hand.reaches(1)
        assert await hand.queue() == []
        assert await client.call("EXISTS", *(keys.queued(u.blob) for u in uploads)) == 0
    _, version = await hand.published()
    assert [u.task for u in version.updates] == [u.task for u in uploads]
    assert (await hand.model(version)).floats == pytest.approx([3.0] * 4)
    view = await hand.ledger.look()
    assert (view.outcomes["buffered"], view.outcomes["applied"]) == (2, 1)
    assert view.head.buffered == 0
    await hand.balanced()


async def test_successor_rebuilds_the_buffer_to_the_same_bits(make: Any, hand: Hand) -> None:
    hand.layout = layout_of(100)
    rng = np.random.default_rng(5)
    values = [rng.standard_normal(100).astype(np.float32) for _ in range(4)]
    strategy = FedAvgSettings(clients_per_round=4)
    async with running(make(strategy, name="updater-0"), context()):
        await hand.join()
        for n in range(3):
            await hand.admitted(*values[n])
        await wait_until(lambda: held(hand, 3))
    async with running(make(strategy, name="updater-1"), context()):
        await hand.admitted(*values[3])
        await hand.reaches(1)
    rule, state = strategy.build(), State(0, model_of(hand.layout))
    for one in values:
        update = Update(model_of(hand.layout, *one), 0, 0, 10, 5, 0.1)
        state, _ = rule.receive(state, update, Model(hand.layout))
    _, version = await hand.published()
    assert (version.digest, version.epoch, len(version.updates)) == (state.model.digest(), 2, 4)
    view = await hand.ledger.look()
    assert (view.outcomes["buffered"], view.outcomes["applied"]) == (3, 1)  # counted once
    assert len(await hand.events()) == 4
    await hand.balanced()


async def test_round_without_arrivals_makes_no_version(
    make: Any, hand: Hand, client: Client
) -> None:
    async with running(make(FedAvgSettings(clients_per_round=2)), context()):
        await hand.join()
        await client.call("XADD", hand.keys.queue, "*", "m", RoundEnd(version=0).encode())
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 0
        for value in (1.0, 3.0):
            await hand.admitted(value)
        await hand.reaches(1)


@pytest.mark.parametrize(
    "rule",
    [
        FedAvgSettings(clients_per_round=9),
        AfaCsSettings(buffer_size=9, devices=10, max_staleness=0),
    ],
    ids=lambda rule: rule.name,
)
async def test_dropped_round_is_in_no_version(
    make: Any, hand: Hand, folder: Path, rule: Strategy
) -> None:
    """What comes next is that round's own, also after a restart, and out of the journal."""

    async def held_by(*devices: int) -> bool:
        head = await hand.ledger.head()
        return head is not None and head.held == devices

    async def ends(*drops: int) -> None:
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="round over", drops=drops))
        assert (await hand.dispatch())[-1] == "closed"
        await wait_until(hand.queue_is_empty)

    watched = context()
    async with running(make(rule, name="updater-0"), watched):
        await hand.join()
        one, two = [(await hand.admitted(value, sends=rule.sends)).device for value in (50.0, 90.0)]
        await wait_until(lambda: held_by(one, two))
        await ends(one, two)
        await wait_until(held_by)
        assert (await hand.version(), segments(folder)[-1].head.needs[0]) == (0, "dropped rounds")
        three = (await hand.admitted(2.0, sends=rule.sends)).device
        await wait_until(lambda: held_by(three))
        await ends(one, two)  # told again: this is another round
        assert await held_by(three)
        assert counted(watched, "fedstream_rounds_dropped_total") == 1
    async with running(make(rule, name="updater-1"), context()):
        await hand.admitted(4.0, sends=rule.sends)
        await ends()
        await hand.reaches(1)
    rounds = [one for one in records(folder) if isinstance(one, RoundClosed)]
    assert [(one.dropped, one.late, one.version) for one in rounds] == [
        (2, False, 0),
        (0, True, 0),
        (0, False, 1),
    ]
    _, version = await hand.published()
    assert [update.device for update in version.updates] == [three, three + 1]
    if isinstance(rule, FedAvgSettings):
        assert (await hand.model(version)).floats.tolist() == [3.0] * 4
    with Replayer(folder) as again:
        assert [moment.model.digest() for moment in again][-1] == version.digest
    with Replayer(folder, strategy=FedBuffSettings(buffer_size=9)) as under_another:
        made = [one.step.made for one in under_another if one.step.made]
    assert [[update.device for update in each] for each in made] == [[three, three + 1]]
    with Replayer(folder, without=frozenset({one})) as without:
        assert without.influenced is None
    view = await hand.ledger.look()
    assert (view.outcomes["buffered"], view.outcomes["applied"]) == (4, 0)
    await hand.balanced()
