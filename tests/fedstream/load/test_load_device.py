"""One device of the laboratory at a gateway that is told to fail (`tests/device/fake.py`)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from fedstream.broker.digest import digest_of
from fedstream.broker.layout import Model
from fedstream.device.address import GatewayAddress
from fedstream.load.habits import Habits
from fedstream.load.laboratory import LoadOptions, LoadReport, load
from fedstream.protocol.messages import Advice, Offer, Receipt
from fedstream.runtime.backoff import Backoff
from fedstream.trainer.vector import layout_of
from tests.device.fake import FakeGateway
from tests.support import wait_until
from tests.trainer.stepping import Steps

Loaded = Callable[..., Awaitable[LoadReport]]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long between tries."""
    monkeypatch.setattr(Backoff, "next", lambda _self: 0.001)


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway(layout_of(Steps().model()))


@pytest.fixture
def model(gateway: FakeGateway) -> Model:
    made = Model(gateway.layout)
    made.buffer[:] = np.arange(made.buffer.nbytes) % 7
    return made


@pytest.fixture
async def loaded(gateway: FakeGateway) -> AsyncIterator[Loaded]:
    """Has device 7 live until all offers are answered, or ``until`` is true."""
    server: TestServer = gateway.server()
    await server.start_server()
    invite = "7-" + secrets.token_urlsafe(24)
    gateway.invites[invite] = 7

    async def run(
        until: Callable[[], bool] | None = None, *, changes: bool = True, **about: Any
    ) -> LoadReport:
        stop = asyncio.Event()
        options = LoadOptions(
            GatewayAddress(str(server.make_url("/"))), {7: invite}, 60.0, wait_s=0.1,
            changes=changes, habits=Habits(**about),
        )  # fmt: skip
        running = asyncio.create_task(load(options, stop))
        # It has heard of its receipt when it checks in again.
        over = until or (lambda: not gateway.offers and gateway.asked[-1].endswith("/check-in"))
        with suppress(TimeoutError):
            await wait_until(lambda: over() or running.done())
        stop.set()
        return await running

    yield run
    await server.close()


def sent(gateway: FakeGateway) -> list[tuple[int, int]]:
    """Versions and sizes of updates, whose bytes are those of their digests."""
    updates = gateway.sent.values()
    assert all(digest_of(bytes(one.data)) == one.report.digest for one in updates)
    return [(one.report.tau, len(one.data)) for one in updates]


async def test_device_enrols_downloads_and_sends_what_it_made_up(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model, version=4)
    gateway.receipts["task-1"] = [Receipt(state="admitted")]
    found = await loaded(lambda: any(one.complete for one in gateway.sent.values()))
    size = model.buffer.nbytes
    assert sent(gateway) == [(4, size)]
    [update] = gateway.sent.values()
    assert update.report.layout == gateway.layout.signature
    paths = [one.split("?")[0] for one in gateway.asked[:4]]
    assert [one.split("/")[2] for one in paths] == ["devices", "token", "check-in", "models"]
    assert found.tally.sent >= size
    assert found.tally.received >= size
    assert found.tally.ended == {}


async def test_second_task_of_the_same_version_needs_no_second_download(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model, task="task-1")
    gateway.offer(model, task="task-2")
    found = await loaded()
    assert found.tally.receipts == {"admitted": 2}
    assert found.tally.turns.count == 2
    assert [one for one in gateway.asked if "/models/" in one] == [
        f"GET {next(iter(gateway.models)).join(('/v1/models/', ''))}"
    ]
    assert gateway.check_ins[1].has == next(iter(gateway.models))


def offered_twice(gateway: FakeGateway, model: Model) -> tuple[Offer, Offer]:
    """Tasks of two versions that differ little."""
    first = gateway.offer(model, task="task-1", version=1)
    model.buffer[:4] = 9
    return first, gateway.offer(model, task="task-2", version=2, since=first)


def downloads(gateway: FakeGateway) -> list[str]:
    return [one.removeprefix("GET ") for one in gateway.asked if "/models/" in one]


async def test_device_downloads_what_changed(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    first, second = offered_twice(gateway, model)
    found = await loaded()
    assert downloads(gateway) == [first.model.url, second.model.changes]
    assert found.tally.answers["changes", 200] == 1
    assert found.tally.receipts == {"admitted": 2}
    assert [one.has for one in gateway.check_ins[:3]] == [
        None, first.model.digest, second.model.digest,
    ]  # fmt: skip


async def test_changes_that_are_gone_cost_a_whole_model(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    first, second = offered_twice(gateway, model)
    gateway.changes.clear()
    found = await loaded()
    assert downloads(gateway) == [first.model.url, second.model.changes, second.model.url]
    assert found.tally.refusals == {"no changes": 1}
    assert found.tally.receipts == {"admitted": 2}


async def test_changes_of_another_digest_end_the_device(
    gateway: FakeGateway, model: Model, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered_twice(gateway, model)
    monkeypatch.setattr("tests.device.fake.digest_of", lambda _data: "0" * 64)
    found = await loaded(lambda: False)
    assert found.tally.ended == {"changes that are not of their digest": 1}


async def test_device_that_wants_no_changes_says_no_model(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model, version=1)
    await loaded(changes=False)
    assert {one.has for one in gateway.check_ins} == {None}


async def test_device_drops_out_in_the_gateways_words(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    found = await loaded(drop_outs=1.0)
    assert gateway.given_up == [("task-1", "dropped out")]
    assert found.tally.events["tasks given up"] == 1
    assert gateway.sent == {}


async def test_device_that_vanishes_says_nothing_and_comes_back(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    found = await loaded(lambda: len(gateway.check_ins) >= 3, vanishes=1.0, away_s=(0.001, 0.002))
    assert found.tally.events["tasks left without a word"] >= 2
    assert gateway.sent == {}
    # It enrolled and asked for a token once.
    assert [one.split("/")[2] for one in gateway.asked[:3]] == ["devices", "token", "check-in"]
    assert "POST /v1/devices" not in gateway.asked[1:]


async def test_cut_upload_is_resumed(gateway: FakeGateway, model: Model, loaded: Loaded) -> None:
    gateway.offer(model)
    found = await loaded(cuts=1.0)
    assert found.tally.receipts == {"admitted": 1}
    assert found.tally.events["requests cut off"] >= 1
    assert found.tally.events["connections lost"] == 0
    uploads = [one.split()[0] for one in gateway.asked if "/updates/" in one]
    assert uploads == ["POST", "HEAD", "POST"], "nothing had arrived in whole chunks"
    assert sent(gateway) == [(0, model.buffer.nbytes)]
    assert found.tally.turns.count == 0, "a cut is no latency of the gateway's"


async def test_slow_link_takes_its_time_both_ways(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    size = model.buffer.nbytes
    found = await loaded(slow=1.0, slow_rate=2.0 * size)
    assert found.tally.receipts == {"admitted": 1}
    assert found.tally.turns.most_s >= 0.8  # half a second each way
    assert sent(gateway) == [(0, size)]


async def test_thinking_device_sends_heartbeats_and_stops_when_told(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model, heartbeat_s=0.01)
    gateway.advice = Advice(go_on=False, why="too stale")
    found = await loaded(lambda: gateway.beats > 0, think_s=(30.0, 30.0))
    assert found.tally.events["told to stop: too stale"] >= 1
    assert gateway.sent == {}


async def test_wrong_clock_is_set_by_the_gateways(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    found = await loaded(skewed=1.0)
    assert found.tally.receipts == {"admitted": 1}
    assert found.tally.refusals == {"clock": 1}
    assert found.tally.events["clocks set"] == 1


async def test_refused_token_is_renewed_and_busy_gateway_is_asked_again(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    gateway.fails("POST", "/v1/check-in", status=401, reason="token")
    gateway.fails("POST", "/v1/tasks/", status=503, reason="busy", headers={"Retry-After": "0"})
    found = await loaded()
    assert found.tally.receipts == {"admitted": 1}
    assert found.tally.refusals == {"token": 1, "busy": 1}
    assert found.tally.answers["token", 200] == 2


async def test_lost_answer_is_asked_for_with_the_same_nonce(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    gateway.fails("POST", "/v1/check-in")
    found = await loaded()
    assert gateway.check_ins[0].nonce == gateway.check_ins[1].nonce
    assert found.tally.events["connections lost"] == 1


async def test_undecided_receipt_is_asked_for_without_the_bytes(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    gateway.receipts["task-1"] = [
        Receipt(state="received"), Receipt(state="refused", reason="too stale"),
    ]  # fmt: skip
    found = await loaded()
    assert found.tally.receipts == {"refused: too stale": 1}
    assert gateway.bytes_sent == model.buffer.nbytes


async def test_task_in_hand_is_given_up_at_the_end(
    gateway: FakeGateway, model: Model, loaded: Loaded
) -> None:
    gateway.offer(model)
    downloaded = "GET /v1/models/"
    await loaded(
        lambda: any(one.startswith(downloaded) for one in gateway.asked), think_s=(30.0, 30.0)
    )
    assert gateway.given_up == [("task-1", "dropped out")]


async def test_device_that_is_refused_for_good_ends_with_the_reason(
    gateway: FakeGateway, loaded: Loaded
) -> None:
    gateway.invites.clear()
    gateway.fails("POST", "/v1/devices", status=403, reason="invite")
    found = await loaded(lambda: False)
    assert found.tally.ended == {"invite": 1}


async def test_run_that_is_over_ends_the_load(gateway: FakeGateway, loaded: Loaded) -> None:
    gateway.over = True
    found = await loaded(lambda: False)
    assert found.tally.ended == {"run over": 1}
    assert found.seconds < 30
