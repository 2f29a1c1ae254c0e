"""Every secret and certificate is replaced under load, as the docs say: nobody restarts."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cluster.checks import NAME, Run
from tests.cluster.cluster import Failed, until
from tests.cluster.stage import KUBERNETES, OPERATE, Stage, scenario

_MORE = 5  # versions after each change
_SEEN_S = 600.0  # the kubelet changes files within 90 s on an idle machine
_USERS = "coordinator scheduler updater evaluator trainer operator"  # as the docs' commands have it
# A service's file with its password for Redis, what a Sentinel logs in with, and what Redis shows.
_OWN = "cat /etc/fedstream/redis-login/password"
_ASKS_WITH = (
    """sed -n 's/^sentinel auth-pass fedstream "*\\([^"]*\\).*/\\1/p' /run/redis/sentinel.conf"""
)
_SHOWN = "python3 -c \"import ssl; print(ssl.get_server_certificate(('{host}', {port})))\""


class Rotation:
    """A deployment whose Secrets are replaced."""

    def __init__(self, stage: Stage, run: Run, sentinels: bool) -> None:
        self._stage, self._run, self._cluster = stage, run, stage.cluster
        self._redis = [f"redis-{n}" for n in range(3 if sentinels else 1)]
        self._sentinels = [f"sentinel-{n}" for n in range(3 if sentinels else 0)]
        self._servers = [("redis", 6379)]  # those that show a certificate
        if sentinels:
            self._servers = [(f"{pod}.redis-nodes", 6379) for pod in self._redis]
            self._servers += [(f"{pod}.sentinels", 26379) for pod in self._sentinels]
        # What was replaced, from when to when, and after how many seconds all had taken it up.
        self.moments: list[tuple[str, float, float, float]] = []

    def sees(self, what: str, change: Callable[[], object], taken_up: Callable[[], bool]) -> None:
        """Change something, and wait until all have taken it up and the run has gone on."""
        at = time.time()
        change()
        until(taken_up, f"{what} is taken up", _SEEN_S)
        seen = time.time()
        self._run.more(_MORE)
        self.moments.append((what, at, time.time(), seen - at))

    def in_pod(self, pod: str, script: str) -> str:
        """What a script prints in a pod; '' if it fails."""
        try:
            return self._cluster.kubectl("exec", pod, "--", "sh", "-c", script).strip()
        except Failed:
            return ""

    def types(self, begins: str, secret: str, *keys: str) -> None:
        """Type the docs' command that replaces passwords, for this Secret and these keys."""
        docs = self._stage.docs
        [text] = [text for _, text in docs.commands(OPERATE) if begins in text and _USERS in text]
        docs.typed.add(f"{OPERATE}: {text}")
        text = docs.here(text).replace(_USERS, " ".join(keys)).replace("fedstream-redis", secret)
        code, said = docs.shell.run(text)
        if code:
            raise Failed(f"{OPERATE}: {text}: exit code {code}: {said[-500:]}")

    def passwords(self, secret: str, logins: dict[str, tuple[str, str]]) -> None:
        """Replace those of a Secret. ``logins``: for each key its user, and a pod of that user."""

        def replies(which: int) -> set[bool]:
            """Whether each Redis accepts each user's first password, or its second or old one."""
            found = set()
            for key, (user, _) in logins.items():
                password = (*self._lines(secret, key), old[key])[which]
                login = f"--user {user} --pass {password} --no-auth-warning"
                script = f'redis-cli -h "$POD_IP" --tls --insecure {login} ping'
                said = [self.in_pod(pod, script) for pod in self._redis]
                found |= {not one.startswith("NOAUTH") for one in said if one} | (
                    set() if all(said) else {True, False}
                )
            return found

        def are_seen() -> bool:
            own = all(
                self.in_pod(pod, _OWN).split("\n") == self._lines(secret, key)
                for key, (_, pod) in logins.items()
                if pod
            )
            return own and all(
                self.in_pod(one, _ASKS_WITH) == self._lines(secret, "sentinel")[0]
                for one in self._sentinels
                if "sentinel" in logins
            )

        old = {key: self._lines(secret, key)[0] for key in logins}
        self.sees(
            f"`{secret}`: a new password",
            lambda: self.types("$old", secret, *logins),
            lambda: replies(0) == replies(1) == {True} and are_seen(),
        )
        self.sees(
            f"`{secret}`: without the old",
            lambda: self.types("$new", secret, *logins),
            lambda: replies(0) == {True} and replies(1) == {False} and are_seen(),
        )

    def _lines(self, secret: str, key: str) -> list[str]:
        return self._cluster.secret(secret, key).split("\n")

    def token(self) -> None:
        """Replace the coordinators'."""

        def accepts(token: str) -> bool:
            asks = f"fedstream status --url http://127.0.0.1:8080 --run {NAME}"
            return bool(
                self.in_pod("deployment/coordinator", f"FEDSTREAM_HTTP__TOKEN={token} {asks}")
            )

        [old] = self._lines("fedstream-http", "token")
        for what, begins in (("a new token", "$old"), ("without the old", "$new")):
            self.sees(
                f"`fedstream-http`: {what}",
                lambda: self.types(begins, "fedstream-http", "token"),  # noqa: B023
                lambda: (
                    accepts(self._lines("fedstream-http", "token")[0])
                    and accepts(old) == (begins == "$old")  # noqa: B023
                ),
            )

    def certificate(self, what: str, *commands: str) -> None:
        """Replace Redis's, by commands before the docs'; wait until all servers show it."""

        def change() -> None:
            for one in commands:
                self._stage.docs.shell.run(one)
            self._stage.docs.type(OPERATE, "kubectl --namespace fedstream create secret generic")

        def is_shown() -> bool:
            wanted = self._cluster.secret("fedstream-redis-tls", "tls.crt").split()
            trusted = self._cluster.secret("fedstream-redis-tls", "ca.crt").strip()
            trusts = "cat /etc/fedstream/redis-ca/ca.crt"
            shown = (
                self.in_pod("deployment/coordinator", _SHOWN.format(host=host, port=port))
                for host, port in self._servers
            )
            return all(one.split() == wanted for one in shown) and all(
                self.in_pod(f"deployment/{one}", trusts) == trusted
                for one in ("coordinator", "scheduler", "trainer")
            )

        self.sees(what, change, is_shown)


def _played(stage: Stage, *components: str, may_restart: str = "^$") -> None:
    with stage.deployed("no-data", "redis-tls", "site", "page", *components) as run:
        rotation = Rotation(stage, run, "redis-sentinel" in components)
        services = {
            user: (user, f"deployment/{user}") for user in _USERS.split() if user != "operator"
        } | {"updater": ("updater", "updater-0"), "operator": ("operator", "")}
        if "redis-sentinel" in components:
            services |= {"replica": ("replica", ""), "sentinel": ("sentinel", "")}
        rotation.passwords("fedstream-redis", services)
        rotation.passwords("fedstream-site-a", {"password": ("trainer-site-a", "site-a-0")})
        rotation.token()
        stage.docs.inline(OPERATE, "kubectl --namespace fedstream exec redis-0")
        shell = stage.docs.shell
        shell.run("cp ca.crt old-ca.crt; cp ca.key old-ca.key")

        sign = ("openssl req -newkey", "openssl x509")
        stage.docs.type(KUBERNETES, *sign)
        rotation.certificate("Redis's certificate")
        shell.run("cp tls.crt old.crt; cp tls.key old.key")
        stage.docs.type(KUBERNETES, "openssl req -x509", *sign)
        shell.run("cp ca.crt new-ca.crt; cp tls.crt new.crt; cp tls.key new.key")
        rotation.certificate(
            "a second authority",
            "cat old-ca.crt new-ca.crt > ca.crt",
            "cp old.crt tls.crt",
            "cp old.key tls.key",
        )
        rotation.certificate("its certificate", "cp new.crt tls.crt", "cp new.key tls.key")
        rotation.certificate("without the first authority", "cp new-ca.crt ca.crt")
        outcome = run.finish(may_restart=may_restart)
    lost = {name: n for name, n in outcome.tasks.items() if name in ("given_up", "dead") and n}
    assert not lost, outcome.tasks
    for what, at, to, seen in rotation.moments:
        stage.add(what, outcome, outcome.pause(at, to), f"taken up after {seen:.0f} s")


@scenario
def rotation(stage: Stage) -> None:
    """Passwords, certificates and authorities of one Redis."""
    _played(stage)


@scenario
def rotation_with_sentinels(stage: Stage) -> None:
    """The same with replicas, and with Sentinels, which restart for their certificates."""
    _played(stage, "redis-sentinel", may_restart="^sentinel-")
