"""Which tests start a process: `make fast` leaves them out.

A test that gets a server from a shared fixture is marked ``process`` by itself. Any other test that
starts a process must have that mark, or it fails: so what `make fast` runs can't come to depend on
a Redis, a service or a command by accident.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

MARK = "process"
SERVERS = {"images", "kustomized", "nodes", "quick_programs", "rendering", "server_of"}  # fixtures
_EVENTS = {  # of Python's audit hooks
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
}


class Processes:
    """The plugin: it knows which test runs, and which fixtures have started a process."""

    def __init__(self) -> None:
        self._running: pytest.Item | None = None
        self._in_setup: list[pytest.FixtureDef[object]] = []
        self._started_by: set[pytest.FixtureDef[object]] = set()  # those that several tests share
        self._events = _EVENTS  # at Python's end, modules have lost their names
        sys.addaudithook(self._audit)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if not SERVERS.isdisjoint(_fixtures(item)):
                item.add_marker(MARK)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        self._in_setup.append(fixturedef)
        try:
            return (yield)
        finally:
            self._in_setup.pop()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail who uses a process that another test's fixture has started already."""
        if isinstance(item, pytest.Function) and not item.get_closest_marker(MARK):
            used = {one for many in item._fixtureinfo.name2fixturedefs.values() for one in many}
            for one in self._started_by & used:
                pytest.fail(_advice(item, f"uses fixture {one.argname}, which starts a process"))

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in self._events and (item := self._running) is not None:
            self._started_by.update(one for one in self._in_setup if one.scope != "function")
            if not item.get_closest_marker(MARK):
                pytest.fail(_advice(item, f"starts a process ({event}{arguments[:1]})"))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(item.fixturenames) if isinstance(item, pytest.Function) else set()


def _advice(item: pytest.Item, what: str) -> str:
    return f"{item.name} {what}: mark it, or its module, with pytest.mark.{MARK}"
