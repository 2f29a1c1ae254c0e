"""The manifests' reload.sh: Redis takes up renewed passwords and certificates while it runs."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedstream.operate import acl
from tests.broker.certificates import authority, signed
from tests.broker.guarded import PASSWORDS, RUN
from tests.broker.servers import Redis, redis, redis_7, said
from tests.k8s.policy.targets import K8S

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="the users' rights need Redis 7"),
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="the script needs redis-cli"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys"),
]


ROLES = [name.removeprefix("FEDSTREAM_PASSWORD_").lower() for name in PASSWORDS]
SITE = "nor.th"  # its user's name would be a pattern that others match


class Pod:
    """The folders of the manifest's Redis, and its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
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
        signed(self.root, "server", name, "127.0.0.1")
        for ours, theirs in {
            "server.crt": "tls.crt", "server.key": "tls.key", f"{name}.crt": "ca.crt",
        }.items():  # fmt: skip
            shutil.copy(self.root / ours, self.tls / theirs)

    def made(self) -> str:
        """The users, as `fedstream acl` makes them of the passwords there are."""
        return acl.file_of(RUN, {}, [SITE, "norxth"], folder=self.passwords, reload="of-reload")

    def server(self) -> AbstractContextManager[Redis]:
        return redis(
            self.root / "server", "--tls-cert-file", str(self.tls / "tls.crt"),
            "--tls-key-file", str(self.tls / "tls.key"), "--tls-auth-clients", "no",
            "--tls-ca-cert-file", str(self.tls / "ca.crt"), "--aclfile", str(self.users), tls=True,
        )  # fmt: skip

    def reload(self, server: Redis) -> subprocess.CompletedProcess[str]:
        """As the kubelet runs it."""
        text = (K8S / "base" / "reload.sh").read_text().replace(" -h ", f" -p {server.port} -h ")
        for there, here in self.folders.items():
            text = text.replace(there, f"{here}/" if there.endswith("/") else str(here))
        return subprocess.run(
            ["sh", "-c", text], check=False, capture_output=True, text=True, timeout=60,
            env={**os.environ, "POD_IP": "127.0.0.1"},
        )  # fmt: skip

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
        assert pod.reload(server).returncode == 0
        assert pod.reload(server).stdout == "", "nothing is new"
        pod.set("roles/trainer", "new\r\nof-trainer\n")
        pod.set(f"site/trainer-{SITE}", "new of site\nof-site")
        pod.set("roles/watch", "a Sentinel's: no user of Redis")
        done = pod.reload(server)
        assert (done.returncode, done.stderr) == (0, "")
        assert "passwords loaded" in done.stdout
        assert pod.users.read_text() == pod.made()
        for password in ("new", "of-trainer"):
            assert pod.greeted(server, "trainer", password) == b"+OK\r\n"
        assert pod.greeted(server, f"trainer-{SITE}", "new of site") == b"+OK\r\n"
        assert pod.greeted(server, "trainer-norxth", "of-another") == b"+OK\r\n"
        pod.set("roles/trainer", "new")
        pod.certify("second")
        assert pod.reload(server).returncode == 0
        assert pod.greeted(server, "trainer", "of-trainer", "second").startswith(b"-WRONGPASS")
        assert pod.greeted(server, "trainer", "new", "second") == b"+OK\r\n"
        assert pod.greeted(server, "updater", "of-updater", "second") == b"+OK\r\n"
        assert pod.users.stat().st_mode & 0o777 == 0o640


def test_what_redis_refuses_is_told_and_tried_again(pod: Pod) -> None:
    with pod.server() as server:
        pod.set("roles/trainer", "new")
        users = pod.users.read_text()
        pod.users.write_text(users + "user broken on +nonsense\n")
        done = pod.reload(server)
        assert (done.returncode, done.stdout) == (1, "")
        assert "acl load: ERR" in done.stderr
        assert pod.greeted(server, "trainer", "of-trainer") == b"+OK\r\n"
        pod.users.write_text(users)
        (pod.tls / "tls.key").write_text("no key")
        done = pod.reload(server)
        assert (done.returncode, done.stdout) == (1, "reload.sh: passwords loaded\n")
        assert "config set: ERR" in done.stderr
        assert pod.greeted(server, "trainer", "new") == b"+OK\r\n"
        pod.certify("second")
        assert pod.reload(server).returncode == 0
        assert pod.greeted(server, "trainer", "new", "second") == b"+OK\r\n"
