"""`make fast` runs what starts no process: a test without the mark can't start one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.processes import MARK, SERVERS, Processes


async def _by_asyncio() -> None:
    await asyncio.create_subprocess_exec(sys.executable, "-c", "")


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        lambda: asyncio.run(_by_asyncio()),
        os.fork,
        lambda: os.system("true"),  # noqa: S605
    ],
    ids=["subprocess", "asyncio", "fork", "system"],
)
def test_a_test_without_the_mark_starts_no_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"mark\.{MARK}"):
        start()


@pytest.mark.process
def test_a_test_with_the_mark_may() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.fixture(scope="module")
def shared() -> None:
    """What tests of a module share."""


@pytest.mark.usefixtures("shared")
def test_shared_fixture_that_started_a_process_may_not_be_used_without_the_mark(
    request: pytest.FixtureRequest,
) -> None:
    plugin, item = Processes(), request.node
    [definition] = item._fixtureinfo.name2fixturedefs["shared"]
    plugin.pytest_runtest_setup(item)
    plugin._running, setting_up = item, plugin.pytest_fixture_setup(definition)
    next(setting_up)
    with pytest.raises(pytest.fail.Exception, match="starts a process"):
        plugin._audit("os.fork", ())
    setting_up.close()
    plugin._running = None  # an audit hook can't be removed: this one is not to judge other tests
    with pytest.raises(pytest.fail.Exception, match="uses fixture shared, which starts a process"):
        plugin.pytest_runtest_setup(item)


def test_tests_with_a_server_have_the_mark(request: pytest.FixtureRequest) -> None:
    asking = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and not SERVERS.isdisjoint(item.fixturenames)
    ]
    assert [item.nodeid for item in asking if not item.get_closest_marker(MARK)] == []
