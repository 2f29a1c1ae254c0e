"""The device in plain Python, examples/plain_device.py, beside a run that it isn't written for.

tests/integration/test_over_http.py has it take part in one.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from fedstream.core.layout import Model
from tests.device.fake import FakeGateway

PLAIN = Path(__file__).parents[2] / "examples" / "plain_device.py"


@pytest.mark.process
async def test_a_task_of_another_model_is_given_up_with_a_reason(
    gateway: FakeGateway, server: TestServer, model: Model
) -> None:
    gateway.offer(model)
    url = str(server.make_url("/")).rstrip("/")
    process = await asyncio.create_subprocess_exec(
        sys.executable, PLAIN, url, gateway.invite(7), stderr=PIPE
    )
    _, err = await process.communicate()
    assert (process.returncode, gateway.given_up) == (1, [("task-1", "raised ValueError")])
    said = f"given up: `train` is for another model than one of {model.layout.nbytes} bytes"
    assert err.decode().startswith(f"task task-1: {said}")


def test_it_stays_within_120_lines() -> None:
    assert len(PLAIN.read_text().splitlines()) <= 120
