"""A run of which only the messages exist, and its sinks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.messages import Contribution, Event, Version, task_id
from fedstream.sinks.service import Sinks
from fedstream.sinks.settings import named
from fedstream.sinks.sink import SinkSettings
from tests.support import Hand

BEGAN = 1_700_000_000.0


class Messages:
    """Writes what updater and evaluator would."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand

    async def version(self, number: int) -> None:
        """A version of one update."""
        update = Contribution(
            task=task_id(number),
            device=number % 10,
            tau=number - 1,
            staleness=number % 3,
            weight=0.5,
            samples=10,
            steps=2,
            loss=1 / number,
        )
        message = Version(
            version=number,
            time=BEGAN + number,
            epoch=1,
            parent=number - 1,
            digest="d",
            blob="b",
            size=4,
            updates=(update,),
        )
        await self.hand.client.call("XADD", self.hand.keys.models, "*", "m", message.encode())

    async def evaluation(self, number: int) -> None:
        """A measurement."""
        event = Event(
            what="evaluation",
            service="evaluator",
            time=BEGAN + number + 0.5,
            version=number,
            metrics={"accuracy": number / 1000, "loss": 2.0},
        )
        await self.hand.client.call("XADD", self.hand.keys.events, "*", "m", event.encode())

    async def finish(self) -> None:
        """The end of the run."""
        ago = time.time() - 1000  # nobody waits for the last evaluation any more
        fields = ("state", "finished", "why", "enough", "finished", repr(ago))
        await self.hand.client.call("HSET", self.hand.keys.run, *fields)


@pytest.fixture
async def messages(hand: Hand) -> Messages:
    """Of a run that has begun."""
    await hand.create(goal={"bits": "min"})
    return Messages(hand)


@pytest.fixture
def service(hand: Hand, redis: RedisSettings) -> Callable[..., Sinks]:
    """Makes a service of these sinks."""

    def made(*sinks: SinkSettings) -> Sinks:
        return Sinks(
            named(sinks),
            {"strategy.alpha": 0.6, "run.versions": 100},
            keys=hand.keys,
            redis=redis,
            name="sinks",
        )

    return made


def tensorboard_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    everything.Reload()
    return {
        tag: [(event.step, event.value) for event in everything.Scalars(tag)]
        for tag in everything.Tags()["scalars"]
    }
