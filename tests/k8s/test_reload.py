"""The manifests' reload.sh: Redis takes up renewed passwords and certificates while it runs."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedstream.operate import acl
from fedstream.runtime.process import death_with_parent
from tests.broker.certificates import authority, signed
from tests.broker.guarded import PASSWORDS, RUN
from tests.broker.servers import Redis, redis, redis_7, said, until
from tests.k8s.conftest import Net
from tests.k8s.manifests import K8S
from tests.k8s.test_backup import with_program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="the users' rights need Redis 7"),
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="the script needs redis-cli"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys"),
]


ROLES = [name.removeprefix("FEDSTREAM_PASSWORD_").lower() for name in PASSWORDS]
SITE = "nor.th"  # its user's name would be a pattern that others match


def redis_cli(options: str, *command: str) -> str:
    """The reply to a command over TLS; '' if nobody answers."""
    words = ["redis-cli", "--tls", "--no-auth-warning", *options.split(), *command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


class Pod:
    """The folders of the manifest's Redis, and its files."""

    def __init__(self, root: Path, *hosts: str) -> None:
        """``hosts``: addresses that the certificates are for, besides 127.0.0.1."""
        self.root = root
        self._hosts = ("127.0.0.1", *hosts)
        self.folders = {
            f"/etc/{name}": root / name for name in ("redis-passwords", "redis-tls", "redis/")
        } | {"/run/redis": root / "run"}
        self.passwords, self.tls, conf, self.run = self.folders.values()
        for folder in (self.passwords / "roles", self.passwords / "site", self.tls, conf, self.run):
            folder.mkdir(parents=True)
        (conf / "tls.inc").touch()
        for name in ("first", "second"):
            authority(root, name)
        for role in ROLES:
            self.set(f"roles/{role}", f"of-{role}")
        self.set(f"site/trainer-{SITE}", "of-site")
        self.set("site/trainer-norxth", "of-another")
        self.certify("first")
        acl.write(self.run / "reload", "of-reload")
        acl.write(self.users, self.made())

    @property
    def users(self) -> Path:
        return self.run / "users.acl"

    def set(self, name: str, password: str) -> None:
        """A password, as its Secret is mounted."""
        (self.passwords / name).write_text(password)

    def certify(self, name: str) -> None:
        """The Secret fedstream-redis-tls, by an authority."""
        signed(self.root, "server", name, *self._hosts)
        for ours, theirs in {
            "server.crt": "tls.crt",
            "server.key": "tls.key",
            f"{name}.crt": "ca.crt",
        }.items():
            shutil.copy(self.root / ours, self.tls / theirs)

    def made(self) -> str:
        """The users, as `fedstream acl` makes them of the passwords there are."""
        return acl.file_of(RUN, {}, [SITE, "norxth"], folder=self.passwords, reload="of-reload")

    def server(self) -> AbstractContextManager[Redis]:
        files = f"--tls-cert-file {self.tls}/tls.crt --tls-key-file {self.tls}/tls.key"
        more = f"--tls-ca-cert-file {self.tls}/ca.crt --tls-auth-clients no"
        options = f"{files} {more} --aclfile {self.users}"
        return redis(self.root / "server", *options.split(), tls=True)

    def here(self, file: Path) -> str:
        """A file of the manifests, with the folders of this machine."""
        text = file.read_text()
        for there, here in self.folders.items():
            text = text.replace(there, f"{here}/" if there.endswith("/") else str(here))
        return text

    def reload(
        self, port: int, host: str = "127.0.0.1", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """As the kubelet runs it."""
        with self.reloading(port, host, **environ) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextmanager
    def reloading(
        self, port: int, host: str = "127.0.0.1", **environ: str
    ) -> Iterator[subprocess.Popen[str]]:
        """The script's process, killed at the end."""
        text = self.here(K8S / "base" / "reload.sh").replace(" -h ", f" -p {port} -h ")
        with subprocess.Popen(
            ["sh", "-c", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "POD_IP": host, **environ},
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def asked(self, server: Redis, *command: str) -> str:
        """The reply to the tests' own user."""
        return redis_cli(f"-p {server.port} --insecure --user reader --pass x", *command)

    def greeted(self, server: Redis, user: str, password: str, by: str = "first") -> bytes:
        """The reply to a login over TLS, of a server whose certificate that authority signed."""
        trust = ssl.create_default_context(cafile=self.root / f"{by}.crt")
        return said(server.port, "AUTH", user, password, tls=trust)


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_renewed_passwords_and_certificates_are_taken_up(pod: Pod) -> None:
    with pod.server() as server:
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        assert pod.reload(server.port).returncode == 0
        assert pod.reload(server.port).stdout == "", "nothing is new"
        pod.set("roles/trainer", "new\r\nof-trainer\n")
        pod.set(f"site/trainer-{SITE}", "new of site\nof-site")
        pod.set("roles/watch", "a Sentinel's: no user of Redis")
        done = pod.reload(server.port)
        assert (done.returncode, done.stderr) == (0, "")
        assert "passwords loaded" in done.stdout
        assert pod.users.read_text() == pod.made()
        for password in ("new", "of-trainer"):
            assert pod.greeted(server, "trainer", password) == b"+OK\r\n"
        assert pod.greeted(server, f"trainer-{SITE}", "new of site") == b"+OK\r\n"
        assert pod.greeted(server, "trainer-norxth", "of-another") == b"+OK\r\n"
        pod.set("roles/trainer", "new")
        pod.certify("second")
        assert pod.reload(server.port).returncode == 0
        assert pod.greeted(server, "trainer", "of-trainer", "second").startswith(b"-WRONGPASS")
        assert pod.greeted(server, "trainer", "new", "second") == b"+OK\r\n"
        assert pod.greeted(server, "updater", "of-updater", "second") == b"+OK\r\n"
        assert pod.users.stat().st_mode & 0o777 == 0o640


def test_what_redis_refuses_is_told_and_tried_again(pod: Pod) -> None:
    with pod.server() as server:
        # Redis listens before it has read its users, and would not start with the broken one.
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        pod.set("roles/trainer", "new")
        users = pod.users.read_text()
        pod.users.write_text(users + "user broken on +nonsense\n")
        done = pod.reload(server.port)
        assert (done.returncode, done.stdout) == (1, "")
        assert "acl load: ERR" in done.stderr
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        pod.users.write_text(users)
        (pod.tls / "tls.key").write_text("no key")
        done = pod.reload(server.port)
        assert (done.returncode, done.stdout) == (1, "reload.sh: passwords loaded\n")
        assert "config set: ERR" in done.stderr
        assert pod.greeted(server, "trainer", "new") == b"+OK\r\n"
        pod.certify("second")
        assert pod.reload(server.port).returncode == 0
        assert pod.greeted(server, "trainer", "new", "second") == b"+OK\r\n"


def test_reload_that_is_killed_before_redis_loads_is_made_up_for(pod: Pod, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    with pod.server() as server:
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        pod.set("roles/trainer", "new")
        path = with_program(tmp_path, "redis-cli", f"touch {reached}; exec sleep 60")
        with pod.reloading(server.port, PATH=path) as killed:
            until(reached.exists, "the file of users is written")
            killed.kill()
        assert pod.users.read_text() == pod.made(), "Redis reads this if it restarts"
        assert pod.greeted(server, "trainer", "new").startswith(b"-WRONGPASS")
        assert pod.reload(server.port).returncode == 0
        assert pod.greeted(server, "trainer", "new") == b"+OK\r\n"


def test_passwords_taken_back_after_a_failed_reload_are_in_the_file_again(
    pod: Pod, tmp_path: Path
) -> None:
    """Redis would read the file if it restarted."""
    with pod.server() as server:
        assert pod.reload(server.port).returncode == 0
        before = pod.users.read_text()
        pod.set("roles/trainer", "new")
        path = with_program(tmp_path, "redis-cli", "exit 1")
        assert pod.reload(server.port, PATH=path).returncode == 1
        pod.set("roles/trainer", "of-trainer")
        assert pod.reload(server.port).returncode == 0
        assert pod.users.read_text() == before
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"


def test_two_reloads_do_not_run_at_once(pod: Pod) -> None:
    """The one that read older passwords would write them over the newer."""
    with pod.server() as server, (pod.run / "reload.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pod.set("roles/trainer", "new")
        before = pod.users.read_text()
        done = pod.reload(server.port)
        assert (done.returncode, done.stderr) == (1, "reload.sh: another one is running\n")
        assert pod.users.read_text() == before


def test_passwords_are_in_no_programs_arguments(pod: Pod, tmp_path: Path) -> None:
    """Other users of the machine may read those in /proc. Nor are their hashes."""
    arguments = tmp_path / "arguments"
    for name in ("redis-cli", "sed"):
        path = with_program(
            tmp_path, name, f'echo "$@" >>{arguments}; exec {shutil.which(name)} "$@"'
        )
    acl.write(pod.users, pod.made() + "user reader on nopass +config|get\n")
    with pod.server() as server:
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        pod.set("roles/trainer", "new")
        pod.set("roles/replica", 'new of "replica"\nof-replica\n')
        assert pod.reload(server.port, PATH=path).returncode == 0
        assert pod.asked(server, "config", "get", "masterauth").endswith('\nnew of "replica"')
    said = arguments.read_text()
    assert "acl load" in said
    assert not re.search("new|of-|[0-9a-f]{64}", said.replace(str(tmp_path), ""))


def begun(stack: ExitStack, *words: str, **about: Any) -> subprocess.Popen[bytes]:
    """A process that ends with the stack."""
    process = stack.enter_context(
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            **about,
        )
    )
    stack.callback(process.kill)
    return process


class Sentinel:
    """A Sentinel as the manifests' start.sh starts it, beside a Redis, each at its own address."""

    def __init__(self, stack: ExitStack, pod: Pod, redis: str, *hosts: str) -> None:
        """``hosts``: the Sentinels' addresses, its own first."""
        host, *_ = hosts
        self._stack, self.host, self.run = stack, host, pod.root / host
        self.run.mkdir()
        pod.folders["/run/redis"] = self.run
        self._script = pod.here(K8S / "components" / "redis-sentinel" / "start.sh")
        self._environment = {
            **os.environ,
            "POD_IP": host,
            "ADDRESS": host,
            "NODES": redis,
            "SENTINELS": " ".join(hosts),
        }
        self.start()

    def start(self) -> None:
        words = ("sh", "-c", self._script, "sh", "sentinel")
        self.process = begun(self._stack, *words, env=self._environment)

    def reload(self, *, says: str = "", **environ: str) -> None:
        """As the kubelet runs it. ``says``: why it fails."""
        done = subprocess.run(
            ["sh", "-c", self._script, "sh", "reload"],
            env=self._environment | environ,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == ((1, f"start.sh: {says}\n") if says else (0, ""))

    def asked(self, user: str, password: str, *command: str, ca: Path | None = None) -> str:
        """The reply to a command; '' if it does not answer. ``ca``: who must have signed."""
        trust = f"--cacert {ca}" if ca else "--insecure"
        login = ("--user", user, "--pass", password)
        return redis_cli(f"-h {self.host} -p 26379 {trust}", *login, *command)

    def sees_master(self, password: str) -> bool:
        """Whether the master is not down to it."""
        lines = self.asked("sentinel", password, "sentinel", "master", "fedstream").split("\n")
        return "flags" in lines and lines[lines.index("flags") + 1] == "master"

    @property
    def asks_with(self) -> set[str]:
        """The passwords with which it asks Redis and the other Sentinels."""
        conf = (self.run / "sentinel.conf").read_text()
        return set(
            re.findall(
                r'^sentinel (?:auth-pass fedstream|sentinel-pass) "?(\w+)', conf, re.MULTILINE
            )
        )


@pytest.mark.skipif(sys.platform != "linux", reason="addresses in 127.0.0.0/8 are Linux's alone")
def test_sentinels_take_up_passwords_at_once_and_certificates_in_turn(
    tmp_path: Path, net: Net
) -> None:
    redis_host, *hosts = map(net, ("redis", "first", "second"))
    pod = Pod(tmp_path, redis_host, *hosts)
    (pod.passwords / "replication").mkdir()
    for user in ("sentinel", "watch"):
        pod.set(f"replication/{user}", "old")
    inc = tmp_path / "redis" / "tls.inc"
    inc.write_text(pod.here(K8S / "components" / "redis-tls" / "tls.inc"))
    acl.write(pod.users, pod.made())
    conf = ("--bind", redis_host, "--aclfile", str(pod.users), "--dir", str(tmp_path), "--save", "")
    with ExitStack() as stack:
        begun(stack, "redis-server", str(inc), *conf)
        reload = partial(pod.reload, 6379, redis_host)
        first = Sentinel(stack, pod, redis_host, *hosts)
        second = Sentinel(stack, pod, redis_host, *reversed(hosts))
        for one in (first, second):
            until(partial(one.sees_master, "old"), "it knows the master")
        pod.set("replication/sentinel", "new\nold")
        pod.set("replication/watch", "seen\nold")
        arguments, cli = tmp_path / "arguments", shutil.which("redis-cli")
        logged = f'echo "$@" >>{arguments}; exec {cli} "$@"'
        first.reload(PATH=with_program(tmp_path, "redis-cli", logged))
        said = arguments.read_text().replace(str(tmp_path), "")
        assert not re.search(r"\b(new|old|seen)\b|[0-9a-f]{64}", said), "others see them in /proc"
        assert first.asked("watch", "seen", "ping") == first.asked("watch", "old", "ping") == "PONG"
        pod.set("replication/watch", "taken back")
        failing = f'case "$*" in *auth-pass*) exit 1 ;; esac; exec {cli} "$@"'
        path = with_program(tmp_path, "redis-cli", failing)
        first.reload(says="sentinel set: no answer", PATH=path)
        pod.set("replication/watch", "seen\nold")
        first.reload()
        assert first.asked("watch", "seen", "ping") == "PONG"
        with (first.run / "reload.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            first.reload(says="another reload is running")
        second.reload()
        assert first.asks_with == second.asks_with == {"old"}, "Redis does not know the new one"
        pod.folders["/run/redis"] = pod.run
        assert reload().returncode == 0
        for one in (first, second):
            one.reload()
            assert one.asks_with == {"new"}
        pod.set("replication/sentinel", "new")
        assert reload().returncode == 0
        for one in (first, second):
            one.reload()
            assert one.asked("sentinel", "old", "ping").startswith("NOAUTH")
            until(partial(one.sees_master, "new"), "it goes on to see the master")
        pod.certify("second")
        shutil.copy(tmp_path / "second.crt", pod.tls / "ca.crt")
        first.reload()
        assert first.process.poll() is None, "it is not its turn"
        os.utime(pod.tls / "tls.crt", (0, 0))
        first.reload()
        assert first.process.wait(60) == 0
        assert reload().returncode == 0
        first.start()
        until(
            lambda: first.asked("health", "x", "ping", ca=tmp_path / "second.crt") == "PONG",
            "it shows the new certificate",
        )
