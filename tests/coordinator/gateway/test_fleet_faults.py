"""Supernodes beside faults of Redis, of a replica and of requests. Only 401 may end them."""

from __future__ import annotations

import asyncio
import io
import json
import math
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.fleet import models, node_tasks, protobuf, routes
from fedstream.coordinator.gateway.fleet.models import Received
from fedstream.coordinator.gateway.fleet.node_tasks import (
    GivenVersion,
    Incoming,
    NodeTask,
    NodeTasks,
)
from fedstream.coordinator.gateway.handover import OtherReplicas
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.errors import ConfigError, DataError
from tests.coordinator.gateway.places import Place, serving
from tests.coordinator.gateway.supernodes import (
    DEVICE,
    Node,
    asked,
    changed,
    content,
    files,
    fleet,
    pem,
    pushed,
)
from tests.support import Hand, Proxy, counted, full, wait_until


@pytest.mark.parametrize("limit", ["address_rate", "device_rate"])
async def test_nothing_is_answered_that_ends_a_supernode(
    redis: RedisSettings, hand: Hand, tmp_path: Path, limit: str
) -> None:
    await hand.create()
    limits: dict[str, Any] = {limit: 0.01}
    async with fleet(hand, redis, tmp_path, **limits) as node:
        beat = "/v1/fleet/send-node-heartbeat", "HeartbeatRequest"
        said = [await node.status(*beat, node={"node_id": node.id}) for _ in range(4)]
        assert said == [200, 200, 503, 503], "too many requests: 429 to others"


ROUTES = {
    "register-node": "RegisterNodeRequest",
    "activate-node": "ActivateNodeRequest",
    "deactivate-node": "LeaveRequest",
    "unregister-node": "LeaveRequest",
    "send-node-heartbeat": "HeartbeatRequest",
    "pull-messages": "PullMessagesRequest",
    "pull-object": "PullObjectRequest",
    "confirm-message-received": "ConfirmMessageReceivedRequest",
    "get-run": "GetRunRequest",
    "get-fab": "GetFabRequest",
    "push-messages": "PushMessagesRequest",
    "push-object": "PushObjectRequest",
}


def others_of(place: Place) -> OtherReplicas:
    """The replicas that one knows besides itself."""
    fleet_ = place.gateway._fleet
    assert fleet_ is not None
    return fleet_._running.moves.others


def own(node: Node, kind: str) -> Any:
    """A request of this kind that says whose it is, and nothing else."""
    match kind:
        case "RegisterNodeRequest" | "ActivateNodeRequest":
            return protobuf.message(kind, public_key=pem(node.key))
        case "LeaveRequest":
            return protobuf.message(kind, node_id=node.id)
    return protobuf.message(kind, node={"node_id": node.id})


async def statuses(node: Node, body: Callable[[str], bytes]) -> dict[str, int]:
    """What each route answers."""
    return {
        path: (
            await node.place.ask(
                "POST", f"/v1/fleet/{path}", data=io.BytesIO(body(kind)), headers=node.headers()
            )
        ).status
        for path, kind in ROUTES.items()
    }


async def announced(hand: Hand, node: Node) -> str:
    """Has the supernode announce a reply to a task; returns the session of its objects."""
    message, _ = await asked(hand, node)
    said = await node.ask(
        "/v1/fleet/push-messages",
        "PushMessagesRequest",
        "PushMessagesResponse",
        **pushed(message, content(changed(hand, 1.0), {"num-examples": 1})),
    )
    return str(said.session_id)


async def test_no_route_answers_what_ends_a_supernode_while_redis_is_away_or_full(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with Proxy(redis, hand.keys) as proxy:
        way = proxy.settings.model_copy(update={"timeout_s": 0.2})
        async with fleet(hand, redis, tmp_path, gateways=way) as node:
            served = await statuses(node, lambda kind: own(node, kind).SerializeToString())
            assert served == dict.fromkeys(ROUTES, 200), "nothing is expected"
            proxy.refuse = lambda _said: True
            proxy.cut()
            said = await statuses(node, lambda kind: own(node, kind).SerializeToString())
            assert said == dict.fromkeys(ROUTES, 503), "away"
            proxy.refuse = None

            async def is_back() -> bool:
                said = await statuses(node, lambda kind: own(node, kind).SerializeToString())
                return said == served

            await wait_until(is_back)
            async with full(hand.client):
                said = await statuses(node, lambda kind: own(node, kind).SerializeToString())
            assert {*said.values()} <= {200, 400, 503}, said


async def test_what_is_no_request_of_a_supernode_is_no_fault_of_ours(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        await announced(hand, node)  # or the body of a reply would not be read
        for body in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 300, b"\x0a\x02\x08"):
            said = await statuses(node, {}.fromkeys(ROUTES.values(), body).__getitem__)
            assert said == dict.fromkeys(ROUTES, 400), body
        other = Node(node.place, DEVICE + 1, node.key)
        told = await statuses(other, lambda kind: own(other, kind).SerializeToString())
        keyed = {"register-node": 200, "activate-node": 200}  # they name a key and no node
        assert told == dict.fromkeys(ROUTES, 401) | keyed
        assert (
            counted(node.place.context, "fedstream_gateway_refused_total", reason="internal") == 0
        )


async def test_a_device_has_one_long_body_read_of_a_reply_that_is_expected(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Without a session none is read; with one, those beyond the first wait, and few may wait."""
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node, AsyncExitStack() as stack:
        port = int(node.place.url.rpartition(":")[2])

        async def begun(path: str) -> asyncio.StreamReader:
            """A request whose body does not end."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            lines = [f"POST /v1/fleet/{path} HTTP/1.1", "Host: here", "Content-Length: 3000000"]
            lines += [f"{name}: {value}" for name, value in node.headers().items()]
            writer.write("\r\n".join([*lines, "", "begun"]).encode())
            return reader

        async def status(reader: asyncio.StreamReader) -> int:
            return int((await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)).split()[1])

        for path in ("push-messages", "push-object"):
            assert await status(await begun(path)) == 200, path
        session = await announced(hand, node)
        fleet_ = node.place.gateway._fleet
        assert fleet_ is not None
        uploads = fleet_._running.uploads
        waiting = [await begun("push-object") for _ in range(16)]
        await wait_until(lambda: fleet_._sending[DEVICE] == 16)
        await wait_until(lambda: uploads._receiving == 2)  # places, for one of them
        assert await status(await begun("push-object")) == 503
        assert not any(reader._buffer for reader in waiting)  # type: ignore[attr-defined]
        await stack.aclose()
        await wait_until(lambda: not uploads._receiving and not fleet_._locks)
        assert not await node.push(session, b"x")  # of none of its objects: it was read


async def test_only_objects_that_are_expected_are_not_charged_to_the_device(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Three requests at once: two for messages, one that announces the reply."""
    await hand.create()
    async with fleet(hand, redis, tmp_path, device_rate=1.5) as node:
        message, received = await asked(hand, node)
        reply = content(changed(hand, 1.0), {"num-examples": 1})
        assert all(await node.reply(message, reply))
        some = next(iter(received.contents))
        pull = "/v1/fleet/pull-object", "PullObjectRequest"
        own_: dict[str, Any] = {"node": {"node_id": node.id}, "object_id": some}
        assert 503 in [await node.status(*pull, **own_) for _ in range(60)]


async def test_supernode_finds_the_replica_that_has_its_work(
    redis: RedisSettings, hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request may reach any of them; 503 has the supernode try again, elsewhere."""
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        about: dict[str, Any] = files(tmp_path, node.key)
        async with serving(hand, redis, "gw-1", poll_s=0.0, **about) as there:
            message, _ = await asked(hand, node)
            await wait_until(lambda: others_of(there))
            stranger = Node(there, DEVICE, node.key)
            reply = content(changed(hand, 0.5), {"num-examples": 3.0})
            for path, kind, said in (
                ("pull-object", "PullObjectRequest", {"object_id": message.metadata.message_id}),
                ("push-object", "PushObjectRequest", {"session_id": "s", "object_content": b"x"}),
                ("push-messages", "PushMessagesRequest", pushed(message, reply)),
            ):
                body = protobuf.message(kind, node={"node_id": node.id}, **said)
                answer = await there.ask(
                    "POST",
                    f"/v1/fleet/{path}",
                    data=io.BytesIO(body.SerializeToString()),
                    headers=stranger.headers(),
                )
                assert answer.status == 503, path
                assert answer.headers["Connection"] == "close", path
            assert all(await node.reply(message, reply)), "here it is known"

            async def queued() -> Any:
                return await hand.queue()

            assert len(await wait_until(queued)) == 1
            monkeypatch.setattr(routes, "_ELSEWHERE_S", 0.0)
            assert await stranger.reply(message, reply) == [], "nobody has it: dropped in the end"


def looks_for(node: Node, *objects: str) -> Callable[[], Awaitable[list[int]]]:
    """Asks for objects, one after the other, and what is answered."""

    async def ask() -> list[int]:
        about = "/v1/fleet/pull-object", "PullObjectRequest"
        here = {"node_id": node.id}
        return [await node.status(*about, node=here, object_id=one) for one in objects]

    return ask


async def test_supernode_that_found_its_work_may_look_again(
    redis: RedisSettings, hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here or, if it has not asked for a while, at another replica: its clock begins anew."""
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        others_of(node.place).heard("gw-1", math.inf)
        monkeypatch.setattr(routes, "_ELSEWHERE_S", 0.0)
        ask = looks_for(node, "a", "b")
        assert await ask() == [503, 200]
        assert await looks_for(node, message.metadata.message_id)() == [200]
        assert await ask() == [503, 200], "it had found an object"
        body = pushed(message, content(changed(hand, 0.5), {"num-examples": 3.0}))
        announce = "/v1/fleet/push-messages", "PushMessagesRequest"
        assert await node.status(*announce, node={"node_id": node.id}, **body) == 200
        assert await ask() == [503, 200], "its reply was expected"
        session = body["message_object_trees"][0]["object_id"][:16]
        push = "/v1/fleet/push-object", "PushObjectRequest"
        assert await node.status(*push, node={"node_id": node.id}, session_id=session) == 200
        assert await ask() == [503, 200], "and its objects were"
        monkeypatch.setattr(routes, "_APART_S", 0.0)
        assert await ask() == [503, 503], "it was elsewhere meanwhile"


async def test_reply_to_a_model_that_alone_exceeds_the_budget_is_taken(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Or its supernode would try again for ever."""
    await hand.create()
    async with fleet(hand, redis, tmp_path, model_bytes=1) as node:
        message, _ = await asked(hand, node)
        assert all(await node.reply(message, content(changed(hand, 0.5), {"num-examples": 3.0})))

        async def queued() -> Any:
            return await hand.queue()

        assert len(await wait_until(queued)) == 1


async def test_replies_have_their_room_before_they_come(hand: Hand) -> None:
    """Supernodes that begin together would exceed the budget together."""
    await hand.create()
    head, model = await hand.ledger.head(), changed(hand, 0.5)
    assert head is not None
    given = GivenVersion(head, model, models.arrays_of(model))
    known = NodeTasks(given.nbytes + node_tasks.most(model))
    known.give(given)
    mine, yours = (NodeTask(f"task-{n}", "", given, 0.1, {}) for n in range(2))
    for device, work in enumerate((mine, yours)):
        known.begin(device, work)
    known.expect(mine, Incoming("a", {"a"}, 1.0))
    known.expect(mine, Incoming("b", {"b", "c"}, 1.0))  # in place of its own
    assert mine.expected == 2, "only the newest reply's objects come without a charge"
    with pytest.raises(Refusal, match=r"gateway\.model_bytes"):
        known.expect(yours, Incoming("c", {"c"}, 1.0))
    assert yours.reply is None
    assert mine.reply is not None
    mine.reply.is_done = True
    known.expect(yours, Incoming("c", {"c"}, 1.0))


def test_few_bytes_do_not_stand_for_many() -> None:
    """An array may name a chunk again and again."""
    chunk = models.packed("ArrayChunk", b"x" * (1 << 20))
    body = json.dumps({"arraychunk_ids": [0] * 200}).encode()
    array = models.packed("Array", body, [chunk])
    received = Received({one.id: one.content for one in array.every()})
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="has 209715200 bytes: expected at most 1000"):
            received.array(array.id, 1000)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert len(received.array(array.id, 200 << 20)) == 200 << 20


async def test_supernodes_are_asked_only_for_what_they_report(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create(strategy="afa-cd", sends="delta", by_steps=True)
    assert (await hand.ledger.run()).by_steps
    async with serving(hand, redis):
        pass  # other devices report their steps
    about: dict[str, Any] = files(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(ConfigError, match="'afa-cd', which divides by local steps"):
        async with serving(hand, redis, is_open=False, **about) as place:
            await place.work
