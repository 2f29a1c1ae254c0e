"""A device's work: check in, train the offered task or evaluate a model, and answer.

One task at a time. During a task, heartbeats ask the gateway whether to continue. A cancelled
device gives its task up.
"""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fedstream.core import reasons
from fedstream.core.errors import BlobDamaged, FedstreamError, LayoutMismatch
from fedstream.core.formats import ENCODINGS, format_of
from fedstream.core.messages import are_usable
from fedstream.device.connection import TurnedAway
from fedstream.device.folder import DeviceFolder, FinishedUpdate
from fedstream.device.models import ModelStore, Superseded
from fedstream.device.training import Halt, LocalTraining
from fedstream.device.uploads import UpdateUpload
from fedstream.protocol.messages import (
    CheckIn,
    EvaluationOffer,
    MetricsReport,
    Offer,
    Surrender,
    UpdateReport,
)
from fedstream.protocol.signatures import new_nonce
from fedstream.runtime.backoff import Backoff
from fedstream.runtime.plugins import place_of, users_traceback
from fedstream.trainer import local_values
from fedstream.trainer.devices import DeviceSettings, behaviour
from fedstream.trainer.solvers import Cancelled
from fedstream.trainer.task import NoLabels
from fedstream.trainer.workspace import Start

if TYPE_CHECKING:
    from fedstream.core.layout import Floats, Layout
    from fedstream.device.gateway import OwnGateway
    from fedstream.device.privacy import PrivateTasks
    from fedstream.protocol.messages import Receipt
    from fedstream.trainer.learner import Learned

FORMATS = tuple(name + ending for ending in ("", "+zstd") for name in ENCODINGS)
_CHECK_IN_S = 50.0  # longest that a check-in waits for a task
_QUIET_S = 60.0  # without a task, before the device logs that it waits
_GOODBYE_S = 5.0  # for giving a task up when told to stop
_LOOK_S = 0.25  # between checks whether to continue a simulated delay
_REST_S = 10.0  # longest rest after a task that raised
_MOST_RAISED = 5  # tasks in a row, before the device ends
_MOST_TURNED_AWAY = 5  # updates in a row, before the device ends
_OF_THE_UPDATE = {400, 411, 413, 415, 422}  # refusals that don't concern the device itself
_RAISED = re.compile(r"raised [A-Za-z0-9_.]{1,80}")  # errors' form in the protocol


class DeviceWorker:
    """Performs one device's tasks."""

    def __init__(
        self,
        gateway: OwnGateway,
        folder: DeviceFolder,
        training: LocalTraining,
        layout: Layout,
        private: PrivateTasks | None = None,
        *,
        run_devices: int | None,
        devices: DeviceSettings,
        say: Callable[[str], None],
        show: Callable[[str], None],
        once: bool = False,
    ) -> None:
        """``layout``: of the task's model. ``private``: the device's policy; None: it has none.
        ``run_devices``: number of devices that its data is split over; None: unknown. ``devices``:
        simulated latency and drop-outs.

        ``say``: called with a line about an event, ``show``: with a short status. ``once``: stop
        after one answered task.
        """
        self._gateway = gateway
        self._folder = folder
        self._training = training
        self._layout = layout
        self._private = private
        self._run_devices = run_devices
        self._devices = devices
        self._say = say
        self._show = show
        self._once = once
        self._models = ModelStore(gateway, folder.models, say, show)
        self._unshared = ModelStore(gateway, folder.unshared, say, show)
        self._rests = Backoff(0.5, _REST_S, rng=random.Random())
        self._seen: set[str] = set()  # places of reported errors
        self._raised_in_a_row = 0  # tasks
        self._turned_away_in_a_row = 0  # updates

    async def work(self) -> None:
        """Work until the run is over (RunOver), or with ``once`` until one task is answered.

        Raises FedstreamError for a permanent error.
        """
        if (left := await asyncio.to_thread(self._folder.update)) is not None:
            await self._deliver_left(left)
        while True:
            try:
                offer = await self._offered()
            except asyncio.CancelledError:
                await self._say_goodbye()
                raise
            if await self._perform(offer) and self._once:
                await self._say_goodbye()
                return

    async def _say_goodbye(self) -> None:
        """Tell the gateway to send no more tasks, without retries."""
        with suppress(FedstreamError, TimeoutError):  # the gateway will notice
            async with asyncio.timeout(_GOODBYE_S):
                asks = CheckIn(nonce=new_nonce(), eligible=False, wait_s=0.0, formats=FORMATS)
                await self._gateway.check_in(asks)

    async def _deliver_left(self, left: FinishedUpdate) -> None:
        """Deliver an earlier process's update."""
        try:
            await self._deliver(left, begun=True)
        except asyncio.CancelledError:
            self._say(f"task {left.task}: its update is kept, and sent at the next start")
            raise

    async def _offered(self) -> Offer | EvaluationOffer:
        """Check in until there is a task; log a long wait once."""
        began, has_said, private = time.monotonic(), False, self._private
        formats = FORMATS if private is None else (*FORMATS, private.format)
        while True:
            self._show("waiting for a task")
            asks = CheckIn(
                nonce=new_nonce(),
                wait_s=_CHECK_IN_S,
                formats=formats,
                has=self._models.has,
                layout=self._layout.signature,
                devices=self._run_devices,
                evaluates=private is None,  # metrics tell of this device's data
            )
            found = await self._gateway.check_in(asks)
            if isinstance(found, float):
                waited_s = time.monotonic() - began
                if waited_s >= _QUIET_S and not has_said:
                    has_said = True
                    self._say(
                        f"no task for {waited_s:.0f} s; still waiting. If it stays so, ask the "
                        "run's operator whether a coordinator serves the gateway (fedstream doctor)"
                    )
                await self._gateway.connection.pause(found)
            elif found.task.device != self._gateway.device:
                raise FedstreamError(
                    f"the gateway offers a task of device {found.task.device} to device "
                    f"{self._gateway.device}: it must not learn from another device's data"
                )
            elif isinstance(found, EvaluationOffer):
                return found
            elif private is not None:
                return private.accepted(found)
            elif found.private is not None:
                raise FedstreamError(
                    "the run is private: start this device with --policy and --policy-owner"
                )
            else:
                return found

    async def _perform(self, offer: Offer | EvaluationOffer) -> bool:
        """Perform one task; return whether it was answered by an update."""
        halt = Halt(offer.task.left_s)
        try:
            async with self._beating(offer, halt):
                if isinstance(offer, EvaluationOffer):
                    await self._evaluate(offer, halt)
                    return False
                update = await self._trained(offer, halt)
                if update is None:
                    return False
                await asyncio.to_thread(self._folder.keep_update, update)
                self._training.again()
                await self._deliver(update)
                return True
        except asyncio.CancelledError:
            halt.call("told to stop")
            await self._leave(offer)
            raise

    @asynccontextmanager
    async def _beating(self, offer: Offer | EvaluationOffer, halt: Halt) -> AsyncIterator[None]:
        """Send heartbeats inside the block; call ``halt`` if the gateway advises to stop."""
        beats = asyncio.create_task(self._beat(offer, halt), name="heartbeats")
        try:
            yield
        finally:
            beats.cancel()
            await asyncio.wait({beats})
            if not beats.cancelled():
                beats.result()  # re-raises an error

    async def _beat(self, offer: Offer | EvaluationOffer, halt: Halt) -> None:
        while True:
            await asyncio.sleep(offer.heartbeat_s)
            try:
                advice = await self._gateway.beat(offer.task.id, offer.attempt)
            except TurnedAway as refusal:
                halt.call(str(refusal))
                return
            if not advice.go_on:
                halt.call(advice.why or "given up")
                return

    # evaluation

    async def _evaluate(self, offer: EvaluationOffer, halt: Halt) -> None:
        """Measure a version on the device's test data, and send the metrics."""
        version = offer.model.version
        await self._check_layout(offer, offer.measurement.layout)
        try:
            found = await self._metrics(offer)
        except TurnedAway:
            raise
        except Exception as error:
            await self._raised(offer, error)
            return
        if isinstance(found, str):
            await self._give_up(offer, found)
            return
        if halt or not await self._gateway.measure(offer.measurement.url, found):
            self._say(f"version {version}: measured too late, as the evaluation is over")
            return
        means = (f"{name} {total / weight:.4g}" for name, (total, weight) in found.sums.items())
        self._say(
            f"version {version}: {', '.join(means)} on {found.samples} samples, "
            f"{found.seconds:.1f} s"
        )

    async def _metrics(self, offer: EvaluationOffer) -> MetricsReport | str:
        """The metrics on the device's test data, or the reason why there are none."""
        began = time.monotonic()
        if self._private is not None:
            return reasons.NO_TEST_DATA
        try:
            layout = await self._whole(offer)
            model = await self._models.model(offer.model, layout)
            local = local_values.of_bytes(self._folder.local(), layout)
            self._show(f"evaluating version {offer.model.version}")
            found = await self._training.measured(model, local, offer.task.device)
        except Superseded:  # the version is kept until the evaluation ends
            return reasons.DEADLINE_PASSED
        except NoLabels:
            return reasons.NO_TEST_DATA
        if found is None:
            return reasons.NO_TEST_DATA
        samples, sums = found
        if not are_usable(sums):
            return reasons.METRICS_NOT_FINITE
        return MetricsReport(samples=samples, sums=sums, seconds=time.monotonic() - began)

    # training

    async def _trained(self, offer: Offer, halt: Halt) -> FinishedUpdate | None:
        """Train; None if the task was given up."""
        try:
            return await self._update(offer, halt)
        except Cancelled:
            self._training.again()
            if halt.is_late:
                await self._give_up(offer, reasons.DEADLINE_PASSED)
            else:
                self._say(f"task {offer.task.id}: stopped, because the gateway said: {halt.why}")
        except Superseded:
            self._say(f"task {offer.task.id}: its model was superseded; asking again")
            await self._gateway.connection.pause(None)
        return None

    async def _update(self, offer: Offer, halt: Halt) -> FinishedUpdate | None:
        task, began = offer.task, time.monotonic()
        await self._check_layout(offer, offer.update.layout)
        simulated = behaviour(self._devices, task.device, task.seed)
        if simulated.drops_out:
            await self._device_time(simulated.latency_s * 0.5, halt)
            await self._give_up(offer, reasons.DROPPED_OUT)
            return None
        unsent = None
        if format_of(offer.update.format).of_changes:
            unsent = self._folder.unsent(self._layout.parameters)
        try:
            start, learned, lr = await self._learned(offer, unsent, halt)
        except (Cancelled, TurnedAway, Superseded):
            raise
        except Exception as error:
            await self._raised(offer, error)
            return None
        await self._device_time(simulated.latency_s - (time.monotonic() - began), halt)
        trained, self._raised_in_a_row = learned.trained, 0
        loss, sealed = trained.loss, learned.sealed
        report = UpdateReport(
            digest=learned.digest,
            samples=trained.samples,
            steps=trained.steps,
            lr=lr,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            # Otherwise the time tells of the data's size.
            seconds=time.monotonic() - began if sealed is None else 0.0,
            tau=start.version,
            base=start.digest,
            layout=self._layout.signature,
            format=learned.format.name,
            sealed=None if sealed is None else base64.b64encode(sealed).decode(),
        )
        return FinishedUpdate(
            task.id,
            offer.attempt,
            offer.update.url,
            report,
            learned.update.buffer,
            learned.unsent,
            None if learned.local is None else learned.local.buffer,
        )

    async def _learned(
        self, offer: Offer, unsent: Floats | None, halt: Halt
    ) -> tuple[Start, Learned, float]:
        """Train from an earlier process's workspace, or else from the offered model."""
        layout = await self._whole(offer)
        local = local_values.of_bytes(self._folder.local(), layout)
        while True:
            start = self._training.interrupted(offer.task.id, layout)
            start = replace(start or await self._start(offer, layout), local=local)
            self._show(f"training task {offer.task.id} from version {start.version}")
            learned, lr = await self._training.learned(offer, start, unsent, halt)
            if learned is not None:
                return start, learned, lr

    async def _start(self, offer: Offer, layout: Layout) -> Start:
        model = await self._models.model(offer.model, layout)
        return Start(offer.model.version, offer.model.digest, model)

    async def _whole(self, offer: Offer | EvaluationOffer) -> Layout:
        """The layout with the run's unshared values, downloaded for the first task."""
        unshared, offered = self._layout.unshared, offer.unshared
        if unshared is not None and offered is not None and unshared.digest != offered.digest:
            values = await self._unshared.model(offered, unshared.layout)
            unshared = replace(unshared, digest=offered.digest, values=values.itself)
            self._layout = replace(self._layout, unshared=unshared)
        return self._layout

    async def _check_layout(self, offer: Offer | EvaluationOffer, layout: str) -> None:
        """Raise LayoutMismatch, with the task given up, if the run's ``layout`` is another."""
        if layout == self._layout.signature:
            return
        await self._give_up(offer, "raised LayoutMismatch")
        raise LayoutMismatch(
            f"the model of this device's task has {self._layout.summary}, and the run's model is "
            "another: name the task (--task) that the run was made with"
        )

    async def _device_time(self, seconds: float, halt: Halt) -> None:
        """Wait for the simulated duration. Raises Cancelled."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            if halt:
                raise Cancelled

    async def _raised(self, offer: Offer | EvaluationOffer, error: Exception) -> None:
        """Give up a task that raised, with the user's traceback the first time.

        Raises the error again if all tasks will raise it. Errors of an evaluation never end the
        device, as it can still train.
        """
        trains = isinstance(offer, Offer)
        said = reasons.raised(error)
        await self._give_up(offer, said if _RAISED.fullmatch(said) else "raised Exception")
        if trains and isinstance(error, FedstreamError) and not isinstance(error, BlobDamaged):
            raise error  # it would recur
        where = place_of(error)
        if where not in self._seen and (trace := users_traceback(error)):
            self._say(trace)
        self._seen.add(where)
        self._raised_in_a_row += trains
        if trains and self._raised_in_a_row >= (1 if self._once else _MOST_RAISED):
            times = "" if self._once else f" {_MOST_RAISED} times in a row, the last time"
            raise FedstreamError(f"the task raised{times} {where}: {error}") from error
        self._say(f"task {offer.task.id}: raised {where}: {error}")
        await asyncio.sleep(self._rests.next())

    # answers

    async def _deliver(self, update: FinishedUpdate, *, begun: bool = False) -> None:
        """Upload an update, and log its outcome."""
        try:
            upload = UpdateUpload(self._gateway, update, self._show)
            receipt = await upload.receipt(begun=begun)
        except TurnedAway as refusal:
            self._forget(update)
            await self._turned_away(update, refusal)
            return
        self._turned_away_in_a_row = 0
        self._say(f"task {update.task}: {_outcome(update, receipt)}")
        if receipt is None:
            self._forget(update)
            await asyncio.sleep(self._rests.next())  # the gateway may offer the task again
        else:
            counts = receipt.state == "admitted"
            await asyncio.to_thread(self._folder.delivered, update, known=True, counts=counts)
            self._rests.reset()

    def _forget(self, update: FinishedUpdate) -> None:
        """Delete an update with an unknown outcome."""
        self._folder.delivered(update, known=False, counts=False)
        if update.unsent is not None:
            self._say(
                f"task {update.task}: it isn't known whether its update counts, so what "
                f"{update.report.format} left unsent is lost: the next update starts from zero"
            )

    async def _turned_away(self, update: FinishedUpdate, refusal: TurnedAway) -> None:
        """Give up an update that the gateway refuses; raise if the refusal concerns the device.

        The gateway refuses an update, for example, if the run's format has changed since the offer.
        """
        self._turned_away_in_a_row += 1
        is_last = self._once or self._turned_away_in_a_row >= _MOST_TURNED_AWAY
        if refusal.status not in _OF_THE_UPDATE or is_last:
            raise refusal
        self._say(f"task {update.task}: {refusal}; checking in again")
        await asyncio.sleep(self._rests.next())

    async def _give_up(self, offer: Offer | EvaluationOffer, reason: str) -> None:
        try:
            await self._gateway.give_up(
                offer.task.id, Surrender(attempt=offer.attempt, reason=reason)
            )
        except TurnedAway as refusal:
            if refusal.status != 404:  # 404: the task is over already
                raise
        self._say(f"task {offer.task.id}: given up: {reason}")

    async def _leave(self, offer: Offer | EvaluationOffer) -> None:
        """Give up a task because the device is told to stop."""
        if isinstance(offer, Offer):
            self._training.again()
            if (left := self._folder.update()) is not None:
                self._forget(left)  # perhaps already admitted
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._give_up(offer, reasons.DROPPED_OUT)
        except (FedstreamError, TimeoutError) as error:
            why = str(error) or "no answer"
            self._say(
                f"task {offer.task.id}: could not tell the gateway that it is given up ({why}); "
                "the gateway will notice"
            )
        else:
            await self._say_goodbye()


def _outcome(update: FinishedUpdate, receipt: Receipt | None) -> str:
    """The outcome of an update, in one line."""
    if receipt is None:
        return "the gateway does not know it any more"
    report = update.report
    why = f" ({receipt.reason})" if receipt.reason else ""
    loss = "" if report.loss is None else f", loss {report.loss:.4g}"
    trained = f"{receipt.state}{why}: trained from version {report.tau}"
    if report.sealed is not None:
        return f"{trained}, masked and sealed, {update.data.nbytes} bytes"
    return (
        f"{trained}, {report.steps} steps{loss}, {update.data.nbytes} bytes, {report.seconds:.1f} s"
    )
