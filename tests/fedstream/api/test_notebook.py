"""A live run in a notebook's kernel: a task of a cell, the bar, and the stop button."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

pytestmark = pytest.mark.process

GUARD_S = 120.0
CELL = """
import os
os.chdir({folder!r})
import fedstream, torch
from torch.utils.data import TensorDataset

class Mine(fedstream.Task):
    devices = 4
    def model(self): return torch.nn.Linear(2, 2)
    def device_data(self, device):
        return TensorDataset(torch.randn(40, 2), torch.arange(40) % 2)

run = fedstream.run(Mine, versions=100_000, trainers=1, out="out")
"""


@pytest.fixture
def kernel(kernel_name: str) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name=kernel_name)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def messages(client: BlockingKernelClient, asked: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a cell shows, by the kind of message, until it has ended."""
    while True:
        message = client.get_iopub_msg(timeout=GUARD_S)
        if message["parent_header"].get("msg_id") == asked:
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            yield kind, content


def test_the_stop_button_ends_the_run_and_leaves_its_results(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    asked = client.execute(CELL.format(folder=str(tmp_path)))
    kinds, stopped, error = set(), False, {}
    for kind, content in messages(client, asked):
        kinds.add(kind)
        if kind == "update_display_data" and not stopped:
            text = content["data"]["text/plain"]
            if re.match(r"fedasync on Mine · [1-9]\d*/100000 · ", text):
                assert "<progress value=" in content["data"]["text/html"]
                manager.interrupt_kernel()
                stopped = True
        if kind == "error":
            error = content
    assert stopped
    assert error["ename"] == "Interrupted"
    assert "fedstream.open('out')" in error["evalue"]
    assert {"display_data", "update_display_data"} <= kinds  # one output, updated in place
    asked = client.execute("print(fedstream.open('out').state)")
    said = [content["text"] for kind, content in messages(client, asked) if kind == "stream"]
    assert said == ["interrupted\n"]
