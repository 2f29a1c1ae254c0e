"""Reading a run's streams and its state."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.errors import NoRun
from fedstream.history.observer import Observer
from tests.fedstream.views import event
from tests.support import Hand


async def test_shown_state_is_at_least_as_new_as_the_measurements(hand: Hand) -> None:
    """A display says both in one line."""
    await hand.create()
    observer = Observer(hand.client, hand.keys, look_s=1e9)  # it is never time to look again
    await observer.look()
    await hand.commit(1, await hand.admitted())
    await hand.ledger.tell(event("evaluation", version=1, metrics={"accuracy": 0.5}))
    await observer.catch_up()
    assert observer.history.measured == (1, {"accuracy": 0.5})
    assert observer.view is not None
    assert observer.view.head.version == 1


async def test_the_first_measurement_is_judged_by_the_runs_goals(hand: Hand) -> None:
    await hand.create(goal={"bits": "min"})
    await hand.commit(1, await hand.admitted())
    for version, bits in ((0, 3.0), (1, 5.0)):
        metrics = {"bits": bits}
        await hand.ledger.tell(event("evaluation", version=version, metrics=metrics))
    observer = Observer(hand.client, hand.keys)
    await observer.catch_up()
    assert observer.history.best == {"bits": (0, 3.0)}


async def test_observer_reads_past_and_new_events(client: Client, keys: Keys, hand: Hand) -> None:
    observer = Observer(client, keys)
    with pytest.raises(NoRun):
        await observer.step(block_ms=0)
    await hand.create()
    await client.call("XADD", keys.models, "*", "m", b"no message")  # nothing to fail about
    await observer.catch_up()
    assert observer.history.newest == 0
    await hand.ledger.tell(event("evaluation", version=0, metrics={"accuracy": 0.5}))
    await observer.catch_up()
    assert observer.history.measured == (0, {"accuracy": 0.5})
    view = await observer.look()
    assert observer.view is view
    assert view.head.version == 0
