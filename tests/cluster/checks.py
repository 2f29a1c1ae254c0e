"""The run in a cluster as its operator sees it, and what must hold of it at its end."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.settings import RedisSettings
from fedstream.journal import segments
from fedstream.journal.inspection import recorded_versions
from tests.chaos.account import USED
from tests.chaos.checks import Facts, complaints
from tests.chaos.history import gathered
from tests.cluster.cluster import Cluster, Failed, until

NAME = "demo"
_AT_REST = ("open", "queue", "inbox", "admitted")
JOURNAL = "updater-0:/var/lib/fedstream/journal"


@dataclass(frozen=True)
class Outcome:
    """A run that is over or at rest. ``wrong``: what does not hold of it."""

    tasks: Mapping[str, int]
    versions: tuple[tuple[int, float], ...] = ()  # numbers and times (s since 1970), as journalled
    restarts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    replayed: str = ""  # what `fedstream replay` says
    used: Mapping[str, int] = field(default_factory=dict)  # updates, by the trainers that made them

    def pause(self, since: float = 0.0, to: float = float("inf")) -> float:
        """The longest time in seconds without a version that overlaps a span of time."""
        times = [at for _, at in self.versions]
        return max((b - a for a, b in pairwise(times) if b >= since and a <= to), default=0.0)

    def rate(self, since: float, to: float) -> float:
        """Versions per second in a span of time."""
        return sum(since <= at < to for _, at in self.versions) / (to - since)


class Run:
    """The run ``demo``. A context manager, which keeps a connection to the coordinators.

    ``redis``: which cluster's namespace and Service has Redis, if not this one.
    """

    def __init__(self, cluster: Cluster, folder: Path, redis: Cluster | None = None) -> None:
        self.cluster = cluster
        self._folder = folder
        self._redis = redis or cluster
        self._opened = ExitStack()
        self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    # while it goes on

    def get(self, path: str = "", within_s: float = 120) -> dict[str, Any]:
        """What the coordinators say of the run. Raises Failed if they don't for too long."""
        found: dict[str, Any] = until(lambda: self._get(path), "coordinators answer", within_s)
        return found

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            if not self._url:
                port = self._opened.enter_context(self.cluster.forward("service/coordinator", 80))
                self._url = f"http://127.0.0.1:{port}/v1/runs/{NAME}"
                self._token = self._said_token()
            request = urllib.request.Request(self._url + path, headers=self._token)  # noqa: S310
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, Failed, ValueError):  # the pod that it leads to is gone, or Redis is
            self._opened.close()
            self._url = ""
            return None

    def _said_token(self) -> dict[str, str]:
        names = [one["metadata"]["name"] for one in self.cluster.objects("secret")]
        if "fedstream-http" not in names:
            return {}
        newest, *_ = self.cluster.secret("fedstream-http", "token").split("\n")
        return {"Authorization": f"Bearer {newest}"}

    def version(self) -> int:
        """The newest."""
        return int(self.get()["version"])

    def more(self, versions: int, within_s: float = 300) -> None:
        """Waits for so many versions more than there are. Raises Failed."""
        last = self.version() + versions
        until(
            lambda: self.version() >= last, f"version {last} in {self.cluster.namespace}", within_s
        )

    def rest(self) -> dict[str, Any]:
        """Stops the scheduler and waits until all tasks have ended: what the coordinators say."""
        self.cluster.scale("deployment/scheduler", 0)
        about: dict[str, Any] = {}

        def at_rest() -> bool:
            nonlocal about
            about = self.get()
            return not any(about["tasks"].get(name, about.get(name, 0)) for name in _AT_REST)

        until(at_rest, "open tasks end")
        return about

    # at its end

    def finish(self, may_restart: str = "^$") -> Outcome:
        """Brings the run to rest and checks it. ``may_restart``: containers, as a pattern.

        Others may end only as the kubelet asks them to, when a slow machine misses a probe.
        """
        about = self.rest()
        journal = self.copied_journal()
        facts = asyncio.run(self._gathered(journal))
        restarts = self.cluster.restarts()
        wrong = [*complaints(facts), *_disagreements(about, facts)]
        wrong += [
            f"{name} ended {times} times: {how}"
            for name, (times, how) in restarts.items()
            if "code 0" not in how and not re.search(may_restart, name)
        ]
        replayed = subprocess.run(
            [sys.executable, "-m", "fedstream", "replay", str(journal)],
            capture_output=True,
            text=True,
            check=False,
        )
        said = (replayed.stdout.splitlines() or [""])[0]
        if replayed.returncode or not re.match(r"(\d+) of \1 versions identical", said):
            wrong.append(f"fedstream replay: {said} {replayed.stderr.strip()[-500:]}")
        used = Counter(
            record["upload"].get("site") or record["upload"]["trainer"]
            for record in facts.account.taken
            if record["outcome"] in USED
        )
        return Outcome(about["tasks"], recorded(journal), restarts, tuple(wrong), said, used)

    def copied_journal(self) -> Path:
        """The journal, copied out of the updater's pod as the docs say."""
        folder = self._folder / f"journal-{time.monotonic_ns()}"
        self.cluster.kubectl("cp", JOURNAL, str(folder), "--retries=3")
        return folder

    async def _gathered(self, journal: Path) -> Facts:
        with self.redis() as settings:
            client = Client(settings, "cluster-test")
            try:
                return await gathered(client, Keys(NAME), journal, findings=())
            finally:
                await client.close()

    @contextmanager
    def redis(self) -> Iterator[RedisSettings]:
        """Redis, or of three the master, as the user ``operator`` reaches it."""
        services = [one["metadata"]["name"] for one in self._redis.objects("service")]
        target = "service/redis" if "redis" in services else f"pod/{self.master()}"
        [keys] = (
            one["data"]
            for one in self.cluster.objects("configmap")
            if one["metadata"]["name"] in self._settings()
        )
        settings: dict[str, Any] = {
            "username": "operator",
            "password": self.cluster.secret("fedstream-redis", "operator"),
        }
        scheme = "redis"
        if keys.get("FEDSTREAM_REDIS__URL", "").startswith("rediss"):
            ca = self._folder / "redis-ca.crt"
            ca.write_text(self._redis.secret("fedstream-redis-tls", "ca.crt"))
            settings["tls"], scheme = {"ca": str(ca)}, "rediss"
        with self._redis.forward(target, 6379) as port:
            url = f"{scheme}://localhost:{port}/0"
            yield RedisSettings.model_validate({**settings, "url": url})

    def _settings(self) -> set[str]:
        """The ConfigMaps that the updater has its environment from."""
        [one] = self.cluster.objects("statefulset", "app.kubernetes.io/component=updater")
        [container] = one["spec"]["template"]["spec"]["containers"]
        sources = [each["configMapRef"]["name"] for each in container["envFrom"]]
        return {name for name in sources if name.startswith("fedstream-settings")}

    def master(self) -> str:
        """The pod of the master by the Sentinels' word. Raises Failed."""
        command = (
            'tls=; [ ! -f /etc/redis/tls.inc ] || tls="--tls --cacert /etc/redis-tls/ca.crt"; '
            "REDISCLI_AUTH=$(head -n 1 /etc/redis-passwords/replication/watch) "
            'redis-cli -h "$POD_IP" -p 26379 $tls --user watch '
            "--no-auth-warning sentinel get-master-addr-by-name fedstream"
        )
        said = self.cluster.kubectl("exec", "sentinel-0", "--", "sh", "-c", command)
        return said.split(".")[0]


def recorded(journal: Path) -> tuple[tuple[int, float], ...]:
    """A journal's versions and when each was made."""
    with ExitStack() as opened:
        chain = [opened.enter_context(segment) for segment in segments(journal)]
        return tuple((one.version, one.time) for one in recorded_versions(chain))


def _disagreements(about: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    """Where the coordinators and the journal differ."""
    tasks, taken = about["tasks"], facts.account.taken
    ended = sum(n for name, n in tasks.items() if name != "issued")
    if tasks["issued"] != ended:
        yield f"{tasks['issued']} tasks issued, but {ended} have an outcome: {tasks}"
    applied = sum(record["outcome"] == "applied" for record in taken)
    if min(facts.account.made, default=0) == 0 and tasks["applied"] != applied:
        yield f"{tasks['applied']} tasks applied, but {applied} in the journal"
    if about["digest"] != facts.account.model:
        yield f"the newest digest is {about['digest']}, in the journal {facts.account.model}"
