"""`fedstream run`: runs every service as a process on this machine until the run ends.

Configuration, output folder, Redis and task are checked before anything starts. Then Redis starts,
then the services, which wait for one another. A run ends when its last version is measured, when it
is interrupted, or when it can't continue. In each case, the services stop in order and the results
are written.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstream.broker.client import Client
from fedstream.broker.clock import uptime
from fedstream.broker.keys import Keys, member
from fedstream.broker.ledger.sinks import SinksLedger
from fedstream.coordinator.settings import has_page
from fedstream.core.errors import DataError, FedstreamError, NoRun
from fedstream.core.records import Tally
from fedstream.history import report
from fedstream.history.display import Display
from fedstream.history.measurements import recall
from fedstream.history.observer import Observer, out_of_space
from fedstream.history.report import occupied
from fedstream.history.timeline import History
from fedstream.journal import JournalError
from fedstream.local import preflight, private, results
from fedstream.local.ending import Ending, ending, notices
from fedstream.local.launcher import Launcher, new_launcher
from fedstream.local.picture import Drawn, Painter
from fedstream.local.preflight import Subject
from fedstream.local.private import LocalHelper
from fedstream.local.redis_server import RedisServer
from fedstream.local.request import DEVICES, GATEWAY, HOST, OverHttp, RunRequest
from fedstream.local.supervisor import (
    HeldPort,
    Program,
    Supervisor,
    end_waits,
    environment,
    is_answering,
    programs,
)
from fedstream.local.trackers import Trackers
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import words
from fedstream.runtime.process import Stop
from fedstream.settings import run_toml
from fedstream.settings.plugin_sources import doubts
from fedstream.settings.recording import CONFIG
from fedstream.settings.services import described

_BLOCK_STOPPING_MS = 50  # shorter, so as not to delay the end of the last service
_GUESTS_S = 6.0  # a few heartbeats, for trainers from other terminals to leave


def run(
    request: RunRequest, display: Display, launcher: Launcher | None = None
) -> tuple[int, dict[str, Any]]:
    """Run to the end; returns the exit code and the summary.

    ``launcher``: None for a new one, made once the request is checked.
    Raises FedstreamError before anything starts if the run is impossible.
    """
    from fedstream.trainer.vector import layout_of

    preflight.check_folder(request)
    request = request.resolved()
    if request.resume:
        request = preflight.resumed(request)
    has_page(request.settings.page, request.settings.http)  # raises for unsafe settings
    with ExitStack() as stack:
        port = stack.enter_context(preflight.reserve_port(request))
        over_http = None
        if request.devices_over_http:
            gateways = stack.enter_context(HeldPort((HOST, 0)))
            over_http = OverHttp(request.devices_over_http, request.out / DEVICES, gateways.number)
        if not request.own_redis:
            asyncio.run(preflight.check_redis(request, display))
        if launcher is None:
            # Before any of the user's modules is imported, as this may fork the process.
            launcher = stack.enter_context(new_launcher())
        subject = preflight.examine(request.settings, begins=not request.resume)
        preflight.check_devices(request, subject)
        helper: LocalHelper | None = None
        if request.has_helper:
            held = stack.enter_context(HeldPort((HOST, 0)))
            helper = LocalHelper((request.out / private.PRIVATE).absolute(), held.number)
            devices = request.devices_over_http or subject.devices
            private.check(request.settings, layout_of(subject.module), devices)
        stop = stack.enter_context(Stop())  # from here on, a signal must clean up
        server: RedisServer | None = None
        url = request.settings.redis.url
        if request.own_redis:
            server = RedisServer()
            stop.at_once = server.kill
            stack.enter_context(server)
            url = server.url
        if stop.name is not None:
            raise KeyboardInterrupt  # nothing has been written yet
        with report.usable(request.out):
            (request.out / results.LOGS).mkdir(parents=True, exist_ok=True)
            stack.enter_context(occupied(request.out))
            if helper is not None:
                layout, settings = layout_of(subject.module), request.settings
                settings = helper.agreed(settings, layout, subject.devices)
                request = replace(request, settings=settings)
            run_toml.write(request.settings, request.out, url, private=request.own_redis)
            if over_http is not None:
                over_http.prepare()
        try:
            live = LocalRun(
                request, subject, display, url, server, port.number, launcher, over_http, helper
            )
            return asyncio.run(live.live(stop))
        finally:
            display.close()
            if request.own_redis:  # drop the dead Redis's URL, so the file can be reused
                run_toml.write(request.settings, request.out, None, private=True)


class LocalRun:
    """A run in progress."""

    def __init__(
        self,
        request: RunRequest,
        subject: Subject,
        display: Display,
        redis_url: str,
        server: RedisServer | None,
        port: int,
        launcher: Launcher,
        over_http: OverHttp | None = None,
        helper: LocalHelper | None = None,
    ) -> None:
        """``server``: the run's own Redis, if it has one. ``port``: the coordinator's.

        ``over_http``: the devices that replace the trainers. ``helper``: of a private run.
        """
        settings = request.settings
        self._request = request
        self._subject = subject
        self._display = display
        self._server = server
        self._over_http = over_http
        self._client = Client(settings.redis.model_copy(update={"url": redis_url}), "run")
        keys = Keys(settings.run.name)
        self._observer = Observer(self._client, keys)
        self._observer.history.references = settings.strategy.references
        self._trackers = Trackers(
            SinksLedger(self._client, keys, "run"),
            settings.sinks,
            request.out,
            request.out / results.LOGS / "sinks.log",
        )
        config = request.out / CONFIG
        services = programs(
            settings, request.trainers, config, port, changed_rules=request.changed_rules
        )
        if helper is not None:
            services.insert(0, helper.program(settings.helper.drain_s))
        self._later = list[Program]()  # started once devices over HTTPS are there
        if over_http is not None:
            self._later = [one for one in services if one.role == "scheduler"]
            services = [one for one in services if one.role != "scheduler"]
            services.append(over_http.gateway(config, settings.gateway.drain_s))
        self._invited = False
        self._supervisor = Supervisor(
            services,
            launcher=launcher,
            logs=request.out / results.LOGS,
            environment=environment(os.environ, settings, redis_url),
            say=display.say,
            failed=lambda why: self._end(Ending("failed", why)),
            worked=self._worked,
            end_waits=None if server is None else self._end_waits,
        )
        self._painter = Painter()
        self._host, self._port = settings.http.host, port  # the coordinator's
        self._has_page = has_page(settings.page, settings.http)
        self._header = _header(request, subject, self._client.address, over_http)
        self._started = uptime()
        self._table: report.Table | None = None  # None: the run does not exist yet
        self._ending: Ending | None = None
        self._over = asyncio.Event()
        self._told: set[str] = set()  # keys of messages to show only once
        self._finished_since: float | None = None
        self._lost_since: float | None = None  # beginning of Redis's outage

    async def live(self, stop: Stop) -> tuple[int, dict[str, Any]]:
        """Run from the first service to the last file; returns the exit code and the summary."""
        loop = asyncio.get_running_loop()
        stop.at_once = self._kill
        stop.listen(lambda name: loop.call_soon_threadsafe(self._signalled, name))
        try:
            return await self._live()
        finally:
            stop.listen(None)

    async def _live(self) -> tuple[int, dict[str, Any]]:
        self._display.header(self._header)
        for doubt in doubts(self._request.settings):
            self._display.say(doubt)
        if self._request.resume:
            await self._recall()
        await asyncio.sleep(0)  # let a pending signal be handled
        if not self._over.is_set():
            self._supervisor.start()
        try:
            while not self._over.is_set():
                await self._step(self._over)
                self._judge()
                self._show_addresses()
                if self._later and self._observer.view is not None:
                    await self._let_in(self._observer.view)
                if self._observer.history.newest > 0:  # from now on, there is something to draw
                    self._painter.get_ready()
            if self._server is not None and self._ending and self._ending.state == "finished":
                gateway = member(self._request.settings.gateway.site, GATEWAY)
                await self._guests_gone({*self._supervisor.restarts, gateway})
        finally:
            await self._stopped()
        return await self._reported()

    @property
    def _url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def _show_addresses(self) -> None:
        """Show the coordinator's address once it answers and the run exists."""
        if "status" in self._told or self._observer.view is None:
            return
        if is_answering(self._host, self._port):
            self._told.add("status")
            self._display.add("status", f"{self._url}/v1/runs/{self._request.settings.run.name}")
            if self._has_page:
                self._display.add("page", f"{self._url}/")

    async def _let_in(self, view: Tally) -> None:
        """Start the devices over HTTPS once run and gateway are ready; then, once the gateway has
        devices, the scheduler."""
        if self._over.is_set():
            return
        if self._invited:
            if view.trainers:
                self._supervisor.add(self._later)
                self._later = []
            return
        assert self._over_http is not None  # noqa: S101  (else nothing is left for later)
        if not self._over_http.is_open():
            return
        config = self._request.out / CONFIG
        try:
            devices = await self._over_http.devices(self._client, self._request.settings, config)
        except FedstreamError as error:
            if not error.retriable:
                self._end(Ending("failed", str(error)))
            return
        self._invited = True
        self._supervisor.add(devices)

    async def _recall(self) -> None:
        """Read the history of the run from before its interruption."""
        request, history = self._request, self._observer.history
        try:
            recall(history, Path(request.settings.journal.dir), request.out / report.METRICS)
        except JournalError as error:  # not fatal: the updater needs only the newest segment
            self._display.say(f"cannot show all of the earlier part of the run: {error}")
        with suppress(NoRun):  # a new Redis: the run continues from its journal
            await self._observer.catch_up()
        history.forget_failures()

    async def _step(self, over: asyncio.Event, *, block_ms: int = 250) -> None:
        """Read and show events. Waits out retriable Redis errors; others end the run."""
        try:
            await self._observer.step(block_ms=block_ms)
            await self._trackers.look(self._observer.view, time.monotonic())
        except NoRun:
            pass
        except FedstreamError as error:
            if not error.retriable:
                self._end(Ending("failed", str(error)))
            elif self._lost_since is None:
                self._lost_since = time.monotonic()
                self._display.say(f"{error}: waiting for Redis")
            if self._server is not None and not self._server.is_running:
                self._end(
                    Ending("failed", "the run's own Redis has died, and the run's state with it")
                )
            await pause(over, 0.5)
        else:
            if self._lost_since is not None:
                away = time.monotonic() - self._lost_since
                self._display.say(f"Redis answers again after {away:.1f} s")
                self._lost_since = None
        view, history = self._observer.view, self._observer.history
        if view is not None:
            self._tabulate(view, history)
        self._display.show(view, history, stopping=self._over.is_set())

    def _tabulate(self, view: Tally, history: History) -> None:
        """Add new measurements to metrics.csv. The run goes on without the file."""
        if self._table is None:
            self._table = report.Table(self._request.out, view.run.created)
        try:
            self._table.follow(history)
        except OSError as error:
            if "table" not in self._told:
                self._told.add("table")
                where = self._request.out / report.METRICS
                self._display.say(f"{where}: cannot be written: {error.strerror}")

    def _judge(self) -> None:
        """Report notable events, and decide whether the run has ended."""
        history, view, out = self._observer.history, self._observer.view, self._request.out
        folders = {out, Path(self._request.settings.journal.dir)}
        history.disk_full = any(out_of_space(folder, view) for folder in folders)
        now = time.monotonic()
        for key, line in (*notices(history, view, out), *self._trackers.notices(now)):
            if key not in self._told:
                self._told.add(key)
                self._display.say(line)
        wanted = self._request.settings.run.versions
        if self._request.resume and view is not None and view.run.versions < wanted:
            view = None  # the updater is about to extend the run, which may be finished
        if view is not None and view.run.state == "finished" and self._finished_since is None:
            self._finished_since = now
        finished_s = 0.0 if self._finished_since is None else now - self._finished_since
        on_devices = self._request.settings.evaluator.on_devices
        how = ending(
            history,
            view,
            tested=self._subject.tested,
            finished_s=finished_s,
            on_devices_s=None if on_devices is None else on_devices.timeout_s,
        )
        if how is not None:
            self._end(how)

    async def _guests_gone(self, ours: Set[str]) -> None:
        """Wait a little for trainers from other terminals to leave."""
        until = time.monotonic() + _GUESTS_S
        while time.monotonic() < until:
            try:
                there = await self._observer.ledger.trainers()
            except FedstreamError:
                return  # without Redis, trainers can't sign off either
            if not there.keys() - ours:
                return
            await asyncio.sleep(0.1)

    async def _stopped(self) -> None:
        """Stop the services, and keep reading events until they have drained."""
        stopped = asyncio.Event()
        stopping = asyncio.create_task(self._supervisor.stop(), name="stop")
        stopping.add_done_callback(lambda _: stopped.set())
        if (view := self._observer.view) is not None:
            self._painter.begin(self._drawn(view))
        try:
            while not stopped.is_set():
                await self._step(stopped, block_ms=_BLOCK_STOPPING_MS)
        finally:  # even if reading or showing fails, leave no service running
            await stopping

    async def _reported(self) -> tuple[int, dict[str, Any]]:
        """Write the result files from the final state."""
        how = self._ending or Ending("failed", "abandoned")
        request, subject, history = self._request, self._subject, self._observer.history
        try:
            view, model = await results.last_state(self._client, self._observer, self._display.say)
            with suppress(FedstreamError):  # Redis is unreachable, already reported
                await self._trackers.look(view, time.monotonic(), again=True)
        finally:
            await self._client.close()
        facts = results.facts(
            request,
            subject,
            view,
            how,
            seconds=uptime() - self._started,
            ended=self._client.clock.now(),
            restarts=self._supervisor.restarts,
        )
        numbers = report.summary(facts, history, view)
        code, files, picture = how.code, list[str](), None
        if view is not None:
            try:
                picture = await self._painter.png(self._drawn(view))
            except Exception as error:  # whatever matplotlib raises: the other files matter more
                self._display.say(f"{request.out / report.CURVES}: cannot be drawn: {words(error)}")
                code = code or 1
        try:
            for name in results.write(request, subject, numbers, history, view, model, picture):
                files.append(str(request.out / name))
        except OSError as error:
            self._display.say(f"{request.out}: cannot be written: {error.strerror}")
            code = code or 1
        except DataError as error:
            self._display.say(str(error))
            code = code or 1
        if view is not None:
            for lacking in self._trackers.missing(view):
                self._display.say(lacking)
        self._display.result(numbers, files)
        return code, numbers

    def _drawn(self, view: Tally) -> Drawn:
        request, history = self._request, self._observer.history
        return Drawn.of(request.settings, request.who_trains, view, history)

    # callbacks

    def _end(self, how: Ending) -> None:
        """End the run; the first ending counts."""
        if self._ending is None:
            if how.note:
                self._display.say(how.note)
            self._ending = how
            self._over.set()

    def _signalled(self, name: str) -> None:
        self._display.say(f"{name}: stopping the services; a second signal kills them")
        self._end(Ending("interrupted", f"by {name}"))

    def _kill(self) -> None:
        """Kill all services and the run's own Redis at once."""
        self._supervisor.kill()
        self._display.close()
        if self._server is not None:
            self._server.kill()

    async def _end_waits(self, names: Collection[str]) -> None:
        with suppress(FedstreamError):  # else the waits time out by themselves
            await end_waits(self._client, names)

    async def _worked(self, program: Program, pid: int) -> bool:
        """Whether a trainer's process had registered, and so begun to work."""
        if program.role != "trainer":
            return False
        try:
            about = (await self._observer.ledger.trainers()).get(program.name, {})
        except FedstreamError:
            return False
        return about.get("pid") == pid


def _header(
    request: RunRequest, subject: Subject, redis: str, over_http: OverHttp | None
) -> dict[str, str]:
    settings = request.settings
    whose = ", its own" if request.own_redis else ""
    goal = f"{settings.run.versions} versions"
    if (stop := settings.run.stop) is not None:
        ends = [f"{stop.metric} {stop.target:g}"] if stop.target is not None else []
        if stop.patience is not None:
            ends.append(f"{stop.patience} measurements without a better {stop.metric}")
        goal += ", or " + ", or ".join(ends)
    return {
        "run": f"{settings.run.name}: {goal}",
        "task": f"{settings.task.name}, {subject.devices} devices",
        "model": described(settings, subject.module),
        "strategy": settings.strategy.name,
        **private.described(settings),
        "services": "coordinator, scheduler, updater, evaluator, "
        + request.who_trains
        + (", sinks" if settings.sinks else "")
        + (", helper" if request.has_helper else ""),
        **({"gateway": over_http.url} if over_http else {}),
        "Redis": f"{redis}{whose}",
        "watch": f"fedstream top --config {request.out / CONFIG}",
        "out": str(request.out),
    }
