"""The routes ``/v1/fleet/*`` for Flower's supernodes, which share the device sessions."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fedstream.broker.published import read_newest
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.fleet import models, node_tasks, protobuf
from fedstream.coordinator.gateway.fleet.files import FlowerApp, Roster
from fedstream.coordinator.gateway.fleet.models import CHUNK, packed
from fedstream.coordinator.gateway.fleet.node_tasks import (
    GivenVersion,
    Incoming,
    NodeTask,
    NodeTasks,
)
from fedstream.coordinator.gateway.refusals import RETRY_S, Refusal, body_of
from fedstream.coordinator.gateway.uploads import PLACE
from fedstream.core import reasons
from fedstream.core.digest import algorithm_of, digest_of
from fedstream.core.errors import BlobDamaged, BlobMissing, DataError
from fedstream.core.layout import Model
from fedstream.core.messages import Evaluation
from fedstream.protocol.flower import RATES
from fedstream.protocol.messages import UpdateReport
from fedstream.runtime.limits import LogLimiter

if TYPE_CHECKING:
    from fedstream.coordinator.access import Handler
    from fedstream.coordinator.gateway.app import GatewayApp, Opened
    from fedstream.coordinator.gateway.device_sessions import Held
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.core.messages import Assignment
    from fedstream.core.records import Head

_PATH = "/v1/fleet/"
_SERVER = 1  # the SuperLink's node
_FIRST_NODE = 2  # device 0's node
_WAIT_S = 10.0  # wait for a task; a supernode waits 30 s for an answer and asks again after 3 s
_TTL_S = 86400.0  # of a message; required by Flower, but without effect here
# Time for a supernode to find the replica with its task: it retries at least every 20 s.
_ELSEWHERE_S = 120.0
_APART_S = 60.0  # pause between misses after which a new search begins
_VERSION = "flwr-package-version"  # header with the supernode's release of Flower
_SMALL = 64 << 10
_TREE = 4 << 20  # bytes of a message's tree of objects
_AT_ONCE = 16  # concurrent long bodies of a device, read one at a time; Flower sends 8
# The status codes that a supernode handles: 401 stops it, after 403 it continues with its next
# request, and after 503 it repeats the request. Any other code ends the supernode and its task.
_UNDERSTOOD = (200, 400, 401, 403, 503)

_OF_OBJECTS = ("PullObjectRequest", "PushObjectRequest")

FleetCall = Callable[[int, Any], Awaitable[Any]]


class FleetRoutes:
    """The routes. Before the gateway runs they answer 503."""

    def __init__(
        self, replica: Replica, gateway: GatewayApp, app: FlowerApp, roster: Roster
    ) -> None:
        self._settings = replica.settings
        self._sessions = replica.sessions
        self._run_cache = replica.run_cache
        self._client = replica.client
        self._keys = replica.keys
        self._ledger = replica.ledger
        self._gateway = gateway
        self._app = app
        self._roster = roster
        self._node_tasks = NodeTasks(replica.settings.model_bytes)
        self._reading = asyncio.Lock()
        self._missed: dict[int, tuple[float, float]] = {}  # device -> first and last miss
        self._greetings = LogLimiter(burst=3, per_s=1 / 60)  # log lines per device
        self._sending = Counter[int]()  # device -> requests with long bodies
        self._locks: dict[int, asyncio.Lock] = {}  # by device, while it has requests

    def routes(self) -> Sequence[web.RouteDef]:
        """All routes."""
        calls: tuple[tuple[str, str, FleetCall, int], ...] = (
            ("register-node", "RegisterNodeRequest", self._activate, _SMALL),
            ("activate-node", "ActivateNodeRequest", self._activate, _SMALL),
            ("deactivate-node", "LeaveRequest", self._deactivate, _SMALL),
            ("unregister-node", "LeaveRequest", self._deactivate, _SMALL),
            ("send-node-heartbeat", "HeartbeatRequest", self._heartbeat, _SMALL),
            ("pull-messages", "PullMessagesRequest", self._pull_messages, _SMALL),
            ("pull-object", "PullObjectRequest", self._pull_object, _SMALL),
            ("confirm-message-received", "ConfirmMessageReceivedRequest", self._confirm, _SMALL),
            ("get-run", "GetRunRequest", self._get_run, _SMALL),
            ("get-fab", "GetFabRequest", self._get_fab, _SMALL),
            ("push-messages", "PushMessagesRequest", self._push_messages, _TREE),
            ("push-object", "PushObjectRequest", self._push_object, CHUNK + _TREE),
        )
        answering = self._gateway.answering
        return [
            web.post(
                _PATH + path, self._understood(answering(partial(self._answer, kind, answer, most)))
            )
            for path, kind, answer, most in calls
        ]

    def _understood(self, handler: Handler) -> Handler:
        """Wrap a handler: every error becomes an answer after which a supernode continues."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                response = await handler(request)
            except ConnectionError:
                raise  # the supernode has disconnected
            except Exception as error:
                self._gateway.log_failure(request.path, error)
                response = web.Response(status=503)
            if response.status not in _UNDERSTOOD:
                response.set_status(503)
            if response.status == 503:
                response.force_close()  # the next connection may reach another replica
            return response

        return answer

    async def _answer(
        self,
        kind: str,
        answer: FleetCall,
        most: int,
        request: web.Request,
    ) -> web.StreamResponse:
        if self._gateway.is_stopping:
            raise self._later("the gateway is starting or stopping")
        device, pem = self._roster.device_of(request.headers, self._ledger.now())
        _, is_revoked = await self._ledger.registration(device)
        if is_revoked:
            raise Refusal(401, "revoked", f"device {device} is revoked")
        node_task = self._node_tasks.get(device)
        if kind in _OF_OBJECTS and node_task is not None and node_task.expected > 0:
            node_task.expected -= 1  # expected requests are free of charge
        else:
            self._gateway.charge(device)
        if most <= _SMALL:
            body = await body_of(request, within_s=self._settings.body_s, most=most)
        else:
            async with self._turn(device):
                if (unread := self._unexpected(kind, device)) is not None:
                    response = _response(unread)
                    response.force_close()
                    return response
                body = await self._long_body(request, most)
        said = protobuf.parsed(kind, body)
        node = device + _FIRST_NODE
        match kind:
            case "RegisterNodeRequest" | "ActivateNodeRequest":
                is_own = said.public_key == pem
                self._greet(device, request.headers.get(_VERSION, ""))
            case "LeaveRequest":
                is_own = said.node_id == node
            case _:
                is_own = said.node.node_id == node
        if not is_own:
            raise Refusal(401, "key", f"the key is device {device}'s, the request another's")
        self._sessions.heard(device, time.monotonic())
        return _response(await answer(device, said))

    # long bodies: only for an expected reply, one per device, within the uploads' memory

    @asynccontextmanager
    async def _turn(self, device: int) -> AsyncIterator[None]:
        """Serialise a device's requests with long bodies. Raises Refusal above the limit."""
        if self._sending[device] >= _AT_ONCE:
            raise self._later(f"device {device} sends too much at once")
        self._sending[device] += 1
        try:
            async with self._locks.setdefault(device, asyncio.Lock()):
                yield
        finally:
            self._sending[device] -= 1
            if not self._sending[device]:
                del self._sending[device], self._locks[device]

    def _unexpected(self, kind: str, device: int) -> Any:
        """The answer to a reply, or a part of a reply, that no task waits for; None if one does.

        Raises Refusal as :meth:`_miss` does.
        """
        node_task = self._node_tasks.get(device)
        if kind == "PushMessagesRequest" and node_task is None:
            self._miss(device)
            return protobuf.message("PushMessagesResponse")
        if kind == "PushObjectRequest" and (node_task is None or node_task.reply is None):
            self._miss(device)
            return protobuf.message("PushObjectResponse", stored=False)
        return None

    async def _long_body(self, request: web.Request, most: int) -> bytes:
        """Read a body, taking as many upload places as its length needs. Raises Refusal."""
        length = most if request.content_length is None else min(most, request.content_length)
        with self._running.uploads.place(1 + length // PLACE):
            return await body_of(request, within_s=self._settings.chunk_s, most=most)

    # coming and going

    def _greet(self, device: int, version: str) -> None:
        """Log an arriving supernode, and whether its release of Flower is tested."""
        if self._greetings.passes(device) is None:
            return
        log = self._running.context.log.bind(device=device, flower=version[:40])
        log.info("supernode arrived")
        if not f"{version}.".startswith(tuple(f"{one}." for one in protobuf.TESTED)):
            log.warning("supernode of an untested release of Flower", tested=protobuf.TESTED)

    async def _activate(self, device: int, _said: Any) -> Any:
        return protobuf.message("NodeResponse", node_id=device + _FIRST_NODE)

    async def _deactivate(self, device: int, _said: Any) -> Any:
        """Handle a supernode's end, and give up its task."""
        self._node_tasks.end(device)
        while (held := self._sessions.first(device)) is not None:
            await self._running.tasks.give_up(held, reasons.DROPPED_OUT)
        self._sessions.leave(device)
        return protobuf.message("Nothing")

    async def _heartbeat(self, device: int, _said: Any) -> Any:
        """Give up the supernode's task if it is of no use any more; Flower cannot interrupt it."""
        tasks = self._running.tasks
        if self._run_cache.has_begun:
            held = await tasks.due(device, evaluates=True)
            why = (await tasks.advise(held, held.attempt))[1] if held is not None else None
            if held is not None and why is not None:
                await tasks.give_up(held, why)
        return protobuf.message("HeartbeatResponse", success=True)

    # tasks

    async def _pull_messages(self, device: int, _said: Any) -> Any:
        self._running.check_ins.check_device(device)
        self._node_tasks.end(device)  # it asks for a task, so it has none
        self._end_search(device)
        self._node_tasks.keep(self._sessions.present())
        if self._run_cache.is_over or self._run_cache.head.bars(device):
            self._sessions.leave(device)
            return protobuf.message("PullMessagesResponse")
        held = await self._running.check_ins.task_for(device, _WAIT_S, evaluates=True)
        if isinstance(held, str):
            return protobuf.message("PullMessagesResponse")
        return await self._task(device, held)

    async def _task(self, device: int, held: Held) -> Any:
        """A task as a train or an evaluate message."""
        task, head = held.task, self._run_cache.head
        kind = "evaluate" if isinstance(task, Evaluation) else "train"
        if isinstance(task, Evaluation):
            head = self._run_cache.evaluated(task)
        given = await self._given(head)
        config = self._config(task, head.version)
        rate = next((config[key] for key in RATES if key in config), 0.0)
        content = models.content_of(
            given.arrays,
            config,
            ins="evaluateins" if kind == "evaluate" else "fitins",
            unnamed=models.is_in_order(given.model.layout),
        )
        about = {
            "run_id": self._run_id(),
            "src_node_id": _SERVER,
            "dst_node_id": device + _FIRST_NODE,
            "reply_to_message_id": "",
            "group_id": str(head.version),
            "ttl": _TTL_S,
            "message_type": kind,
            "created_at": self._ledger.now(),
            "message_id": "",
        }
        message = protobuf.message("Message", metadata=about)
        whole = packed("Message", message.SerializeToString(), [content])
        message.metadata.message_id = whole.id
        message.content.SetInParent()  # required by Flower, although the objects contain it
        held.tau = head.version
        self._node_tasks.begin(
            device,
            NodeTask(
                task.task,
                whole.id,
                given,
                float(rate) if isinstance(rate, int | float) else 0.0,
                {one.id: one for one in whole.every()},
            ),
        )
        self._running.metrics.offered.inc()
        return protobuf.message(
            "PullMessagesResponse", messages_list=[message], message_object_trees=[_tree(whole)]
        )

    async def _given(self, head: Head) -> GivenVersion:
        """A version's model, read once for all supernodes. Raises Refusal."""
        async with self._reading:
            run = self._run_cache.run
            found = self._node_tasks.given(head.given)
            if found is not None and found.head == head:
                return found
            if found is not None:  # a newer version with the same bits
                given = GivenVersion(head, found.model, found.arrays)
                self._node_tasks.give(given)
                return given
            self._node_tasks.check_room(models.memory_of(run.layout))
            model = Model(run.layout)
            try:
                await read_newest(self._client, self._keys, head, model)
            except (BlobMissing, BlobDamaged) as error:
                await self._run_cache.look()
                raise self._later(f"version {head.version} can't be read now") from error
            arrays = await asyncio.to_thread(models.arrays_of, model)
            given = GivenVersion(head, model, arrays)
            self._node_tasks.give(given)
            return given

    def _config(self, task: Assignment | Evaluation, version: int) -> dict[str, Any]:
        """The configuration for a client; the app's own values take precedence."""
        hints: dict[str, Any] = {"server-round": version + 1}
        lengths: dict[str, Any] = {}
        if not isinstance(task, Evaluation):
            lengths = {"epochs": task.epochs, "steps": task.steps, "seconds": task.seconds}
        hints |= {f"local-{unit}": n for unit, n in lengths.items() if n is not None}
        if rate := [self._app.config[key] for key in RATES if key in self._app.config]:
            hints["lr"] = rate[0]
        either = {key.replace("-", "_"): value for key, value in hints.items()}
        return {**either, **hints, **self._app.config}

    async def _pull_object(self, device: int, said: Any) -> Any:
        node_task = self._node_tasks.get(device)
        found = node_task.objects.get(said.object_id) if node_task is not None else None
        if found is None:
            self._miss(device)
            return protobuf.message("PullObjectResponse", object_found=False)
        self._end_search(device)
        return protobuf.message(
            "PullObjectResponse",
            object_found=True,
            object_available=True,
            object_content=found.content,
        )

    async def _confirm(self, device: int, said: Any) -> Any:
        node_task = self._node_tasks.get(device)
        if node_task is not None and said.message_object_id == node_task.message:
            node_task.objects = {}
        return protobuf.message("Nothing")

    async def _get_run(self, _device: int, _said: Any) -> Any:
        about = {
            "run_id": self._run_id(),
            "series_id": self._run_id(),
            "fab_id": self._app.name,
            "fab_version": self._app.version,
            "fab_hash": self._app.digest,
            "primary_task_type": "flwr-serverapp",
            "status": {"status": "running"},
        }
        return protobuf.message("GetRunResponse", run=about)

    async def _get_fab(self, _device: int, _said: Any) -> Any:
        about = {"hash_str": self._app.digest, "content": self._app.content}
        return protobuf.message("GetFabResponse", fab=about)

    def _run_id(self) -> int:
        """A number for this run, different from that of another run with the same name."""
        text = f"{self._keys.name} {self._run_cache.run.created!r}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    # replies

    async def _push_messages(self, device: int, said: Any) -> Any:
        reply = node_tasks.reply(said)
        message, node_task = said.messages_list[0], self._node_tasks.get(device)
        if node_task is None or message.metadata.reply_to_message_id != node_task.message:
            self._miss(device)
            # This gateway restarted or gave the task up. Only a debug line, as a device can cause
            # any number of these.
            self._running.context.log.debug("reply to an unknown task", device=device)
            return protobuf.message("PushMessagesResponse")
        self._end_search(device)
        if message.HasField("error"):
            await self._refuse(device, node_task, message.error.reason)
            return protobuf.message("PushMessagesResponse")
        if len(reply.wanted) > node_tasks.most_objects(node_task.given.model):
            why = f"<class 'DataError'>: the reply has {len(reply.wanted)} objects"
            await self._refuse(device, node_task, why)
            return protobuf.message("PushMessagesResponse")
        self._node_tasks.expect(node_task, reply)
        return protobuf.message(
            "PushMessagesResponse", objects_to_push=sorted(reply.wanted), session_id=reply.session
        )

    async def _refuse(self, device: int, node_task: NodeTask, why: str) -> None:
        """Give up a task whose reply is an error or unusable."""
        self._node_tasks.end(device)
        log = self._running.context.log
        log.warning("supernode failed", device=device, task=node_task.task, reason=why[:300])
        try:
            held = await self._running.moves.find(node_task.task, device)
        except NotHeld:
            return
        await self._running.tasks.give_up(held, models.error_of(why))

    async def _push_object(self, device: int, said: Any) -> Any:
        node_task = self._node_tasks.get(device)
        reply = node_task.reply if node_task is not None else None
        is_stored = False
        if node_task is None or reply is None or said.session_id != reply.session:
            self._miss(device)
        else:
            self._end_search(device)
            is_stored = reply.take(said.object_id, said.object_content)
            if reply.size > reply.most:
                await self._refuse(device, node_task, "<class 'DataError'>: the reply is too large")
            elif is_stored and reply.is_whole:
                async with reply.turn:
                    if not reply.is_done:
                        await self._deliver(device, node_task, reply)
                        reply.is_done = True
                        reply.received.contents.clear()
        return protobuf.message("PushObjectResponse", stored=is_stored)

    async def _deliver(self, device: int, node_task: NodeTask, reply: Incoming) -> None:
        """Answer the task with a whole reply. Raises BrokerError; the supernode may then retry."""
        running, layout = self._running, node_task.given.model.layout
        try:
            held = await running.moves.find(node_task.task, device)
        except NotHeld:
            running.context.log.info(
                "reply to a task that this replica does not hold",
                device=device,
                task=node_task.task,
            )
            return
        who = f"device {device}"
        try:
            if isinstance(held.task, Evaluation):
                samples, sums = models.metrics_of_reply(reply.received, reply.message, who)
                await running.measurements.answer(held, held.task, samples, sums, reply.seconds)
                return
            found = await asyncio.to_thread(
                models.reply_of, reply.received, reply.message, layout, who
            )
        except DataError as error:
            await self._refuse(device, node_task, f"<class 'DataError'>: {error}")
            return
        if self._run_cache.run.sends == "delta":
            found.model.parameters[:] -= node_task.given.model.parameters
        data = found.model.buffer.data
        await running.uploads.deliver(
            held,
            UpdateReport(
                digest=digest_of(data, algorithm_of(node_task.given.head.given)),
                samples=found.samples,
                steps=0,
                lr=node_task.lr,
                loss=found.loss,
                seconds=reply.seconds,
                tau=node_task.given.head.version,
                base=node_task.given.head.given,
                layout=layout.signature,
            ),
            data,
        )

    def _miss(self, device: int) -> None:
        """Tell a supernode to retry at another replica, by raising Refusal (503).

        Returns if there is no other replica, or if the supernode has searched for long enough.

        Several requests in a row count as one search for the replica.
        """
        if not self._running.moves.others:
            return
        now = time.monotonic()
        first, last = self._missed.get(device, (now, now))
        if now - last > _APART_S:
            first = now
        self._missed[device] = first, now
        if now - first > _ELSEWHERE_S:
            return
        raise self._later("another replica may have what this supernode works on")

    def _end_search(self, device: int) -> None:
        """End a device's search for its replica."""
        self._missed.pop(device, None)

    @property
    def _running(self) -> Opened:
        return self._gateway.running

    def _later(self, why: str) -> Refusal:
        return Refusal(503, "unavailable", f"{why}: try again later", retry_after_s=RETRY_S)


def _response(reply: Any) -> web.Response:
    return web.Response(body=reply.SerializeToString(), content_type=protobuf.CONTENT_TYPE)


def _tree(whole: Any) -> Any:
    """An object's tree of ids, as Flower's message."""
    return protobuf.message(
        "ObjectTree", object_id=whole.id, children=[_tree(part) for part in whole.parts]
    )
