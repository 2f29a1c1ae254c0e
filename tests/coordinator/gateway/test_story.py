"""Random devices, gateways that crash and a Redis that is cut off: each task ends once."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from fedstream.broker.client import RedisSettings
from fedstream.core.messages import Upload
from fedstream.protocol.messages import Offer, UpdateReport
from tests.coordinator.gateway.places import Place, coordinating, serving
from tests.coordinator.gateway.uploading import Sender
from tests.support import Hand, Proxy, model_of, wait_until

DEVICES, TASKS = 6, 40
AWAY = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass
class Replicas:
    """Two replicas, each of which may be somewhere else after a crash, or nowhere."""

    places: dict[str, Place | None]

    def any(self, draw: random.Random) -> Place | None:
        return draw.choice(list(self.places.values()))


async def keep(
    replicas: Replicas,
    name: str,
    hand: Hand,
    redis: RedisSettings,
    draw: random.Random,
    over: asyncio.Event,
) -> None:
    """Runs a replica, which crashes now and then, until all is over."""
    while not over.is_set():
        async with serving(
            hand,
            redis,
            name,
            is_open=False,
            task_lease_s=1.0,
            retry_s=(0.1, 0.3),
            away_s=1.0,
            lease_s=2.0,
            device_rate=1e6,
            address_rate=1e6,
        ) as place:
            replicas.places[name] = place
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.5, 4.0)):
                    await over.wait()
            replicas.places[name] = None


@dataclass
class Phone:
    """A device: it trains nothing, drops out, moves, repeats itself, and notes what it heard."""

    number: int
    hand: Hand
    replicas: Replicas
    draw: random.Random
    receipts: Counter[str]

    async def live(self, over: asyncio.Event) -> None:
        while not over.is_set():
            place = self.replicas.any(self.draw)
            if place is None:
                await asyncio.sleep(0.02)
                continue
            with suppress(*AWAY):
                answer = await place.check_in(self.number, wait_s=self.draw.choice([0, 0.3]))
                if answer.status == 200:
                    await self.work(answer.offer)
                    continue
                assert answer.status in (204, 503), (answer.status, answer.body)
            await asyncio.sleep(self.draw.uniform(0.01, 0.1))

    async def work(self, offer: Offer) -> None:
        """What becomes of a task at a device; what it does last, it may do twice."""
        fate = self.draw.choices(["sends", "gives up", "is lost"], [8, 2, 1])[0]
        if fate == "is lost":
            await asyncio.sleep(self.draw.uniform(0.0, 3.0))
            return
        data = bytes(model_of(self.hand.layout, self.draw.random()).buffer.data)
        report = UpdateReport(
            digest=hashlib.sha256(data).hexdigest(),
            samples=1,
            steps=1,
            lr=0.1,
            tau=offer.model.version,
            base=offer.model.digest,
            layout=offer.update.layout,
        )
        sender = Sender(offer, data, report.model_dump(), self.number)
        for _ in range(self.draw.choice([1, 1, 2])):
            place = self.replicas.any(self.draw)
            if place is None:
                continue
            if self.draw.random() < 0.3:
                beat = await place.beat(self.number, offer)
                assert beat.status in (200, 503)
            if fate == "gives up":
                assert (await place.give_up(self.number, offer)).status in (200, 503)
                continue
            answer = await sender.posts(place, data)
            if answer.status == 200:
                self.receipts[offer.task.id] += 1
            else:
                assert answer.status in (202, 404, 409, 422, 503), answer


async def test_each_task_ends_once_whatever_happens(redis: RedisSettings, hand: Hand) -> None:
    version = await hand.create(devices=DEVICES)
    assert version.version == 0
    draw, over, quiet = random.Random(1), asyncio.Event(), asyncio.Event()
    receipts = Counter[str]()
    replicas = Replicas({"gw-0": None, "gw-1": None})
    issued = 0
    async with Proxy(redis) as proxy, coordinating(hand, redis):

        async def cuts() -> None:
            while not quiet.is_set():
                await asyncio.sleep(draw.uniform(0.2, 0.8))
                proxy.cut()

        phones = [
            Phone(n, hand, replicas, random.Random(100 + n), receipts) for n in range(DEVICES)
        ]
        async with asyncio.TaskGroup() as group:
            for name in ("gw-0", "gw-1"):
                group.create_task(keep(replicas, name, hand, proxy.settings, draw, over))
            for phone in phones:
                group.create_task(phone.live(over))
            group.create_task(cuts())
            applied: list[str] = []

            async def update() -> None:
                queued = [one for _, one in await hand.queue() if isinstance(one, Upload)]
                if queued:
                    number = await hand.version() + 1
                    assert await hand.commit(number, *queued) == "done"
                    applied.extend(upload.task for upload in queued)

            while issued < TASKS:
                view = await hand.ledger.look()
                busy = {trigger.device for trigger in view.open}
                for device in {*view.owned} - busy:
                    await hand.open(device=device)
                    issued += 1
                await update()
                await asyncio.sleep(0.01)
            quiet.set()

            async def is_settled() -> bool:
                await update()
                return not (await hand.ledger.tally()).tasks

            await wait_until(is_settled, what="every task answered or given up")
            over.set()
    assert len(applied) == len({*applied})
    assert receipts.keys() <= {*applied}, "who hears admitted is admitted"
    await hand.balanced()
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"]) == (issued, len(applied))
    assert view.outcomes["dead"] == view.outcomes["refused"] == 0, str(view.counts)
    assert view.outcomes["given_up"] == issued - len(applied)
    assert len(applied) > issued / 2
