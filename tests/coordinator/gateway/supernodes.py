"""A Flower supernode played by hand: its requests to a gateway, and its replies."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.fleet import models, protobuf
from fedstream.coordinator.gateway.fleet.models import FlowerObject, Received
from fedstream.core.layout import Model
from tests.coordinator.gateway.places import Place, coordinating, owned_by, serving
from tests.support import Hand, wait_until

DEVICE = 3
PROJECT = """
[project]
name = "some-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "clinic"
[tool.flwr.app.config]
learning-rate = 0.5
deep.er = true
"""


@dataclass
class Node:
    """A supernode: its key, and what it asks for."""

    place: Place
    device: int
    key: ec.EllipticCurvePrivateKey
    clock: timedelta = timedelta(0)
    release: str = "1.41.0"

    @property
    def id(self) -> int:
        """Its number among Flower's nodes, of which the SuperLink is the first."""
        return self.device + 2

    def headers(self) -> dict[str, str]:
        """Flower's signature, and release."""
        said = (datetime.now(UTC) + self.clock).isoformat()
        return {
            "flwr-public-key": base64.b64encode(pem(self.key)).decode(),
            "flwr-timestamp": said,
            "flwr-package-version": self.release,
            "flwr-signature": base64.b64encode(
                self.key.sign(said.encode(), ec.ECDSA(hashes.SHA256()))
            ).decode(),
        }

    async def status(self, path: str, kind: str, **fields: Any) -> int:
        """The status of an answer."""
        body = protobuf.message(kind, **fields).SerializeToString()
        answer = await self.place.ask("POST", path, data=io.BytesIO(body), headers=self.headers())
        return answer.status

    async def ask(self, path: str, kind: str, answer: str, **fields: Any) -> Any:
        """What is answered to a message."""
        fields = {"node": {"node_id": self.id}, **fields}
        body = protobuf.message(kind, **fields).SerializeToString()
        said = await self.place.ask("POST", path, data=io.BytesIO(body), headers=self.headers())
        assert said.status == 200, (said.status, said.body)
        return protobuf.parsed(answer, said.body)

    async def pull(self) -> tuple[Any, Received]:
        """A train message, and its objects."""
        said = await self.ask(
            "/v1/fleet/pull-messages", "PullMessagesRequest", "PullMessagesResponse"
        )
        [message], [tree] = said.messages_list, said.message_object_trees
        assert message.metadata.message_id == tree.object_id
        received, to_see = Received(), [tree]
        while to_see:
            one = to_see.pop()
            to_see += one.children
            got = await self.ask(
                "/v1/fleet/pull-object",
                "PullObjectRequest",
                "PullObjectResponse",
                object_id=one.object_id,
            )
            assert hashlib.sha256(got.object_content).hexdigest() == one.object_id
            received.contents[one.object_id] = got.object_content
        return message, received

    async def reply(self, message: Any, content: FlowerObject) -> list[bool]:
        """Sends a reply; whether each of its objects was stored."""
        said = await self.ask(
            "/v1/fleet/push-messages",
            "PushMessagesRequest",
            "PushMessagesResponse",
            **pushed(message, content),
        )
        every = {one.id: one for one in replied(message, content).every()}
        assert {*said.objects_to_push} in ({*every}, set())
        return [
            await self.push(said.session_id, every[id_].content) for id_ in said.objects_to_push
        ]

    async def push(self, session: str, content: bytes, name: str = "") -> bool:
        """Sends an object; whether it was stored."""
        said = await self.ask(
            "/v1/fleet/push-object",
            "PushObjectRequest",
            "PushObjectResponse",
            session_id=session,
            object_content=content,
            object_id=name or hashlib.sha256(content).hexdigest(),
        )
        return bool(said.stored)


def replied(message: Any, content: FlowerObject) -> FlowerObject:
    """A reply as an object."""
    about = {"reply_to_message_id": message.metadata.message_id}
    body = protobuf.message("Message", metadata=about).SerializeToString()
    return models.packed("Message", body, [content])


def pushed(message: Any, content: FlowerObject) -> dict[str, Any]:
    """How a reply is announced."""
    about = {"reply_to_message_id": message.metadata.message_id}
    return {
        "messages_list": [{"metadata": about}],
        "message_object_trees": [tree_of(replied(message, content))],
        "clientapp_runtime_list": [1.5],
    }


def tree_of(one: FlowerObject) -> dict[str, Any]:
    return {"object_id": one.id, "children": [tree_of(part) for part in one.parts]}


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def listed(key: Any) -> str:
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return str(key.public_key().public_bytes(*openssh).decode())


def packed_app(folder: Path) -> Path:
    """A Flower app as a file."""
    with zipfile.ZipFile(folder / "app.fab", "w") as file:
        file.writestr("pyproject.toml", PROJECT)
    return folder / "app.fab"


def files(folder: Path, key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """A gateway's settings for one supernode."""
    (folder / "keys").write_text(f"# ours\n\n{DEVICE} {listed(key)} clinic 3\n")
    return {"flower_app": str(packed_app(folder)), "flower_keys": str(folder / "keys")}


@asynccontextmanager
async def fleet(
    hand: Hand,
    redis: RedisSettings,
    folder: Path,
    *,
    gateways: RedisSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Node]:
    """A gateway for supernodes, and the one of a device; ``gateways``: its own way to Redis."""
    key = ec.generate_private_key(ec.SECP384R1())
    about: dict[str, Any] = {**files(folder, key), "device_rate": 1000.0, **settings}
    async with (
        coordinating(hand, redis),
        serving(hand, gateways or redis, poll_s=0.0, **about) as place,
    ):
        yield Node(place, DEVICE, key)


async def asked(hand: Hand, node: Node, **task: Any) -> tuple[Any, Received]:
    """Has the supernode asked to train; returns the message, and its objects."""
    said = await node.ask("/v1/fleet/pull-messages", "PullMessagesRequest", "PullMessagesResponse")
    assert not said.messages_list
    await owned_by(hand, DEVICE, "gw-0")
    await hand.open(device=DEVICE, **task)
    await wait_until(lambda: len(node.place.gateway.replica.sessions) == 1)
    return await node.pull()


def content(
    model: Model, numbers: Mapping[str, float], names: tuple[str, ...] | None = None
) -> FlowerObject:
    """A reply of a NumPyClient, or of the Message API."""
    record = models.arrays_of(model)
    if names is not None:
        record = models.refers("ArrayRecord", dict(zip(names, record.parts, strict=True)))
    items = [{"key": key, "value": {"double": value}} for key, value in numbers.items()]
    metrics = protobuf.message("Values", items=items).SerializeToString()
    examples = models.packed("MetricRecord", metrics)
    return models.refers(
        "RecordDict", {"fitres.parameters": record, "fitres.num_examples": examples}
    )


def changed(hand: Hand, by: float) -> Model:
    model = Model(hand.layout)
    model.floats[:] = np.arange(model.floats.size, dtype=np.float32) + by
    return model
