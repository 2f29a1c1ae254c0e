"""Whatever rotates is taken up by a run under load: nobody restarts, and no task is lost."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme

from tests.broker.servers import Redis, redis, redis_7, said
from tests.integration.command import BLOBS, TEST_GUARD_S, Command, adds_up, wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(TEST_GUARD_S),
    pytest.mark.skipif(redis_7() is None, reason="the users' rights need Redis 7"),
]
_MORE = 5  # versions after each change


class Rotation:
    """Redis with TLS and a user, a run of devices over HTTPS that uses it, and all their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authorities = [trustme.CA(), trustme.CA()]
        self.trust = ssl.create_default_context()
        for one in self.authorities:
            one.configure_trust(self.trust)
        self.pair, self.ca, self.password = (
            folder / name for name in ("redis.pem", "ca.pem", "password")
        )
        self.trusts(self.ca, 0)
        self.certify(self.pair, 0)
        self.password.write_text("old")

    def certify(self, file: Path, authority: int) -> None:
        """Write another certificate and its key, of an authority."""
        issued = self.authorities[authority].issue_cert("127.0.0.1")
        _replace(file, issued.private_key_and_cert_chain_pem.bytes())

    def trusts(self, file: Path, *authorities: int) -> None:
        _replace(file, b"".join(self.authorities[n].cert_pem.bytes() for n in authorities))

    def serve(self) -> Iterator[Redis]:
        with redis(
            self.folder / "redis",
            "--tls-auth-clients",
            "no",
            "--tls-cert-file",
            str(self.pair),
            "--tls-key-file",
            str(self.pair),
            "--tls-ca-cert-file",
            str(self.ca),
            tls=True,
        ) as self.redis:
            self.accepts("old")
            yield self.redis

    def tells(self, *command: str) -> None:
        assert said(self.redis.port, *command, tls=self.trust).startswith((b"+OK", b":"))

    def accepts(self, *passwords: str) -> None:
        """Redis accepts these from now on, and everybody has to log in again."""
        words = ("resetpass", "on", "~*", "&*", "+@all", *(f">{one}" for one in passwords))
        self.tells("ACL", "SETUSER", "all", *words)
        self.reconnect()

    def reload(self, authority: int) -> None:
        """Redis has another certificate from now on, for which everybody has to connect again."""
        self.certify(self.pair, authority)
        files = [word for key in ("cert", "key") for word in (f"tls-{key}-file", str(self.pair))]
        self.tells("CONFIG", "SET", *files)
        self.reconnect()

    def reconnect(self) -> None:
        self.tells("CLIENT", "KILL", "USER", "all")


def _replace(file: Path, content: bytes) -> None:
    """At once, as the kubelet does."""
    part = file.with_suffix(".part")
    part.write_bytes(content)
    part.replace(file)


@pytest.fixture
def rotation(tmp_path: Path) -> Iterator[Rotation]:
    made = Rotation(tmp_path)
    for _ in made.serve():
        yield made


def test_certificates_and_passwords_rotate_under_load(
    rotation: Rotation, tmp_path: Path, quick_programs: Path
) -> None:
    (tmp_path / "blobs.py").write_text(BLOBS)
    sets = (
        "redis.username=all",
        f"redis.password_file={rotation.password}",
        f"redis.tls.ca={rotation.ca}",
        "devices.latency={kind='fixed', mean_s=0.2}",
    )
    command = Command(
        tmp_path,
        "--task blobs.py:task --versions 1000000 --devices-over-http 2",
        f"--redis rediss://127.0.0.1:{rotation.redis.port}/0",
        sets=sets,
        programs=quick_programs,
    )
    try:
        command.reaches(_MORE)
        before = lives(command)
        gateway, devices_ca = (command.out / "devices" / name for name in ("gateway.pem", "ca.pem"))
        devices_trusted = devices_ca.read_bytes()
        second = rotation.authorities[1].cert_pem.bytes()
        for changes in (
            (lambda: rotation.reload(0),),
            (lambda: rotation.trusts(rotation.ca, 0, 1), lambda: rotation.reload(1)),
            (lambda: rotation.trusts(rotation.ca, 1), rotation.reconnect),
            (lambda: rotation.password.write_text("new\nold"), rotation.reconnect),
            (lambda: rotation.accepts("new", "old"),),
            (lambda: rotation.accepts("new"),),
            (lambda: rotation.password.write_text("new"), rotation.reconnect),
            (lambda: _replace(devices_ca, devices_trusted + second),),
            (lambda: rotation.certify(gateway, 1), lambda: shows(command, rotation)),
            (lambda: rotation.trusts(devices_ca, 1),),
        ):
            for change in changes:
                change()
            command.reaches(command.version() + _MORE)
        assert lives(command) == before
        command.interrupt()
        command.ended()
    finally:
        command.clean_up()
    summary = command.summary
    assert adds_up(summary)
    assert summary["restarts"] == dict.fromkeys(summary["restarts"], 0)
    assert "lost with Redis" not in summary["given_up"]
    for log in (command.out / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.name
    done = subprocess.run(
        [quick_programs / "fedstream", "replay", command.out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{summary['versions']} of {summary['versions']} versions identical" in done.stdout


def lives(command: Command) -> dict[int, float]:
    """The run's processes, and when each began."""
    found = {}
    for one in command.children():
        try:
            found[one.pid] = one.create_time()
        except psutil.NoSuchProcess:
            continue
    return found


def shows(command: Command, rotation: Rotation) -> None:
    """Wait until the gateway shows a certificate of the second authority."""
    lines = (command.out / "logs" / "gateway.log").read_text().splitlines()
    [line] = [one for one in map(json.loads, lines) if one["event"] == "serving"]
    trust = ssl.create_default_context()
    rotation.authorities[1].configure_trust(trust)

    def is_shown() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", line["port"]), timeout=5) as plain:
                trust.wrap_socket(plain, server_hostname="127.0.0.1").close()
        except ssl.SSLError:
            return False
        return True

    wait_until(is_shown, "the gateway's new certificate")
