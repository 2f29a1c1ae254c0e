"""A helper in a process of its own, which can be killed at any moment."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from fedstream.core.errors import ConfigError
from fedstream.helper.service import HelperService
from fedstream.helper.settings import HelperSettings
from fedstream.runtime.http import HttpSettings, application
from tests.support import context, wait_until

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__])


class Killable:
    """A helper's process and its store."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.store = Path(settings["store"])
        self._process: Any = None

    async def start(self) -> str:
        """Start the process, again if it is killed meanwhile; return the helper's URL.

        Raises ConfigError as the helper does.
        """
        while True:
            ours, theirs = _forks.Pipe()
            self._process = _forks.Process(target=_serve, args=(theirs, self.settings), daemon=True)
            await asyncio.to_thread(self._process.start)
            theirs.close()
            try:
                said: str = await asyncio.to_thread(ours.recv)
            except EOFError:
                continue
            finally:
                ours.close()
            if not said.startswith("http"):
                self._process.join()
                raise ConfigError(said)
            return said

    def kill(self) -> None:
        """Kill the process, wherever it is."""
        if self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()

    def opened(self) -> dict[tuple[str, str], str]:
        """The intent by the run and task that the store says were opened in it."""
        with sqlite3.connect(self.store) as database:
            rows = database.execute("SELECT run, task, intent FROM opened").fetchall()
        database.close()
        return {(run, task): intent for run, task, intent in rows}

    def spent(self) -> dict[int, int]:
        """The squared weights of each device, added up, as the store has them."""
        with sqlite3.connect(self.store) as database:
            rows = database.execute("SELECT device, squares FROM spent").fetchall()
        database.close()
        return dict(rows)


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    asyncio.run(_served(pipe, settings))


async def _served(pipe: Connection, settings: dict[str, Any]) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        service = HelperService(HelperSettings(**settings), HttpSettings())
    except ConfigError as error:
        pipe.send(str(error))
        return
    its = context()
    running = asyncio.create_task(service.run(its))
    await wait_until(lambda: service._worker is not None)
    runner = web.AppRunner(application(service.routes(), its.stop.is_set), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    pipe.close()
    await running
