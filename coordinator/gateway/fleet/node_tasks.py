"""What supernodes of this replica work on: the model that each was given, and its reply so far."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fedstream.coordinator.gateway.fleet.models import RECORDS, memory_of
from fedstream.coordinator.gateway.fleet.objects import CHUNK, FlowerObject, Received
from fedstream.coordinator.gateway.refusals import RETRY_S, Refusal

if TYPE_CHECKING:
    from fedstream.core.layout import Model
    from fedstream.core.records import Head

_EXTRA = 1 << 20  # bytes of a reply beside its arrays
_ID = 64  # characters of an object's name


class GivenVersion:
    """A version's model as Flower's objects, shared by all who were given it."""

    def __init__(self, head: Head, model: Model, arrays: FlowerObject) -> None:
        self.head = head
        self.model = model
        self.arrays = arrays

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about: the model, and what its objects don't share with it."""
        return memory_of(self.model.layout)


@dataclass
class Incoming:
    """A reply while its objects arrive."""

    message: str  # id of the topmost object
    wanted: set[str]
    seconds: float  # that the client app took, as it says
    most: int = 0  # bytes for which there is room
    received: Received = field(default_factory=Received)
    size: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_done: bool = False

    @property
    def session(self) -> str:
        """What the supernode names the reply by."""
        return self.message[:16]

    @property
    def is_whole(self) -> bool:
        """Whether all objects are there."""
        return not self.wanted

    def take(self, id_: str, content: bytes) -> bool:
        """Take an object; False if it is none of this reply's, or not what it says it is."""
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
    """A device's task: what it was given for it, and its reply if there is one."""

    task: str
    message: str  # id of what it was given
    given: GivenVersion
    lr: float
    objects: dict[str, FlowerObject]  # until it has them
    reply: Incoming | None = None
    expected: int = 0  # requests for its objects and with those of its reply, each once

    def __post_init__(self) -> None:
        self.expected = len(self.objects)


class NodeTasks:
    """The work of all devices, within a budget of memory."""

    def __init__(self, budget: int) -> None:
        """``budget``: bytes; one model and one reply always fit."""
        self._budget = budget
        self._by_device: dict[int, NodeTask] = {}
        self._given: WeakValueDictionary[str, GivenVersion] = WeakValueDictionary()

    def given(self, digest: str) -> GivenVersion | None:
        """What a version was given as, if somebody has it still."""
        return self._given.get(digest)

    def give(self, given: GivenVersion) -> None:
        """Note a version that is given, so that others share it."""
        self._given[given.head.given] = given

    def check_room(self, size: int) -> None:
        """Raise Refusal (503) unless a model of so many bytes fits in, as one alone does."""
        if self._given and self._used(self._replies()) + size > self._budget:
            raise _no_room()

    def expect(self, node_task: NodeTask, reply: Incoming) -> None:
        """Take a reply to a device's work, in place of an earlier one.

        It has its room from now on, however little of it has come. Raises Refusal (503) unless it
        fits in, as one alone does.
        """
        others = [one for one in self._replies() if one is not node_task.reply]
        reply.most = most(node_task.given.model)
        if others and self._used(others) + reply.most > self._budget:
            raise _no_room()
        node_task.reply = reply
        node_task.expected = len(reply.wanted)

    def _replies(self) -> list[Incoming]:
        """The replies that are coming in."""
        replies = (one.reply for one in self._by_device.values())
        return [one for one in replies if one is not None and not one.is_done]

    def _used(self, replies: Iterable[Incoming]) -> int:
        return sum(one.nbytes for one in self._given.values()) + sum(one.most for one in replies)

    def get(self, device: int) -> NodeTask | None:
        """What a device works on."""
        return self._by_device.get(device)

    def begin(self, device: int, node_task: NodeTask) -> None:
        """Have a device work on something new."""
        self._by_device[device] = node_task

    def end(self, device: int) -> None:
        """Forget what a device works on."""
        self._by_device.pop(device, None)

    def keep(self, present: Iterable[int]) -> None:
        """Forget the work of devices that are not present."""
        for device in self._by_device.keys() - {*present}:
            del self._by_device[device]


def reply(said: Any) -> Incoming:
    """A reply whose message has come. Raises Refusal if it is not one message with its objects."""
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
    """Objects that a reply may have: message and records, and of each array itself and chunks."""
    arrays = len(model.layout.tensors)
    return 2 + RECORDS + 2 * arrays + most(model) // CHUNK


def most(model: Model) -> int:
    """Bytes that a reply may have: each number may be twice as long as ours."""
    return 2 * model.buffer.nbytes + 4096 * len(model.layout.tensors) + _EXTRA
