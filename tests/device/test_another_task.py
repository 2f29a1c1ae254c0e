"""A device whose task is not the run's is told so by a real gateway before it gets a task."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.core.errors import ConfigError
from fedstream.device.connection import GatewayAddress
from fedstream.device.process import run_device
from fedstream.operate.enrolment import invite
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.coordinator.gateway.places import SITE, Place, coordinating, serving
from tests.device.conftest import Options
from tests.support import Hand, counted
from tests.trainer.stepping import Steps

SAID = "a device's task is not the run's"


@pytest.fixture
async def place(hand: Hand, redis: RedisSettings) -> AsyncIterator[Place]:
    """The gateway of a run with ten devices."""
    hand.layout = layout_of(Steps().model())
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis, identity=None) as made:
        yield made


async def lives(place: Place, hand: Hand, options: Options, **changes: Any) -> None:
    """A device enrols and takes part until it has answered a task."""
    made = await invite(hand.client, hand.keys, SITE, [7], seconds=60)
    told = options(address=GatewayAddress(place.url), invite=made.invites[7], **changes)
    await run_device(told, lambda _line: None, lambda _what: None)


class Wider(Steps):
    """Another model, of data that is split over twelve devices."""

    devices = 12

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("task", "changes", "says"),
    [
        (Steps(), {"run_devices": 12}, "its data is split over 12 devices, the run has 10"),
        (
            Wider(),
            {},
            (
                r"its model's layout is \w{12}, the run's is \w{12} \(\d+ parameters in "
                r"\d+ tensors\); its data is split over 12 devices, the run h"
            ),
        ),
    ],
    ids=["devices", "both"],
)
async def test_device_with_another_task_is_told_how_it_differs(
    place: Place, hand: Hand, options: Options, task: Task, changes: dict[str, Any], says: str
) -> None:
    """ConfigError: the command ends with 2. The gateway logs it once, whoever comes again."""
    with capture_logs() as lines:
        for _ in range(2):
            with pytest.raises(ConfigError, match=says) as raised:
                await lives(place, hand, options, load=lambda: task, **changes)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith("the gateway refused this task: its ")
    assert text.endswith(
        "(another task): name the task that the run was made with (--task), with "
        "as many devices (--set task.devices=N)"
    )
    [line] = [one for one in lines if one["event"] == SAID]
    assert line["device"] == 7
    assert line["reason"] in text
    assert counted(place.context, "fedstream_gateway_refused_total", reason="another task") == 2
    assert await hand.ledger.owners() == {}  # it gets no task


async def test_device_that_names_another_layout_each_time_does_not_fill_the_log(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis, device_rate=1000) as gateway:
        with capture_logs() as lines:
            for device in (*[3] * 20, 4, 3):
                said: dict[str, Any] = {
                    "layout": secrets.token_hex(32),
                    "devices": 11 + secrets.randbelow(1000),
                }
                assert (await gateway.check_in(device, **said)).status == 409
    assert [one["device"] for one in lines if one["event"] == SAID] == [3, 4]
