"""`fedstream run`: runs every service as a process on this machine until the run ends.

Configuration, output folder, Redis and task are checked before anything starts. Then Redis starts,
then the services, which wait for one another. A run ends when its last version is measured, when it
is interrupted, or when it can't continue. In each case, the services stop in order and the results
are written.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import ConfigError, DataError, FedstreamError, NoRun, Unavailable
from fedstream.broker.keys import POOL, Keys
from fedstream.broker.layout import Model
from fedstream.broker.messages import Event
from fedstream.broker.records import View
from fedstream.journal import JournalError, segments
from fedstream.journal.inspection import FOLDER, entries
from fedstream.local import guests, own_redis, parent
from fedstream.local.ports import HeldPort
from fedstream.local.recall import recall
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import Program, Supervisor
from fedstream.observe import report
from fedstream.observe.display import Display, short
from fedstream.observe.observer import Observer
from fedstream.operate.presence import serving
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import dump
from fedstream.runtime.signals import INTERRUPTED, Stop
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG
from fedstream.settings.services import check_used, devices_of, look_over, task_of
from fedstream.trainer.loading import words

if TYPE_CHECKING:
    from pydantic import SecretStr
    from torch import nn

LOGS = "logs"

_REDIS_WITHIN_S = 10.0
_MEASURED_WITHIN_S = 120.0  # how long the evaluator may take for the last version
# Counted in the pool only: a site must not end the operator's run.
_MOST_FAILED = 10  # tasks in a row that raised or killed their trainer
_MOST_REFUSED = 100  # updates in a row: the model isn't changing any more
_GUESTS_S = 6.0  # a few heartbeats: time to leave for trainers that joined
_OURS = ("FEDSTREAM_CONFIG", "FEDSTREAM_NAME")


@dataclass(frozen=True)
class Plan:
    """The user's request to `fedstream run`."""

    settings: Settings
    out: Path
    trainers: int = 2
    port: int | None = None  # the coordinator's; 0: any free one; None: http.port
    resume: bool = False

    @property
    def own_redis(self) -> bool:
        """Whether the run brings its own Redis, because none was configured."""
        return not self.settings.redis.is_named


@dataclass(frozen=True)
class Subject:
    """What the parent learned about the task by loading it once."""

    module: nn.Module
    devices: int
    tested: bool  # the task has test data
    torch: str


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    state: Literal["finished", "interrupted", "failed"]
    why: str

    @property
    def code(self) -> int:
        """Exit code."""
        return {"finished": 0, "interrupted": INTERRUPTED, "failed": 1}[self.state]


def default_out(name: str, now: datetime) -> Path:
    """Default output folder, one for each run."""
    return Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"


def environment(
    environ: Mapping[str, str],
    redis: RedisSettings,
    redis_url: str,
    pid: int,
    token: SecretStr | None = None,
) -> dict[str, str]:
    """Environment of the services, without overrides: the resolved configuration contains those.

    Redis URL, passwords and token are passed here, because `ps` must not show them, and passwords
    and token are written to no file.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OURS and not (name.startswith("FEDSTREAM_") and "__" in name)
    }
    secrets = {
        "FEDSTREAM_REDIS__PASSWORD": redis.password,
        "FEDSTREAM_HTTP__TOKEN": token,
    }
    if redis.sentinel is not None:
        secrets["FEDSTREAM_REDIS__SENTINEL__PASSWORD"] = redis.sentinel.password
    known = {
        name: tomli_w.dumps({"": secret.get_secret_value()}).removeprefix('"" = ').strip()
        for name, secret in secrets.items()
        if secret is not None
    }
    return kept | known | {"FEDSTREAM_REDIS__URL": redis_url, parent.VARIABLE: str(pid)}


def programs(settings: Settings, trainers: int, config: Path, port: int) -> list[Program]:
    """Services of a run, in starting order."""
    # Free ports: all services share one machine.
    file = ("--config", str(config), "--set", "http.port=0", "--set", "http.health_port=0")
    listen = ("--set", f"http.port={port}")
    return [
        # First those that load torch, which takes longest.
        Program("updater", "updater", file, settings.updater.drain_s),
        *(
            Program(f"trainer-{n}", "trainer", file, settings.trainer.drain_s)
            for n in range(1, trainers + 1)
        ),
        Program("evaluator", "evaluator", file, settings.evaluator.drain_s),
        Program("coordinator", "coordinator", (*file, *listen), settings.coordinator.drain_s),
        Program("scheduler", "scheduler", file, settings.scheduler.drain_s),
    ]


def run(plan: Plan, display: Display) -> tuple[int, dict[str, Any]]:
    """Run to the end; returns the exit code and the summary.

    Raises FedstreamError before anything starts if the run is impossible.
    """
    _check_folder(plan)
    plan = _with_paths(plan)
    if plan.resume:
        _check_journal(plan)
    with ExitStack() as stack:
        port = stack.enter_context(_port(plan))
        if not plan.own_redis:
            asyncio.run(_check_redis(plan, display))
        subject = examine(plan.settings)
        stop = stack.enter_context(Stop())  # from here on, a signal must clean up
        server: RedisServer | None = None
        url = plan.settings.redis.url
        if plan.own_redis:
            server = RedisServer()
            stop.at_once = server.kill
            stack.enter_context(server)
            url = server.url
        if stop.name is not None:
            raise KeyboardInterrupt  # nothing has been written yet
        with report.usable(plan.out):
            (plan.out / LOGS).mkdir(parents=True, exist_ok=True)
            _write_config(plan, url)
        try:
            live = LocalRun(plan, subject, display, url, server, port.number)
            return asyncio.run(live.live(stop))
        finally:
            display.close()
            if plan.own_redis:
                _write_config(plan, None)  # drop the dead Redis's URL, so the file can be reused


def _check_folder(plan: Plan) -> None:
    with report.usable(plan.out):
        taken = [name for name in (CONFIG, report.SUMMARY, FOLDER) if (plan.out / name).exists()]
    if taken and not plan.resume:
        raise FedstreamError(
            f"{plan.out} holds a run already ({taken[0]}): name another folder with --out, "
            "or go on with it by --resume"
        )


def _with_paths(plan: Plan) -> Plan:
    """Make paths absolute, so that the configuration works from any working directory.

    A local run's journal is always in the run's own folder, whatever the configuration says.
    """
    settings = plan.settings
    journal = settings.journal.model_copy(update={"dir": str(plan.out.absolute() / FOLDER)})
    task, (file, _, attribute) = settings.task, settings.task.name.rpartition(":")
    if file.endswith(".py"):
        task = task.model_copy(update={"name": f"{Path(file).absolute()}:{attribute}"})
    if task.data_root is not None:
        task = task.model_copy(update={"data_root": str(Path(task.data_root).absolute())})
    redis = settings.redis
    if redis.tls is not None:
        files = {name: str(Path(path).absolute()) for name, path in redis.tls if path is not None}
        redis = redis.model_copy(update={"tls": redis.tls.model_copy(update=files)})
    changed = settings.model_copy(update={"journal": journal, "task": task, "redis": redis})
    return replace(plan, settings=changed)


def _check_journal(plan: Plan) -> None:
    """Check that a journal can be resumed. Raises JournalError if it's missing or finished."""
    folder = Path(plan.settings.journal.dir)
    chain = segments(folder)
    try:
        if not chain:
            raise JournalError(f"--resume: there is no journal in {folder}: name the run's --out")
        last = chain[-1]
        ends = [last.standing.finished, *(entry.finished for _, entry in entries(last, None))]
        if why := next(filter(None, ends), None):
            raise JournalError(f"--resume: the run in {plan.out} is finished ({why})")
    finally:
        for segment in chain:
            segment.close()


def _port(plan: Plan) -> HeldPort:
    """Reserve the coordinator's port before it starts, so that it keeps it across restarts."""
    http = plan.settings.http
    wanted = http.port if plan.port is None else plan.port
    try:
        found = socket.getaddrinfo(http.host or None, wanted, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"http.host = {http.host!r}: no such host: {why}") from error
    family, _, _, _, address = found[0]
    try:
        return HeldPort(address, family)
    except OSError as error:
        key = f"http.port = {wanted}" if plan.port is None else f"--port {wanted}"
        raise FedstreamError(
            f"{key}: cannot listen there on http.host = {http.host!r}: {error.strerror} "
            "(port 0 takes any that is free)"
        ) from error


async def _check_redis(plan: Plan, display: Display) -> None:
    """Wait briefly for the configured Redis, and check that the run can start or resume there.

    Raises FedstreamError.
    """
    client = Client(plan.settings.redis, "run")
    keys = Keys(plan.settings.run.name)
    try:
        await _reached(client, display)
        observer = Observer(client, keys)
        try:
            view = await observer.look()
        except NoRun:
            return  # a resumed run continues from its journal
        if view.run.state == "finished":
            raise FedstreamError(
                f"run {keys.name!r} is finished ({view.run.why}): take another name with --set "
                "run.name=..., or delete it with `fedstream purge`"
            )
        if not plan.resume:
            raise FedstreamError(
                f"run {keys.name!r} is in Redis at {client.address}, at version "
                f"{view.head.version} of {view.run.versions}: go on with it by --resume, take "
                "another name with --set run.name=..., or delete it with `fedstream purge`"
            )
        if busy := await serving(client, keys):
            raise FedstreamError(
                f"run {keys.name!r} is being served by {', '.join(busy)} (one that crashed counts "
                "for 10 s more)"
            )
    finally:
        await client.close()


async def _reached(client: Client, display: Display) -> None:
    until = time.monotonic() + _REDIS_WITHIN_S
    waiting = False
    while True:
        try:
            async with asyncio.timeout(_REDIS_WITHIN_S):
                await client.call("PING")
        except (Unavailable, TimeoutError) as error:
            if not waiting:
                waiting = True
                why = str(error).rstrip(".") or "no answer"
                display.say(f"{why}; trying for {_REDIS_WITHIN_S:.0f} s")
            if time.monotonic() > until:
                raise Unavailable(
                    f"no Redis at {client.address} within {_REDIS_WITHIN_S:.0f} s: start it, or "
                    "leave redis.url and --redis out to have one started"
                ) from error
            await asyncio.sleep(0.25)
        else:
            return


def examine(settings: Settings) -> Subject:
    """Load the task here once, so that its errors are reported before anything starts.

    Raises ConfigError or DataError with the place in the user's program.
    """
    import torch

    from fedstream.trainer.data import samples_of
    from fedstream.trainer.task import Task, untrained
    from fedstream.trainer.vector import layout_of

    check_used(settings)
    with redirect_stdout(sys.stderr):  # stdout may be read by a program
        task = task_of(settings)
        try:
            module = untrained(task)
        except ConfigError as error:
            raise ConfigError(f"task {settings.task.name!r}: {error}") from error
        except Exception as error:
            raise ConfigError(_user_error(settings, "model()", error)) from error
        layout_of(module)
        try:
            test_data = task.test_data()
        except FedstreamError:
            raise
        except Exception as error:
            raise DataError(_user_error(settings, "test_data()", error)) from error
        if test_data is not None and type(task).metrics is Task.metrics:  # else any data
            samples_of(test_data)
        devices = devices_of(settings, task)
        look_over(task, devices, trained_here=True)
    return Subject(module, devices, test_data is not None, torch.__version__)


def _user_error(settings: Settings, what: str, error: Exception) -> str:
    return f"task {settings.task.name!r}: {what} raised {words(error)}"


def _write_config(plan: Plan, url: str | None) -> None:
    """Write the resolved run.toml. ``url``: Redis's current URL, or None to leave it out."""
    settings = plan.settings
    redis = settings.redis.model_copy(update={"url": url} if url else {})
    log = settings.log.model_copy(update={"format": "json"})
    text = dump(settings.model_copy(update={"redis": redis, "log": log}))
    if url is None:
        tables = tomllib.loads(text)
        del tables["redis"]["url"]
        text = tomli_w.dumps(tables)
    elif plan.own_redis:
        text = own_redis.MARK + text
    aside = plan.out / f".{CONFIG}"  # write atomically, even if the disk is full
    aside.unlink(missing_ok=True)
    try:
        aside.touch(mode=0o600, exist_ok=False)  # the URL may hold a password
        aside.write_text(text, encoding="utf-8")
        aside.replace(plan.out / CONFIG)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


class LocalRun:
    """A run in progress."""

    def __init__(
        self,
        plan: Plan,
        subject: Subject,
        display: Display,
        redis_url: str,
        server: RedisServer | None,
        port: int,
    ) -> None:
        self._plan = plan
        self._subject = subject
        self._display = display
        self._server = server
        self._port = port
        self._settings = plan.settings
        self._keys = Keys(self._settings.run.name)
        self._client = Client(self._settings.redis.model_copy(update={"url": redis_url}), "run")
        self._observer = Observer(self._client, self._keys)
        self._supervisor = Supervisor(
            programs(self._settings, plan.trainers, plan.out / CONFIG, port),
            logs=plan.out / LOGS,
            environment=environment(
                os.environ, self._settings.redis, redis_url, os.getpid(), self._settings.http.token
            ),
            say=display.say,
            failed=lambda why: self._end(Ending("failed", why)),
            worked=self._worked,
        )
        self._started = time.time()
        self._ending: Ending | None = None
        self._over = asyncio.Event()
        self._told: set[str] = set()  # keys of messages to show only once
        self._finished_since: float | None = None
        self._lost_since: float | None = None  # since when Redis has been away

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
        self._display.header(self._header())
        if self._plan.resume:
            history = self._observer.history
            try:
                recall(history, Path(self._settings.journal.dir), self._plan.out / report.METRICS)
            except JournalError as error:  # not fatal: the updater needs only the newest segment
                self._display.say(f"not all that was before can be told: {error}")
            with suppress(NoRun):  # a new Redis: the run continues from its journal
                await self._observer.catch_up()
            history.forget_failures()
        await asyncio.sleep(0)  # let a pending signal be handled
        if not self._over.is_set():
            self._supervisor.start()
        try:
            while not self._over.is_set():
                await self._step(self._over)
                self._judge()
            if self._server is not None and self._ending and self._ending.state == "finished":
                ours = self._supervisor.restarts
                await guests.gone(self._observer.ledger, ours, _GUESTS_S)
        finally:
            await self._stopped()
        return await self._reported()

    def _header(self) -> dict[str, str]:
        settings, plan = self._settings, self._plan
        host = settings.http.host
        host = f"[{host}]" if ":" in host else host
        whose = "" if self._server is None else ", its own"
        goal = f"{settings.run.versions} versions"
        if settings.run.target_accuracy is not None:
            goal += f", or accuracy {settings.run.target_accuracy:g}"
        return {
            "run": f"{settings.run.name}: {goal}",
            "task": f"{settings.task.name}, {self._subject.devices} devices",
            "strategy": settings.strategy.name,
            "services": f"coordinator, scheduler, updater, evaluator, {plan.trainers} trainers",
            "Redis": f"{self._client.address}{whose}",
            "status": f"http://{host}:{self._port}/v1/runs/{settings.run.name}",
            "watch": f"fedstream top --config {plan.out / CONFIG}",
            "out": str(plan.out),
        }

    # how it ends

    def _end(self, ending: Ending) -> None:
        """End the run; the first ending counts."""
        if self._ending is None:
            self._ending = ending
            self._over.set()

    def _signalled(self, name: str) -> None:
        self._display.say(f"{name}: stopping the services; once more ends them at once")
        self._end(Ending("interrupted", f"by {name}"))

    def _kill(self) -> None:
        """Kill all services and the run's own Redis at once."""
        self._supervisor.kill()
        self._display.close()
        if self._server is not None:
            self._server.kill()

    async def _stopped(self) -> None:
        """Stop the services, and keep reading: what they do while draining belongs to the run."""
        stopped = asyncio.Event()
        stopping = asyncio.create_task(self._supervisor.stop(), name="stop")
        stopping.add_done_callback(lambda _: stopped.set())
        try:
            while not stopped.is_set():
                await self._step(stopped)
        finally:  # even if reading or showing fails, leave no service running
            await stopping

    async def _step(self, over: asyncio.Event) -> None:
        """Read and show news. Retriable Redis errors are waited out; others end the run."""
        try:
            await self._observer.step()
        except NoRun:
            pass
        except FedstreamError as error:
            if not error.retriable:
                self._end(Ending("failed", str(error)))
            elif self._lost_since is None:
                self._lost_since = time.monotonic()
                self._display.say(f"{error}: waiting for it")
            if self._server is not None and not _is_running(self._server.pid):
                self._end(Ending("failed", "its Redis has ended, and the run's state with it"))
            await pause(over, 0.5)
        else:
            if self._lost_since is not None:
                away = time.monotonic() - self._lost_since
                self._display.say(f"Redis answers again after {away:.1f} s")
                self._lost_since = None
        view, history = self._observer.view, self._observer.history
        self._display.show(view, history, stopping=self._over.is_set())

    def _judge(self) -> None:
        """Report notable events, and decide whether the run has ended."""
        history, view = self._observer.history, self._observer.view
        for kind, event in list(history.errors.items()):
            self._once(f"error {kind}", _raised(event))
        if history.failed >= _MOST_FAILED:
            why = f"{history.failed} tasks in a row failed, and no update came in between"
            self._end(Ending("failed", f"{why}: {_last_error(history.errors)}"))
        if view is None:
            return
        if history.refused >= _MOST_REFUSED:
            reasons = ", ".join(view.reasons("refused"))
            why = f"{history.refused} updates in a row were refused ({reasons})"
            self._end(Ending("failed", f"{why}: the model can't get any further"))
        if view.backlog and disk_usage(self._plan.out).free < view.run.layout.nbytes:
            self._once("full", f"{self._plan.out}: its disk is full: the updater waits for room")
        for reason in view.reasons("refused"):
            self._once(f"refused {reason}", f"updates are refused: {reason} (counted; see status)")
        for reason in view.reasons("dead"):
            self._once(f"dead {reason}", f"a task is dead: it {reason} (counted; see status)")
        if view.run.state == "finished":
            self._judge_finished(view)

    def _judge_finished(self, view: View) -> None:
        now = time.monotonic()
        self._finished_since = self._finished_since or now
        tried = view.head.version == self._observer.history.tried
        failure = self._observer.history.unmeasured
        if tried and failure is not None:
            why = f"{view.run.why}, but it could not be measured: {_last_line(failure)}"
            self._end(Ending("failed", why))
        elif tried or not self._subject.tested:
            self._end(Ending("finished", view.run.why or ""))
        elif now - self._finished_since > _MEASURED_WITHIN_S:
            self._display.say(f"the last version was not measured in {_MEASURED_WITHIN_S:.0f} s")
            self._end(Ending("finished", view.run.why or ""))

    def _once(self, key: str, line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._display.say(line)

    async def _worked(self, program: Program, pid: int) -> bool:
        """Whether a process had begun to work; known only of trainers, by the register."""
        if program.role != "trainer":
            return False
        try:
            about = (await self._observer.ledger.trainers()).get(program.name, {})
        except FedstreamError:
            return False
        return about.get("pid") == pid

    # what is left

    async def _reported(self) -> tuple[int, dict[str, Any]]:
        """Write the result files from what the services left."""
        ending = self._ending or Ending("failed", "it was given up")
        view: View | None = None
        model: Model | None = None
        try:
            await self._observer.catch_up()
            view = await self._observer.look()
            model = Model(view.run.layout)
            head, blob = view.head, self._keys.model(view.head.blob)
            await blobs.read(self._client, blob, model, digest=head.digest, chunks=head.chunks)
        except NoRun:
            pass
        except FedstreamError as error:
            view, model = view or self._observer.view, None
            self._display.say(f"not everything could be read at the end: {error}")
        finally:
            await self._client.close()
        numbers = report.summary(self._facts(ending, view), self._observer.history, view)
        code, files = ending.code, list[str]()
        try:
            for name in self._written(numbers, view, model):
                files.append(str(self._plan.out / name))
        except OSError as error:
            self._display.say(f"{self._plan.out}: cannot be written: {error.strerror}")
            code = code or 1
        self._display.result(numbers, files)
        return code, numbers

    def _facts(self, ending: Ending, view: View | None) -> report.Facts:
        settings = self._settings
        return report.Facts(
            run=settings.run.name,
            task=settings.task.name,
            strategy=settings.strategy.name,
            devices=view.run.devices if view else self._subject.devices,
            trainers=self._plan.trainers,
            seed=settings.run.seed,
            target=settings.run.versions,
            started=self._started,
            ended=time.time(),
            state=ending.state,
            why=ending.why,
            restarts=self._supervisor.restarts,
            torch=self._subject.torch,
        )

    def _written(
        self, numbers: dict[str, Any], view: View | None, model: Model | None
    ) -> Iterator[str]:
        """Write the files, yielding each one's name once complete. Raises OSError."""
        out, history, settings = self._plan.out, self._observer.history, self._settings
        report.write_summary(out, numbers)
        yield report.SUMMARY
        if view is not None:
            from fedstream.observe import curves

            report.write_table(out, history, view.run.created)
            yield report.METRICS
            title = (
                f"{short(settings.task.name)} · {settings.strategy.name} · "
                f"{numbers['devices']} devices, {numbers['trainers']} trainers · "
                f"{numbers['versions']} versions"
            )
            curves.draw(
                out / report.CURVES, title, history,
                created=view.run.created, devices=view.run.devices,
            )  # fmt: skip
            yield report.CURVES
        if view is not None and model is not None and view.head.version > 0:  # else untrained
            about = {
                "version": str(view.head.version), "digest": view.head.digest,
                "run": settings.run.name, "task": settings.task.name,
            }  # fmt: skip
            report.write_model(out, model, self._subject.module, about)
            yield report.MODEL
        yield from (FOLDER, CONFIG, LOGS)


def _is_running(pid: int) -> bool:
    """Whether a child process is still running; does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _raised(event: Event) -> str:
    what = "the test data" if event.device is None else f"device {event.device}"
    where = f"{what} at version {event.version} ({event.service})"
    return f"the task raised on {where}:\n{(event.text or '').rstrip()}"


def _last_error(errors: Mapping[tuple[str, str], Event]) -> str:
    ours = [event for (site, _), event in errors.items() if site == POOL]
    return _last_line(ours[-1]) if ours else "they killed their trainers"


def _last_line(event: Event) -> str:
    """Last line of an error's traceback."""
    text = (event.text or "").strip()
    return text.splitlines()[-1] if text else "see the logs"
