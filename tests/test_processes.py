"""`make fast` runs what starts no process: a test without the mark can't start one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.processes import MARK, SERVERS


async def _by_asyncio() -> None:
    await asyncio.create_subprocess_exec(sys.executable, "-c", "")


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        lambda: asyncio.run(_by_asyncio()),
        os.fork,
    ],
    ids=["subprocess", "asyncio", "fork"],
)
def test_a_test_without_the_mark_starts_no_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"mark\.{MARK}"):
        start()


def test_tests_with_a_server_have_the_mark(request: pytest.FixtureRequest) -> None:
    asking = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and not SERVERS.isdisjoint(item.fixturenames)
    ]
    assert [item.nodeid for item in asking if not item.get_closest_marker(MARK)] == []
