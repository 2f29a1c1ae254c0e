"""`fedstream doctor`: checks a deployment and says what to change.

Each line reports a fact that was read or measured, or a check that is impossible from here. Nothing
is changed in Redis. On the journal's volume, an unnamed temporary file is written to measure syncs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.text import Text

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.broker.rights import ROLES
from fedstream.core.errors import BrokerError, NoRun
from fedstream.core.records import Run, Tally
from fedstream.doctor import certificates, gateway, rights, run, server, task, volume
from fedstream.doctor.findings import Finding, Level, not_checked, ok, problem, warning
from fedstream.operate.presence import elsewhere, in_words, serving
from fedstream.private import NotInstalled, importing
from fedstream.settings.services import DEVICES
from fedstream.terminal import cell, console

if TYPE_CHECKING:
    from fedstream.core.layout import Layout
    from fedstream.settings.config import Settings

_ROUND_TRIPS = 20
_LEADERS = ("scheduler", "updater")
_WITH_TASK = ("trainer", "evaluator", "updater")  # the roles that load the task
_NEEDS_CONFIG = "needs the deployment's configuration: --config"
_COLORS: dict[Level, str] = {
    "ok": "green",
    "warning": "yellow",
    "problem": "red",
    "not checked": "",
}


async def examine(
    settings: Settings, *, configured: bool = True, now: Callable[[], float] = time.time
) -> list[Finding]:
    """Collect all findings. For a Redis user named after a role, check only this role's needs.

    ``configured``: whether the settings are the deployment's; if not, they have only Redis's
    address and the run's name. Raises ConfigError if the address or the name is not allowed.
    """
    client = Client(settings.redis, "doctor")
    user = user_of(settings.redis)
    role = user if user in ROLES else None
    loaded, about_task = task.Loaded(), list[Finding]()
    if not configured:
        about_task.append(not_checked("task, data, torch", _NEEDS_CONFIG))
    elif role is None or role in _WITH_TASK:
        loaded, about_task = task.load(settings)
        if loaded.task is not None:
            about_task += task.computing(settings, role)
    else:
        about_task.append(not_checked("task, data, torch", _elsewhere(role, "a trainer")))
    look = _Look(settings, client, user, loaded, now, configured=configured)
    try:
        findings = await look.all()
    finally:
        await client.close()
    if not configured:
        findings.append(not_checked("journal", _NEEDS_CONFIG))
    elif role in (None, "updater"):
        layout = look.run.layout if look.run is not None else loaded.layout
        findings += volume.disk(settings, layout.nbytes if layout is not None else None)
        findings.append(volume.journal(settings, look.run, asked=look.asked))
    else:
        findings.append(not_checked("journal", _elsewhere(role, "the updater")))
    if configured and gateway.is_meant(settings, user):
        findings.append(gateway.site(settings, user))
        findings.append(gateway.silence(settings, user))
        if role is None or gateway.is_gateways(user):
            findings += gateway.here(settings.gateway, now=now())
    if configured and settings.private.policy is not None:
        findings += await _private(settings, loaded.layout, role, now())
    return findings + about_task


async def _private(
    settings: Settings, layout: Layout | None, role: str | None, now: float
) -> list[Finding]:
    try:
        with importing("private.policy"):
            from fedstream.doctor import private
    except NotInstalled as error:
        return [not_checked("privacy policy", str(error))]
    return await private.findings(settings, layout, role, now)


def _elsewhere(role: str, where: str) -> str:
    return f"not relevant to the user {role}: run the doctor where {where} runs"


def user_of(redis: RedisSettings) -> str:
    """The Redis user in these settings."""
    return redis.username or urlsplit(redis.url).username or "default"


class _Look:
    """The checks of Redis; this user may lack the right for any of them."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        user: str,
        loaded: task.Loaded,
        now: Callable[[], float],
        *,
        configured: bool,
    ) -> None:
        self._settings = settings
        self._client = client
        self._user = user
        self._loaded = loaded
        self._now = now
        self._configured = configured
        self._keys = Keys(settings.run.name)
        self._ledger = OperatorLedger(client, self._keys, "doctor")
        self._info: server.Info | None = None
        self._view: Tally | None = None
        self.run: Run | None = None
        self.asked = False  # whether Redis could be asked for the run

    async def all(self) -> list[Finding]:
        """Collect every finding about Redis and the run in it."""
        redis = self._settings.redis
        shown = await certificates.examine(redis, now=self._now())
        try:
            await self._client.call("PING")
        except BrokerError as error:
            if error.retriable:
                change = "start it, or correct redis.url"
            elif "no permissions" in str(error):
                change = "create the users with `fedstream acl`"
            elif "redis.password" in str(error):
                change = "correct redis.username and redis.password"
            else:
                change = "correct redis.url or redis.tls"
            return [
                problem("redis", str(error), change),
                *shown,
                not_checked("redis and the run in it", "Redis could not be asked"),
            ]
        how = " over TLS" if urlsplit(redis.url).scheme == "rediss" else ""
        findings = [ok("redis", f"{self._client.address} answers user {self._user!r}{how}"), *shown]
        for about, check in (
            ("redis latency", self._latency),
            ("clock", self._clock),
            ("redis server", self._server),
            ("redis databases", self._databases),
            (f"rights of {self._user}", self._rights),
            ("rights of the others", self._users),
            ("run", self._agreement),
            ("tasks", self._tasks),
            ("services", self._services),
            ("redis memory", self._room),
        ):
            findings += await _tried(about, check())
        return findings

    async def _latency(self) -> Iterable[Finding]:
        seconds = []
        for _ in range(_ROUND_TRIPS):
            begun = time.perf_counter()
            await self._client.call("PING")
            seconds.append(time.perf_counter() - begun)
        return [server.latency(seconds, self._settings.redis.timeout_s)]

    async def _clock(self) -> Iterable[Finding]:
        asked = []
        for _ in range(_ROUND_TRIPS):
            before = self._now()
            asked.append((before, await self._client.time(), self._now()))
        return [server.clock(asked)]

    async def _server(self) -> Iterable[Finding]:
        redis, budget = self._settings.redis, self._settings.scheduler.memory_budget
        info = server.parsed(await self._client.call("INFO"))
        part = list(server.part(info, cluster=redis.cluster, sentinel=redis.sentinel is not None))
        if "maxmemory" not in info:  # a sentinel holds no data and doesn't report memory
            return [server.version(info), *part]
        self._info = info
        try:
            found = await self._client.call("CONFIG", "GET", "save")
        except BrokerError as error:
            if rights.refusal(error) is None:
                raise
            found = []
        save = found[1].decode() if found else None  # denied by some managed services
        return [
            server.version(info),
            *part,
            *server.persistence(info, save),
            server.limit(info, budget=budget),
        ]

    async def _databases(self) -> Iterable[Finding]:
        """Find keys outside the run's database, where no clean-up looks."""
        return [
            warning(
                "redis databases",
                f"{in_words(database, keys)}, which take memory, and nobody cleans up there",
                f"find their owner: redis-cli -n {database} --scan",
            )
            for database, keys in (await elsewhere(self._client)).items()
        ]

    async def _rights(self) -> Iterable[Finding]:
        what, asked = rights.rights_of(self._user, self._keys, self._settings.redis)
        return [rights.judged(self._user, what, asked, await rights.allowed(self._client, asked))]

    async def _users(self) -> Iterable[Finding]:
        """Check the roles' users, for which a service's own user lacks the right."""
        findings: list[Finding] = []
        if self._user in ROLES and self._user != "operator":
            return findings
        for role in ROLES:
            if role == self._user or await self._client.call("ACL", "GETUSER", role) is None:
                continue
            asked = rights.required(role, self._keys, self._settings.redis)
            said = await self._client.pipeline(
                [("ACL", "DRYRUN", role, *one.command) for one in asked]
            )
            may = [reply == b"OK" for reply in said]
            findings.append(rights.judged(role, f"fedstream {role}", asked, may))
        return findings

    async def _agreement(self) -> Iterable[Finding]:
        try:
            self.run = await self._ledger.run()
        except NoRun:
            self.asked = True
            return [ok("run", f"{self._keys.name!r} is not in Redis yet: the updater creates it")]
        self.asked = True
        settings = self._settings
        if not self._configured:
            made = f"made by strategy {self.run.strategy!r} with task {self.run.task!r}"
            return [
                ok("run", f"is {self.run.state}; {made}"),
                not_checked("configuration beside the run's", _NEEDS_CONFIG),
            ]
        return run.agreement(
            self.run,
            strategy=settings.strategy.name,
            task=settings.task.name,
            versions=settings.run.versions,
            layout=self._loaded.layout,
            devices=self._loaded.devices,
        )

    async def _tasks(self) -> Iterable[Finding]:
        """Count open tasks, the queue and dead letters."""
        if self.run is None:
            return []
        self._view = view = await self._ledger.tally()
        findings = [
            ok(
                "tasks",
                f"version {view.head.version}; {view.tasks} open, {view.backlog} in the queue, "
                f"{view.kept} versions kept",
            )
        ]
        if view.dead:
            findings.append(
                warning("dead letters", f"{view.dead}", "inspect them: fedstream dead list")
            )
        return findings

    async def _services(self) -> Iterable[Finding]:
        """Find missing services, and leader leases that never expire."""
        findings = []
        for role in _LEADERS:
            key = self._keys.leader(role)
            if await self._client.call("PTTL", key) == -1:  # no expiry; -2: no such key
                findings.append(
                    problem(
                        "services",
                        f"the lease of the {role} never expires",
                        f"if none is running, delete it: UNLINK {key}",
                    )
                )
        if self.run is None or self.run.state == "finished":
            return findings
        there = await serving(self._client, self._keys)
        register = await self._ledger.trainers()
        missing = [role for role in _LEADERS if role not in there]
        if not set(there) - set(_LEADERS) - set(register):
            missing.append("coordinator")
        if not set(there) & set(register):
            missing.append("trainer")
        if missing:
            text = f"the run is not finished but has no {', no '.join(missing)}"
            unseen = " (Redis before 7.2 hides a coordinator without work)"
            change = "start what is missing" + unseen * ("coordinator" in missing)
            findings.append(warning("services", text, change))
        else:
            findings.append(ok("services", ", ".join(there)))
        return findings

    async def _room(self) -> Iterable[Finding]:
        layout = self.run.layout if self.run is not None else self._loaded.layout
        if self._info is None:
            return [not_checked("redis memory", "needs INFO")]
        if layout is None or not self._configured:
            why = "needs a run, or a task that loads" if self._configured else _NEEDS_CONFIG
            return [
                server.room(self._info, None, budget=None),
                not_checked("redis memory for the run", why),
            ]
        view, keep = self._view, self._settings.updater
        devices = self.run.devices if self.run is not None else self._loaded.devices
        wants = server.need(
            self._settings.policy,
            layout,
            devices=devices or DEVICES,
            workers=view.workers if view is not None else 0,
            queue=view.queue if view is not None else 0,
            keep=(keep.keep_versions, keep.keep_bytes),
        )
        return [server.room(self._info, wants, budget=self._settings.scheduler.memory_budget)]


async def _tried(about: str, check: Awaitable[Iterable[Finding]]) -> list[Finding]:
    """Run a check; report a denied check as not checked."""
    try:
        return list(await check)
    except BrokerError as error:
        refused = rights.refusal(error)
        return [problem(about, str(error)) if refused is None else not_checked(about, refused)]


def summary(findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings as plain values, for JSON."""
    levels = [finding.level for finding in findings]
    return {
        "problems": levels.count("problem"),
        "warnings": levels.count("warning"),
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding]) -> None:
    """Print a line for each finding."""
    width = max(len(finding.about) for finding in findings)
    here = console()
    for finding in findings:
        level = cell(f"{finding.level:<11}", style=_COLORS[finding.level])
        text = cell(f"  {finding.about:<{width}}  {finding}")
        here.print(Text.assemble(level, text), soft_wrap=True)


def exit_code(findings: Sequence[Finding]) -> int:
    """Exit code: 1 if there are problems, otherwise 0."""
    return int(any(finding.level == "problem" for finding in findings))
