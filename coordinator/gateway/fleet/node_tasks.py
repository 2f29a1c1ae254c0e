"""The tasks of this replica's supernodes: the model sent, and the reply received so far."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fedstream.coordinator.gateway.fleet.models import (
    CHUNK,
    RECORDS,
    FlowerObject,
    Received,
    memory_of,
)
from fedstream.coordinator.gateway.refusals import RETRY_S, Refusal

if TYPE_CHECKING:
    from fedstream.core.layout import Model
    from fedstream.core.records import Head

_EXTRA = 1 << 20  # bytes of a reply in addition to its arrays
_ID = 64  # characters of an object's name


class GivenVersion:
    """A version's model as Flower's objects, shared by the supernodes that train from it."""

    def __init__(self, head: Head, model: Model, arrays: FlowerObject) -> None:
        self.head = head
        self.model = model
        self.arrays = arrays

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory: the model, and objects that are no views of it."""
        return memory_of(self.model.layout)


@dataclass
class Incoming:
    """A reply whose objects are arriving."""

    message: str  # id of the topmost object
    wanted: set[str]
    seconds: float  # the client app's stated duration
    most: int = 0  # reserved bytes
    received: Received = field(default_factory=Received)
    size: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_done: bool = False

    @property
    def session(self) -> str:
        """The id by which the supernode refers to the reply."""
        return self.message[:16]

    @property
    def is_whole(self) -> bool:
        """Whether all objects have arrived."""
        return not self.wanted

    def take(self, id_: str, content: bytes) -> bool:
        """Add an object; False if the reply has no such object or the digest is wrong."""
        if self.is_done or id_ in self.received.contents:
            return True
        if id_ not in self.wanted or hashlib.sha256(content).hexdigest() != id_:
            return False
        self.wanted.remove(id_)
        self.received.contents[id_] = content
        self.size += len(content)
        return True


@dataclass
class NodeTask:
    """A supernode's task, its train message, and its reply if one has begun."""

    task: str
    message: str  # id of the train message
    given: GivenVersion
    lr: float
    objects: dict[str, FlowerObject]  # not confirmed yet
    reply: Incoming | None = None
    expected: int = 0  # requests for objects, and with the reply's objects, still to come

    def __post_init__(self) -> None:
        self.expected = len(self.objects)


class NodeTasks:
    """The tasks of all supernodes, within a memory budget."""

    def __init__(self, budget: int) -> None:
        """``budget``: bytes; one model and one reply always fit."""
        self._budget = budget
        self._by_device: dict[int, NodeTask] = {}
        self._given: WeakValueDictionary[str, GivenVersion] = WeakValueDictionary()

    def given(self, digest: str) -> GivenVersion | None:
        """The objects of this version if a supernode still trains from it, else None."""
        return self._given.get(digest)

    def give(self, given: GivenVersion) -> None:
        """Remember a version's objects, so that supernodes share them."""
        self._given[given.head.given] = given

    def check_room(self, size: int) -> None:
        """Raise Refusal (503) unless ``size`` more bytes fit. A single model always fits."""
        if self._given and self._used(self._replies()) + size > self._budget:
            raise _no_room()

    def expect(self, node_task: NodeTask, reply: Incoming) -> None:
        """Register a reply to a task, replacing an earlier one.

        Reserves the reply's memory. Raises Refusal (503) unless it fits; a single reply always
        fits.
        """
        others = [one for one in self._replies() if one is not node_task.reply]
        reply.most = most(node_task.given.model)
        if others and self._used(others) + reply.most > self._budget:
            raise _no_room()
        node_task.reply = reply
        node_task.expected = len(reply.wanted)

    def _replies(self) -> list[Incoming]:
        """The arriving replies."""
        replies = (one.reply for one in self._by_device.values())
        return [one for one in replies if one is not None and not one.is_done]

    def _used(self, replies: Iterable[Incoming]) -> int:
        return sum(one.nbytes for one in self._given.values()) + sum(one.most for one in replies)

    def get(self, device: int) -> NodeTask | None:
        """The task of a device's supernode, or None."""
        return self._by_device.get(device)

    def begin(self, device: int, node_task: NodeTask) -> None:
        """Set the task of a device's supernode."""
        self._by_device[device] = node_task

    def end(self, device: int) -> None:
        """Forget the task of a device's supernode."""
        self._by_device.pop(device, None)

    def keep(self, present: Iterable[int]) -> None:
        """Forget the tasks of absent devices."""
        for device in self._by_device.keys() - {*present}:
            del self._by_device[device]


def reply(said: Any) -> Incoming:
    """Make a reply from its message. Raises Refusal unless it is one message with objects."""
    if len(said.messages_list) != 1 or len(said.message_object_trees) != 1:
        raise Refusal(400, "malformed", "expected one message, and the tree of its objects")
    wanted: set[str] = set()
    to_see = [said.message_object_trees[0]]
    while to_see:
        tree = to_see.pop()
        if len(tree.object_id) != _ID:
            raise Refusal(400, "malformed", "an object's id is its SHA-256")
        wanted.add(tree.object_id)
        to_see.extend(tree.children)
    seconds = said.clientapp_runtime_list[0] if said.clientapp_runtime_list else 0.0
    return Incoming(
        said.message_object_trees[0].object_id,
        wanted,
        seconds if math.isfinite(seconds) and seconds >= 0 else 0.0,
    )


def _no_room() -> Refusal:
    return Refusal(
        503,
        "busy",
        "supernodes have as much in memory as gateway.model_bytes allows",
        retry_after_s=RETRY_S,
    )


def most_objects(model: Model) -> int:
    """The most objects that a reply may have: a message, records, arrays and chunks."""
    arrays = len(model.layout.tensors)
    return 2 + RECORDS + 2 * arrays + most(model) // CHUNK


def most(model: Model) -> int:
    """The most bytes of a reply: its numbers may take twice the bytes of the run's."""
    return 2 * model.buffer.nbytes + 4096 * len(model.layout.tensors) + _EXTRA
