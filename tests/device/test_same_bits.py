"""A device and a trainer with the same task, seed and model send the same bits."""

from __future__ import annotations

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.formats import format_of
from fedstream.core.messages import Sends
from fedstream.device.process import run_device
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.service import Trainer
from fedstream.trainer.settings import TrainerSettings
from tests.device.conftest import Options
from tests.device.fake import FakeGateway
from tests.support import Hand, context, running
from tests.trainer.stepping import SGD, H, Steps, answers, begun


@pytest.mark.parametrize(
    ("name", "sends"),
    [
        ("f32", "model"),
        ("bf16+zstd", "delta"),
        ("int4", "delta"),
    ],
)
async def test_device_sends_what_a_trainer_sends(
    hand: Hand,
    redis: RedisSettings,
    gateway: FakeGateway,
    options: Options,
    task: Steps,
    name: str,
    sends: Sends,
) -> None:
    await begun(hand, task, sends=sends)
    x_tau = await hand.model((await hand.published())[0])
    trainer = Trainer(
        TrainerSettings(),
        SGD,
        DeviceSettings(),
        LeaseSettings(seconds=60),
        keys=hand.keys,
        redis=redis,
        name="t",
        load=lambda: task,
        wire=format_of(name),
    )
    for count in (1, 2):  # what a format loses of the first update goes into the second
        async with running(trainer, context()):
            [asked] = await hand.open(device=7, steps=H, epochs=None, seed=5)
            upload = (await answers(hand, count))[-1]
        trainers = await hand.client.call("HGET", hand.keys.update(upload.blob), 0)
        offer = gateway.offer(x_tau, task=asked.task, steps=H, format=name, sends=sends)
        await run_device(options(), lambda _line: None, lambda _what: None)
        sent = gateway.sent[offer.attempt]
        assert bytes(sent.data) == trainers
        mine, theirs = sent.report.model_dump(exclude={"seconds"}), upload.model_dump()
        assert mine == {key: theirs[key] for key in mine}
