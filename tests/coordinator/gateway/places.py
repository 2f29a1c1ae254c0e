"""A gateway on a real port, with a coordinator, and devices that name themselves in a header."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import member
from fedstream.coordinator.gateway.app import Recognition
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.formats import F32, Format
from fedstream.core.messages import task_id
from fedstream.protocol.messages import Offer
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.runtime.service import Context
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.runtime.tls import CurrentTls
from tests.support import Hand, context, running, wait_until

SITE = "gateway"


class ByHeader:
    """Who makes a request, as it says: its proof is tested elsewhere."""

    async def device_of(self, request: web.Request) -> int:
        if "Device" not in request.headers:
            raise Refusal(401, "token", "no token")
        return int(request.headers["Device"])


BY_HEADER = ByHeader()


@dataclass
class Answer:
    """What a gateway said."""

    status: int
    headers: dict[str, str]
    body: bytes
    json: Any = None

    @property
    def offer(self) -> Offer:
        """The task that was offered."""
        assert self.status == 200, (self.status, self.body)
        return Offer.decode(self.body)


@dataclass
class Place:
    """One replica of a gateway, and its devices' requests."""

    url: str
    gateway: Gateway
    context: Context
    connection_limit: ConnectionLimit  # that is connected
    session: aiohttp.ClientSession
    work: asyncio.Task[None] = field(repr=False)

    async def ask(
        self, method: str, path: str, device: int | None = None, **options: Any
    ) -> Answer:
        """Any request, by a device."""
        about = dict(options.pop("headers", {}))
        if device is not None:
            about["Device"] = str(device)
        async with self.session.request(
            method, self.url + path, headers=about, **options
        ) as answer:
            body = await answer.read()
            is_json = "json" in answer.headers.get("Content-Type", "")
            found = {name.title(): value for name, value in answer.headers.items()}
            return Answer(
                answer.status, found, body, await answer.json() if is_json and body else None
            )

    async def check_in(self, device: int, *, nonce: str = "", **said: Any) -> Answer:
        """A device asks for a task; by default it does not wait for one."""
        body = {"nonce": nonce or secrets.token_urlsafe(16), "wait_s": 0, **said}
        return await self.ask("POST", "/v1/check-in", device, json=body)

    async def beat(self, device: int, offer: Offer) -> Answer:
        """A device's heartbeat."""
        path = f"/v1/tasks/{offer.task.id}/heartbeat"
        return await self.ask("POST", path, device, json={"attempt": offer.attempt})

    async def give_up(self, device: int, offer: Offer, reason: str = "dropped out") -> Answer:
        """A device gives its task up."""
        path = f"/v1/tasks/{offer.task.id}/give-up"
        said = {"attempt": offer.attempt, "reason": reason}
        return await self.ask("POST", path, device, json=said)


@asynccontextmanager
async def serving(
    hand: Hand,
    redis: RedisSettings,
    name: str = "gw-0",
    *,
    task_lease_s: float = 15.0,
    update: Format = F32,
    is_open: bool = True,
    idle_s: float = 15.0,
    identity: Recognition | None = BY_HEADER,
    **settings: Any,
) -> AsyncIterator[Place]:
    """A gateway on a free port; ``is_open``: once it serves the run, which is there.

    ``identity``: who makes a request; None: the device whose token it has, as elsewhere.
    """
    one = GatewaySettings(**{"retry_s": (1.0, 2.0), **settings})
    gateway = Gateway(
        one,
        LeaseSettings(seconds=task_lease_s),
        keys=hand.keys,
        redis=redis,
        name=name,
        update=update,
        identity=identity,
    )
    its = context()
    tls = one.tls()
    its.tls = None if tls is None else CurrentTls(tls)
    http = HttpSettings(connections=one.connections, idle_s=idle_s, hosts=None)
    app = application(gateway.routes(), its.stop.is_set, its.refused)
    async with AsyncExitStack() as stack:
        log = structlog.get_logger()
        connection_limit = ConnectionLimit(http.connections)
        at = listening(app, http, 0, connection_limit, log, its.tls, its.refused)
        port = await stack.enter_async_context(at)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        work = await stack.enter_async_context(running(gateway, its))
        if is_open:
            await wait_until(lambda: gateway._app._opened)
        yield Place(f"http://127.0.0.1:{port}", gateway, its, connection_limit, session, work)


@asynccontextmanager
async def coordinating(
    hand: Hand, redis: RedisSettings, **settings: Any
) -> AsyncIterator[Coordinator]:
    """A coordinator that serves the gateway's site."""
    one = CoordinatorSettings(**{"sites": ("pool", SITE), **settings})
    service = Coordinator(one, LeaseSettings(), keys=hand.keys, redis=redis, name="c-0")
    async with running(service, context()):
        yield service


async def owned_by(hand: Hand, device: int, name: str | None) -> None:
    """Waits until a device is owned by the replica ``name``, or by nobody."""
    owner = None if name is None else member(SITE, name)

    async def is_so() -> bool:
        return (await hand.ledger.owners()).get(device) == owner

    await wait_until(is_so, what=f"device {device} owned by {owner}")


async def joined(hand: Hand, at: Place, device: int = 3, **said: Any) -> None:
    """A device checks in at the replica gw-0, which then owns it."""
    await at.check_in(device, **said)
    await owned_by(hand, device, "gw-0")


async def given_task(hand: Hand, at: Place, device: int = 3, **task: Any) -> Offer:
    """The task that a device gets at the replica gw-0."""
    await joined(hand, at, device)
    await hand.open(device=device, **task)
    return (await at.check_in(device, wait_s=50)).offer


async def evaluates(hand: Hand, *devices: int, within_s: float = 60.0) -> None:
    """The evaluator asks these devices to measure the newest version."""
    head = await hand.ledger.head()
    assert head is not None
    hand.devices += 1
    id_, deadline = task_id(hand.devices, bytes(10)), hand.ledger.now() + within_s
    how = await hand.ledger.open_evaluation(id_, head, devices, deadline, nbytes=hand.layout.nbytes)
    assert how == "begun"
    evaluation = await hand.ledger.evaluation()
    assert evaluation is not None
    tasks = [evaluation.task(task_id(1000 + n, bytes(10)), n) for n in devices]
    settled, _ = await hand.ledger.ask_devices(evaluation, 1.0, tasks)
    assert settled == len(devices)


async def ends(hand: Hand, what: str, reason: str, count: int = 1) -> None:
    """Waits until so many tasks have ended in this way, and checks that the counts add up."""

    async def is_so() -> bool:
        return (await hand.ledger.tally()).reasons(what).get(reason, 0) == count

    await wait_until(is_so, what=f"{count} {what}: {reason}")
    await hand.balanced()
