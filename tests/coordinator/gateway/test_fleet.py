"""Flower's Fleet API, spoken to a real gateway by hand; tests/flower has the real supernode."""

from __future__ import annotations

import hashlib
import io
import json
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.fleet import models, protobuf
from fedstream.coordinator.gateway.fleet.files import FlowerApp, Roster
from fedstream.coordinator.gateway.fleet.models import FlowerObject, Received
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.core.messages import Upload
from tests.coordinator.gateway.places import SITE, ends, evaluates, owned_by, serving
from tests.coordinator.gateway.supernodes import (
    DEVICE,
    Node,
    asked,
    changed,
    content,
    fleet,
    listed,
    packed_app,
    pem,
    replied,
)
from tests.support import Hand, layout_of, wait_until


@pytest.mark.parametrize("parameters", [4, 2_000_000], ids=["one chunk", "several chunks"])
async def test_reply_is_an_update_once(
    redis: RedisSettings, hand: Hand, tmp_path: Path, parameters: int
) -> None:
    hand.layout = layout_of(parameters)
    version = await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, received = await asked(hand, node, epochs=None, steps=7)
        assert (message.metadata.group_id, message.metadata.dst_node_id) == ("0", node.id)
        [record] = received.body(message.metadata.message_id, "Message")[1]
        records = received.named(record, "RecordDict")
        assert records["arrays"] == records["fitins.parameters"]
        given = received.named(records["arrays"], "ArrayRecord")
        assert [*given] == [one.name for one in hand.layout.tensors]
        was = await hand.model(version)
        arrays = [np.load(io.BytesIO(received.array(id_, 100 << 20))) for id_ in given.values()]
        assert np.array_equal(np.concatenate([one.ravel() for one in arrays]), was.floats)
        config = protobuf.parsed("Values", received.body(records["config"], "ConfigRecord")[2])
        values = {one.key: one.value for one in config.items}
        assert values["local-steps"].sint64 == 7
        assert values["lr"].double == values["learning-rate"].double == 0.5
        assert values["deep.er"].bool is True
        assert values["server-round"].sint64 == 1

        trained = changed(hand, 0.5)
        names = tuple(str(n) for n in range(len(hand.layout.tensors)))
        reply = content(trained, {"num_examples": 12.0, "train_loss": 0.25}, names)
        stored = await node.reply(message, reply)
        assert stored
        assert all(stored)

        async def queued() -> Any:
            return await hand.queue()

        [(_, upload)] = await wait_until(queued)
        assert isinstance(upload, Upload)
        assert (upload.device, upload.site, upload.tau, upload.base) == (
            DEVICE,
            SITE,
            0,
            version.digest,
        )
        assert (upload.samples, upload.loss, upload.lr, upload.steps) == (12, 0.25, 0.5, 0)
        assert upload.seconds == 1.5
        arrived = Model(hand.layout)
        await blobs.read(
            hand.client,
            hand.keys.queued(upload.blob),
            arrived,
            digest=upload.digest,
            chunks=upload.chunks,
        )
        assert np.array_equal(arrived.floats, trained.floats)
        session = replied(message, reply).id[:16]
        assert await node.push(session, b"anything"), "the same again"
        assert await node.reply(message, reply) == [True] * len(stored), "all of it again"
        assert len(await hand.queue()) == 1
        await hand.balanced()


@pytest.mark.parametrize("spoil", ["no examples", "another shape", "one name less", "integers"])
async def test_reply_that_is_no_update_gives_the_task_up(
    redis: RedisSettings, hand: Hand, tmp_path: Path, spoil: str
) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        [name, *rest] = [one.name for one in hand.layout.tensors]
        arrays = dict(zip((name, *rest), models.arrays_of(changed(hand, 0)).parts, strict=True))
        numbers = {"num-examples": 3.0}
        match spoil:
            case "no examples":
                numbers = {}
            case "another shape":
                arrays[name] = array(np.zeros(3, np.float32))
            case "one name less":
                del arrays[name]
            case "integers":
                arrays[name] = array(np.zeros(hand.layout.tensors[0].shape, np.int32))
        items = [{"key": key, "value": {"double": value}} for key, value in numbers.items()]
        metrics = protobuf.message("Values", items=items).SerializeToString()
        records = {
            "arrays": models.refers("ArrayRecord", arrays),
            "metrics": models.packed("MetricRecord", metrics),
        }
        await node.reply(message, models.refers("RecordDict", records))
        await ends(hand, "given_up", "raised DataError")
        assert await hand.queue() == []


def array(values: Any) -> FlowerObject:
    file = io.BytesIO()
    np.save(file, values)
    chunk = models.packed("ArrayChunk", file.getvalue())
    return models.packed("Array", json.dumps({"arraychunk_ids": [0]}).encode(), [chunk])


async def announced(node: Node, message: Any, **reply: Any) -> Any:
    """A reply whose one object the gateway does not have, and what it says."""
    about = {"reply_to_message_id": message.metadata.message_id}
    return await node.ask(
        "/v1/fleet/push-messages",
        "PushMessagesRequest",
        "PushMessagesResponse",
        messages_list=[{"metadata": about, **reply}],
        message_object_trees=[{"object_id": "0" * 64}],
    )


async def test_error_gives_the_task_up(redis: RedisSettings, hand: Hand, tmp_path: Path) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        failed = {"code": 2, "reason": "<class 'ValueError'>:<'no'>"}
        said = await announced(node, message, error=failed)
        assert not said.objects_to_push
        await ends(hand, "given_up", "raised ValueError")


async def test_reply_of_more_objects_than_a_model_has_gives_the_task_up(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Their names alone would fill the memory."""
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        about = {"reply_to_message_id": message.metadata.message_id}
        children = [{"object_id": f"{n:064d}"} for n in range(1000)]
        reply: dict[str, Any] = {"messages_list": [{"metadata": about}]}
        long = [{"object_id": "0" * 64, "children": [{"object_id": "0" * 65}]}]
        push = "/v1/fleet/push-messages", "PushMessagesRequest"
        here = {"node_id": node.id}
        assert await node.status(*push, node=here, message_object_trees=long, **reply) == 400
        many = [{"object_id": "f" * 64, "children": children}]
        said = await node.ask(*push, "PushMessagesResponse", message_object_trees=many, **reply)
        assert not said.objects_to_push
        await ends(hand, "given_up", "raised DataError")


async def test_object_that_is_not_what_it_says_is_not_stored(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        said = await announced(node, message)
        assert [*said.objects_to_push] == ["0" * 64]
        assert not await node.push(said.session_id, b"zeros", "0" * 64)
        assert not await node.push("another", b"zeros")
        assert await hand.queue() == []


async def test_supernode_that_ends_gives_its_task_up(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        assert (
            await node.status("/v1/fleet/deactivate-node", "LeaveRequest", node_id=node.id) == 200
        )
        await ends(hand, "given_up", "dropped out")
        assert await node.reply(message, content(changed(hand, 1), {"num_examples": 1.0})) == []


async def test_supernode_that_has_become_too_stale_works_on_and_its_reply_is_not_used(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Flower cannot interrupt it, but another device can have its place at once."""
    await hand.create(max_staleness=0)
    beat = "/v1/fleet/send-node-heartbeat", "HeartbeatRequest", "HeartbeatResponse"
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await asked(hand, node)
        assert (await node.ask(*beat)).success
        assert len(node.place.gateway.replica.sessions) == 1
        await hand.commit(1)
        await node.place.gateway.replica.run_cache.look()
        assert (await node.ask(*beat)).success
        await ends(hand, "given_up", "became too stale")
        assert all(await node.reply(message, content(changed(hand, 1), {"num_examples": 1.0})))
        assert await hand.queue() == []


async def test_who_is_not_listed_is_turned_away(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """401 stops a supernode: it is answered to nobody who may try again."""
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        activate = "/v1/fleet/activate-node", "ActivateNodeRequest"
        own = pem(node.key)
        assert await node.status(*activate, public_key=own) == 200
        other = Node(node.place, DEVICE, ec.generate_private_key(ec.SECP384R1()))
        assert await other.status(*activate, public_key=pem(other.key)) == 401, "unknown key"
        assert await node.status(*activate, public_key=pem(other.key)) == 401, "another's"
        late = Node(node.place, DEVICE, node.key, timedelta(seconds=-90))
        assert await late.status(*activate, public_key=own) == 401, "an old signature"
        forged = node.headers() | {"flwr-signature": other.headers()["flwr-signature"]}
        answer = await node.place.ask("POST", activate[0], data=b"", headers=forged)
        assert answer.status == 401
        beat = "/v1/fleet/send-node-heartbeat", "HeartbeatRequest"
        assert await node.status(*beat, node={"node_id": node.id}) == 200
        assert await node.status(*beat, node={"node_id": node.id + 1}) == 401, "another node"
        await hand.client.call("HSET", hand.keys.revoked(SITE), DEVICE, "1")
        assert await node.status(*beat, node={"node_id": node.id}) == 401, "revoked"


async def test_off_unless_it_is_set(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        assert (await place.ask("POST", "/v1/fleet/activate-node", data=b"")).status in (404, 405)


def test_keys_are_checked_before_anything_is_served(tmp_path: Path) -> None:
    one = listed(ec.generate_private_key(ec.SECP256R1()))
    file = tmp_path / "keys"
    for text, wanted in (
        ("", "no keys"),
        (f"x {one}", "line 1: expected DEVICE"),
        (f"1 {one}\n\n2 {one}", "line 3.*twice"),
        ("1 ssh-rsa AAAA", "line 1: expected DEVICE"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=wanted):
            Roster.read(str(file))
    with pytest.raises(ConfigError, match=r"gateway\.flower_keys = 'nowhere'"):
        Roster.read("nowhere")


def test_app_is_read_as_flower_builds_it(tmp_path: Path) -> None:
    app = FlowerApp.read(str(packed_app(tmp_path)))
    assert (app.name, app.version) == ("clinic/some-app", "1.0.0")
    assert app.digest == hashlib.sha256(app.content).hexdigest()
    assert app.config == {"learning-rate": 0.5, "deep.er": True}
    (tmp_path / "keys").write_text("no app")
    with pytest.raises(ConfigError, match=r"gateway\.flower_app = .*keys"):
        FlowerApp.read(str(tmp_path / "keys"))


# models as Flower's objects

LARGE = 3 * models.CHUNK // 4 + 1000  # parameters of an array of four chunks
DTYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<f4"}


def test_arrays_are_files_of_numpys_whatever_their_dtype_and_length() -> None:
    layout = Layout(
        (
            *(Tensor(dtype, (3, 2), dtype, "parameter") for dtype in DTYPES),
            Tensor("large", (LARGE,), "float32", "parameter"),
            Tensor("one", (), "float32", "buffer"),
            Tensor("none", (0, 4), "float32", "buffer"),
            Tensor("seen", (2,), "int64", "integer"),
        )
    )
    model = Model(layout)
    model.floats[:] = np.random.default_rng(0).standard_normal(model.floats.size, np.float32)
    model.integers[:] = (7, 8)
    whole = models.arrays_of(model)
    received = Received({one.id: one.content for one in whole.every()})
    given = received.named(whole.id, "ArrayRecord")
    for name, values in model.tensors().items():
        wanted = np.asarray(values, DTYPES.get(name, values.dtype))
        file = io.BytesIO()
        np.save(file, wanted.reshape(next(t.shape for t in layout.tensors if t.name == name)))
        assert received.array(given[name], 1 << 30) == file.getvalue(), name
    assert len(received.body(given["large"], "Array")[1]) == 4
    copied = 6 * (8 + 2)  # float64 and float16, which the model has as float32
    assert models.memory_of(layout) == layout.nbytes + copied


def test_objects_share_the_models_memory() -> None:
    model = Model(layout_of(LARGE))
    model.floats[:] = np.arange(LARGE)
    tracemalloc.start()
    try:
        kept: Any = models.arrays_of(model)
        assert tracemalloc.get_traced_memory()[1] < model.buffer.nbytes / 50
    finally:
        tracemalloc.stop()
    assert sum(len(one.content) for one in kept.every()) > model.buffer.nbytes


# evaluations


async def evaluating(hand: Hand, node: Node) -> tuple[Any, Received]:
    """Has the supernode asked to evaluate; returns the message, and its objects."""
    said = await node.ask("/v1/fleet/pull-messages", "PullMessagesRequest", "PullMessagesResponse")
    assert not said.messages_list
    await owned_by(hand, DEVICE, "gw-0")
    await evaluates(hand, DEVICE)
    await hand.commit(1)  # not the version that is evaluated
    await wait_until(lambda: len(node.place.gateway.replica.sessions) == 1)
    return await node.pull()


def measured(**numbers: float) -> FlowerObject:
    """A client's reply to an evaluate message."""
    items = [{"key": key, "value": {"double": value}} for key, value in numbers.items()]
    metrics = protobuf.message("Values", items=items).SerializeToString()
    return models.refers("RecordDict", {"metrics": models.packed("MetricRecord", metrics)})


async def has_counted(hand: Hand, outcome: str) -> None:
    async def is_so() -> bool:
        return (await hand.ledger.tally()).counts.get(f"evaluated:{outcome}") == 1

    await wait_until(is_so, what=outcome)


async def test_supernode_evaluates_a_version(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    """Its metrics weigh as many examples as it says."""
    version = await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, received = await evaluating(hand, node)
        assert message.metadata.message_type == "evaluate"
        _, [top], _ = received.body(message.metadata.message_id, "Message")
        names = received.named(top, "RecordDict")
        assert names["evaluateins.parameters"] == names["arrays"]
        told = measured(eval_acc=0.75, eval_loss=0.5, num_examples=8.0)
        assert all(await node.reply(message, told))
        await has_counted(hand, "measured")
        [answer] = (await hand.ledger.answers()).values()
        assert answer.measured is not None
        assert answer.measured.sums == {"accuracy": (6.0, 8.0), "loss": (4.0, 8.0)}
        assert (answer.measured.samples, answer.measured.base) == (8, version.digest)


async def test_reply_without_examples_is_no_evaluation(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with fleet(hand, redis, tmp_path) as node:
        message, _ = await evaluating(hand, node)
        await node.reply(message, measured(eval_acc=0.75))
        await has_counted(hand, "raised DataError")
