"""A device's life: it enrols, trains, survives crashes and refusals, and leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedstream.core.errors import DataError, FedstreamError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.device.connection import GatewayAddress, TurnedAway
from fedstream.device.folder import DeviceFolder
from fedstream.device.process import DeviceOptions, run_device
from fedstream.device.uploads import UpdateUpload
from fedstream.protocol.messages import Advice, Receipt
from fedstream.trainer.devices import DeviceSettings, FixedLatency
from fedstream.trainer.learner import Learner
from fedstream.trainer.solvers import Work
from fedstream.trainer.task import initial
from fedstream.trainer.workspace import Start
from tests.device.conftest import Options
from tests.device.fake import FakeGateway
from tests.support import wait_until
from tests.trainer.adding import Adds
from tests.trainer.stepping import SGD, Adapted, Steps


def nothing(_what: str) -> None:
    """Shows nobody what is going on."""


def trained(task: Steps, x_tau: Model, *, name: str = "task-1", steps: int = 3) -> Model:
    """What a trainer's learner makes of it."""
    into = Model(x_tau.layout)
    work = Work(7, name, 0, 5, steps, None, SGD, lambda: False)
    Learner(lambda: task, 1, "cpu").train(Start(0, x_tau.digest(), x_tau), work, into, "model")
    return into


async def test_device_enrols_trains_and_uploads(
    gateway: FakeGateway, options: Options, model: Model, task: Steps, said: list[str]
) -> None:
    offer = gateway.offer(model)
    await run_device(options(), said.append, nothing)
    sent = gateway.sent[offer.attempt]
    assert bytes(sent.data) == trained(task, model).buffer.tobytes()
    report = sent.report
    assert (report.tau, report.base, report.steps, report.samples) == (0, model.digest(), 3, 40)
    assert report.digest == trained(task, model).digest()
    assert (report.lr, report.format) == (SGD.lr, "f32")
    assert said[0] == "enrolled as device 7 of run demo"
    assert said[1].startswith("task task-1: admitted: trained from version 0, 3 steps, loss 0.")


async def test_update_has_a_digest_like_the_models(
    gateway: FakeGateway, options: Options, model: Model, task: Steps
) -> None:
    gateway.digests = "blake3"
    offer = gateway.offer(model)
    await run_device(options(), nothing, nothing)
    report = gateway.sent[offer.attempt].report
    assert report.base == model.digest("blake3")
    assert report.digest == trained(task, model).digest("blake3")


async def test_second_start_needs_no_invite_and_no_second_download(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    gateway.offer(model)
    await run_device(options(), said.append, nothing)
    gateway.offer(model, task="task-2")
    await run_device(options(invite=None), said.append, nothing)
    assert len(gateway.sent) == 2
    assert gateway.asked.count("POST /v1/devices") == 1
    assert sum(one.startswith("GET /v1/models/") for one in gateway.asked) == 1
    asked = [(one.eligible, one.has) for one in gateway.check_ins]
    # Each time it says that it wants no more tasks when it ends.
    assert asked == [(True, None), (False, None), (True, model.digest()), (False, None)]


async def test_frozen_parameters_are_downloaded_once(
    gateway: FakeGateway, options: Options, tmp_path: Path
) -> None:
    """By all processes of a device, which draw another base each, and train from the run's."""
    task = Adapted()
    model = initial(task, 1)
    gateway.layout, unshared = model.layout, model.layout.unshared
    assert unshared is not None
    for number, invite in enumerate((gateway.invite(7), None)):
        offer = gateway.offer(model, task=f"task-{number}")
        await run_device(options(load=lambda: task, invite=invite), nothing, nothing)
        sent = bytes(gateway.sent[offer.attempt].data)
        assert len(sent) == model.layout.nbytes
        assert sent == trained(task, model, name=f"task-{number}").buffer.tobytes()
    assert gateway.asked.count(f"GET /v1/models/{unshared.digest}") == 1
    [file] = (tmp_path / "state" / "unshared").iterdir()
    assert file.read_bytes() == unshared.model().buffer.tobytes()


async def test_local_values_stay_on_the_device(
    gateway: FakeGateway, options: Options, tmp_path: Path
) -> None:
    """An admitted update changes them, a refused one does not; no update contains them."""
    task = Steps()
    task.local = ("1.*",)
    model = initial(task, 1)
    gateway.layout, start = model.layout, Start(0, model.digest(), model)
    device = Learner(lambda: task, 1, "cpu")
    states = [Receipt(state="admitted"), Receipt(state="refused", reason="too stale"), None, None]
    for number, state in enumerate(states):
        name, invite = f"task-{number}", gateway.invite(7) if number == 0 else None
        offer = gateway.offer(model, task=name)
        if state is not None:
            gateway.receipts[name] = [state]
        await run_device(options(load=lambda: task, invite=invite), nothing, nothing)
        work, into = Work(7, name, 0, 5, 3, None, SGD, lambda: False), Model(model.layout)
        found = device.train(start, work, into, "model")
        assert bytes(gateway.sent[offer.attempt].data) == into.buffer.tobytes()
        if state is None or state.state == "admitted":
            assert found.local is not None
            start = replace(start, local=found.local)
    folder = DeviceFolder(tmp_path / "state")
    assert start.local is not None
    assert folder.local() == start.local.buffer.tobytes()


async def test_gateway_that_forgot_the_device_takes_a_new_invite(
    gateway: FakeGateway, options: Options, model: Model, said: list[str], tmp_path: Path
) -> None:
    gateway.offer(model)
    await run_device(options(), nothing, nothing)
    gateway.keys.clear()  # such as with a new Redis
    with pytest.raises(TurnedAway, match="unknown device"):
        await run_device(options(invite=None), nothing, nothing)
    gateway.offer(model, task="task-2")
    await run_device(options(), said.append, nothing)
    assert said[0] == "enrolled as device 7 of run demo"


async def test_gateway_at_another_address_knows_the_key_but_what_was_unsent_is_forgotten(
    gateway: FakeGateway, options: Options, model: Model, said: list[str], tmp_path: Path
) -> None:
    gateway.offer(model, format="int4", sends="delta")
    await run_device(options(), nothing, nothing)
    folder, count = DeviceFolder(tmp_path / "state"), model.layout.parameters
    assert folder.unsent(count) is not None
    elsewhere = GatewayAddress(options().address.url.replace("127.0.0.1", "localhost"))
    gateway.over = True
    await run_device(options(address=elsewhere, invite=None), said.append, nothing)
    assert said == ["device 7 of run demo", "the run is over"]
    assert folder.unsent(count) is None, "it may be another run's gateway"
    known = folder.identity()
    assert known is not None
    assert known.url.startswith("http://localhost:")


async def test_refused_invite_ends_it(gateway: FakeGateway, options: Options) -> None:
    with pytest.raises(TurnedAway, match=r"refused the invite: it is invite \(invite\)"):
        await run_device(options(invite="A" * 22), nothing, nothing)


async def test_task_of_another_device_is_not_done(
    gateway: FakeGateway, options: Options, model: Model
) -> None:
    gateway.offer(model, device=8)
    with pytest.raises(FedstreamError, match="offers a task of device 8 to device 7"):
        await run_device(options(), nothing, nothing)
    assert not any("/v1/models/" in one for one in gateway.asked)


async def test_update_of_a_format_that_changed_is_dropped_and_the_task_done_anew(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    offer = gateway.offer(model)
    gateway.fails("POST", "/v1/tasks/task-1/updates/", status=422, reason="format")
    life = asyncio.create_task(run_device(options(once=False), said.append, nothing))
    await wait_until(lambda: gateway.sent or life.done())
    gateway.over = True
    await life
    assert gateway.sent[offer.attempt].complete, "it was trained and sent again"
    assert "refused the update: it is format (format); checking in again" in said[1]


async def test_device_whose_updates_are_always_turned_away_ends(
    gateway: FakeGateway, options: Options, model: Model, said: list[str], tmp_path: Path
) -> None:
    gateway.offer(model)
    for _ in range(6):
        gateway.fails("POST", "/v1/tasks/task-1/updates/", status=422, reason="format")
    with pytest.raises(TurnedAway, match="format"):
        await run_device(options(once=False), said.append, nothing)
    assert len(gateway.faults) == 1, "after five"
    assert DeviceFolder(tmp_path / "state").update() is None


async def test_stopped_without_a_gateway_it_still_ends(
    gateway: FakeGateway,
    options: Options,
    model: Model,
    task: Steps,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedstream.device.worker._GOODBYE_S", 0.05)
    gateway.offer(model, steps=100)
    task.begins(hold=2)
    life = asyncio.create_task(run_device(options(), said.append, nothing))
    await wait_until(task.held)
    for _ in range(1000):
        gateway.fails("POST", "/v1/tasks/task-1/give-up", status=503)
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    task.gate.set()
    assert "could not tell the gateway that it is given up" in said[-1]


async def test_heartbeat_that_says_stop_ends_training(
    gateway: FakeGateway, options: Options, model: Model, task: Steps, said: list[str]
) -> None:
    gateway.offer(model, heartbeat_s=0.005, steps=1_000_000)
    life = asyncio.create_task(run_device(options(), said.append, nothing))
    await wait_until(lambda: gateway.beats > 3 and task.steps > 3)
    gateway.offers.clear()
    gateway.advice = Advice(go_on=False, why="too stale")
    await wait_until(lambda: any("stopped" in one for one in said))
    assert said[-1] == "task task-1: stopped, because the gateway said: too stale"
    gateway.advice = Advice(go_on=True)
    second = gateway.offer(model, task="task-2")
    await life
    assert [*gateway.sent] == [second.attempt], "nothing was sent for the first"
    assert gateway.given_up == []


async def test_passed_deadline_gives_the_task_up(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    offer = gateway.offer(model, steps=1_000_000)
    late = offer.task.model_copy(update={"left_s": 0.0})
    gateway.offers[0] = offer.model_copy(update={"task": late})
    life = asyncio.create_task(run_device(options(), said.append, nothing))
    await wait_until(lambda: gateway.given_up)
    assert gateway.given_up == [("task-1", "deadline passed")]
    gateway.offer(model, task="task-2")
    await life


async def test_task_that_raises_is_given_up_and_the_next_is_done(
    gateway: FakeGateway, options: Options, said: list[str]
) -> None:
    class Shy(Adds):
        def train(self, model: object, data: object, work: Work) -> object:  # type: ignore[override]
            if work.task != "task-3":
                raise ValueError("not today")
            return super().train(model, data, work)  # type: ignore[arg-type]

    task = Shy()
    own = FakeGateway(Learner(lambda: task, 1, "cpu").layout)
    x = Model(own.layout)
    x.floats[:] = 0
    gateway.layout = own.layout
    for name in ("task-1", "task-2", "task-3"):
        gateway.offer(x, task=name)
    life = asyncio.create_task(
        run_device(options(load=lambda: task, once=False), said.append, nothing)
    )
    await wait_until(lambda: gateway.sent)
    gateway.over = True
    await life
    assert gateway.given_up == [("task-1", "raised ValueError"), ("task-2", "raised ValueError")]
    text = "\n".join(said)
    assert text.count("Traceback") == 1, "told at length once"
    assert "/fedstream/device/" not in text, "no frame of ours"
    assert text.count("task-2: raised ValueError at") == 1


async def test_device_whose_task_always_raises_ends(gateway: FakeGateway, options: Options) -> None:
    task = Adds()
    gateway.layout = Learner(lambda: task, 1, "cpu").layout
    x = Model(gateway.layout)
    x.floats[:] = 0
    gateway.invites = {"B" * 22: 9}
    for n in range(6):
        gateway.offer(x, device=9, task=f"task-{n}")
    with pytest.raises(FedstreamError, match="raised 5 times in a row, the last time ValueError"):
        await run_device(options(load=lambda: task, invite="B" * 22, once=False), nothing, nothing)
    assert gateway.given_up == [(f"task-{n}", "raised ValueError") for n in range(5)]


async def test_once_an_error_of_the_task_is_the_commands(
    gateway: FakeGateway, options: Options
) -> None:
    task = Adds()
    gateway.layout = Learner(lambda: task, 1, "cpu").layout
    x = Model(gateway.layout)
    x.floats[:] = 0
    gateway.offer(x, device=9)
    gateway.invites = {"B" * 22: 9}
    with pytest.raises(FedstreamError, match=r"the task raised ValueError at .*device 9 is broken"):
        await run_device(options(load=lambda: task, invite="B" * 22), nothing, nothing)


async def test_device_without_data_says_so_and_ends(
    gateway: FakeGateway, options: Options, model: Model
) -> None:
    class Empty(Steps):
        def device_data(self, device: int) -> object:  # type: ignore[override]
            return []

    gateway.offer(model)
    with pytest.raises(DataError, match="device 7 has no data"):
        await run_device(options(load=Empty), nothing, nothing)
    assert gateway.given_up == [("task-1", "raised DataError")]


async def test_another_model_than_the_runs_ends_it(
    gateway: FakeGateway, options: Options, model: Model
) -> None:
    gateway.offer(model, layout="0" * 64)
    with pytest.raises(LayoutMismatch, match=r"the run's model is another: name the task \(--task"):
        await run_device(options(), nothing, nothing)
    assert gateway.given_up == [("task-1", "raised LayoutMismatch")]


async def test_device_that_drops_out_on_purpose_gives_up(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    gateway.offer(model)
    drops = DeviceSettings(dropout=1.0, latency=FixedLatency(mean_s=0.01))
    life = asyncio.create_task(run_device(options(devices=drops), said.append, nothing))
    await wait_until(lambda: gateway.given_up)
    assert gateway.given_up == [("task-1", "dropped out")]
    gateway.over = True
    await life


async def test_folder_serves_one_process(
    gateway: FakeGateway, options: Options, tmp_path: Path
) -> None:
    with (
        DeviceFolder(tmp_path / "state").occupied(),
        pytest.raises(FedstreamError, match="another process is this device"),
    ):
        await run_device(options(), nothing, nothing)
    assert gateway.asked == []


# What survives the process


class Killed(BaseException):
    """As if the process had been killed there."""


async def killed_in(owner: type, name: str, options: DeviceOptions, *, done: bool = False) -> None:
    """A life that ends in a method; ``done``: once it has done what it does."""
    method = getattr(owner, name)

    def kill(*arguments: object, **named: object) -> None:
        if done:
            method(*arguments, **named)
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, kill)
        with pytest.raises(Killed):
            await run_device(options, nothing, nothing)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock of training is a second later than the last."""
    clock = SimpleNamespace(monotonic=count().__next__, time=time.time)
    monkeypatch.setattr("fedstream.device.training.time", clock)


async def test_killed_in_training_it_goes_on_where_it_was_saved(
    gateway: FakeGateway,
    options: Options,
    model: Model,
    task: Steps,
    seconds: None,
) -> None:
    whole = trained(task, model, steps=20)
    offer = gateway.offer(model, steps=20)
    task.begins()
    await killed_in(DeviceFolder, "keep_work", options(save_s=6.0), done=True)
    before = task.steps
    assert 0 < before < 20
    await run_device(options(save_s=6.0), nothing, nothing)
    assert task.steps == 20, "no step was taken twice"
    assert bytes(gateway.sent[offer.attempt].data) == whole.buffer.tobytes()
    report = gateway.sent[offer.attempt].report
    assert (report.steps, report.tau) == (20, 0)


async def test_work_of_another_task_is_not_resumed(
    gateway: FakeGateway,
    options: Options,
    model: Model,
    task: Steps,
    seconds: None,
) -> None:
    gateway.offer(model, steps=20)
    await killed_in(DeviceFolder, "keep_update", options(save_s=6.0))
    gateway.offers.clear()
    offer = gateway.offer(model, task="task-2", steps=4)
    task.begins()
    await run_device(options(), nothing, nothing)
    assert task.steps == 4
    whole = trained(task, model, name="task-2", steps=4)
    assert bytes(gateway.sent[offer.attempt].data) == whole.buffer.tobytes()


async def test_stopped_before_a_left_update_is_delivered_it_keeps_it(
    gateway: FakeGateway, options: Options, model: Model, said: list[str], tmp_path: Path
) -> None:
    gateway.offer(model)
    await killed_in(UpdateUpload, "receipt", options())
    gateway.fails("HEAD", "/v1/tasks/", status=503, headers={"Retry-After": "3000"})
    life = asyncio.create_task(run_device(options(), said.append, nothing))
    await wait_until(lambda: not gateway.faults)
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert said[-1] == "task task-1: its update is kept, and sent at the next start"
    assert DeviceFolder(tmp_path / "state").update() is not None


async def test_update_that_nobody_knows_any_more_is_dropped(
    gateway: FakeGateway,
    options: Options,
    model: Model,
    said: list[str],
    tmp_path: Path,
) -> None:
    gateway.offer(model)
    await killed_in(UpdateUpload, "receipt", options())
    gateway.offers.clear()
    gateway.over = True
    await run_device(options(once=False), said.append, nothing)
    assert said[1:] == ["task task-1: the gateway does not know it any more", "the run is over"]
    assert DeviceFolder(tmp_path / "state").update() is None


# What a format leaves unsent


async def _updates(gateway: FakeGateway, options: Options, model: Model, count: int) -> list[bytes]:
    """Of so many tasks in int4, one after the other."""
    offers = [
        gateway.offer(model, task=f"task-{n}", format="int4", sends="delta") for n in range(count)
    ]
    for _ in offers:
        await run_device(options(), nothing, nothing)
    return [bytes(gateway.sent[one.attempt].data) for one in offers]


async def test_what_is_left_unsent_goes_into_the_next_update(
    gateway: FakeGateway, options: Options, model: Model, task: Steps
) -> None:
    from fedstream.core.formats import format_of

    found = await _updates(gateway, options, model, 2)
    learner, into, memory = Learner(lambda: task, 1, "cpu"), Model(model.layout), None
    for n, sent in enumerate(found):
        work = Work(7, f"task-{n}", 0, 5, 3, None, SGD, lambda: False)
        learned = learner.train(
            Start(0, model.digest(), model), work, into, "delta", format_of("int4"), memory
        )
        assert sent == learned.update.buffer.tobytes()
        memory = learned.unsent
    assert found[0] != found[1]


async def test_refused_update_leaves_what_was_unsent_before(
    gateway: FakeGateway, options: Options, model: Model, tmp_path: Path
) -> None:
    folder, count = DeviceFolder(tmp_path / "state"), model.layout.parameters
    await _updates(gateway, options, model, 1)
    before = folder.unsent(count)
    assert before is not None
    assert before.any()
    gateway.receipts["task-r"] = [Receipt(state="refused", reason="too stale")]
    gateway.offer(model, task="task-r", format="int4", sends="delta")
    await run_device(options(), nothing, nothing)
    after = folder.unsent(count)
    assert after is not None
    np.testing.assert_array_equal(before, after)


async def test_in_doubt_nothing_is_fed_back_and_the_device_says_so(
    gateway: FakeGateway, options: Options, model: Model, tmp_path: Path, said: list[str]
) -> None:
    await _updates(gateway, options, model, 1)
    gateway.offer(model, task="task-d", format="int4", sends="delta")
    gateway.fails("POST", "/v1/tasks/task-d/updates", status=404, reason="unknown task")
    await run_device(options(), said.append, nothing)
    assert DeviceFolder(tmp_path / "state").unsent(model.layout.parameters) is None
    assert any("what int4 left unsent is lost" in line for line in said)
