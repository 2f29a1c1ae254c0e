"""Simulations side by side: what becomes of a sweep whose process is killed."""

from __future__ import annotations

import os
import signal

import pytest

from fedstream.core.errors import FedstreamError
from fedstream.sweep.parallel import each


def _killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_process_ends_the_sweep_with_advice() -> None:
    with pytest.raises(FedstreamError, match=r"was killed.* the same command continues"):
        list(each(_killed, [1, 2], processes=2, threads=1))
