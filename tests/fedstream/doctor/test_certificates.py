"""Certificates of Redis and its Sentinels: real servers with TLS, under Kubernetes' names."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.settings import SentinelSettings, TlsSettings
from fedstream.doctor.certificates import examine, is_idle_star
from tests.broker.certificates import is_accepted
from tests.broker.servers import Redis, cluster, redis, redis_7, said

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="no redis-server that is also a sentinel"),
]

ROOT = Path(__file__).parents[3]
[DOCUMENTED] = re.findall(
    r"^subjectAltName=(.*)$", (ROOT / "docs/how-to/production.md").read_text(), re.MULTILINE
)
NAMES = DOCUMENTED.replace("DNS:", "").split(",")
HOSTS = "sentinel-0.sentinels, redis-0.redis-nodes, redis-1.redis-nodes"
NOW = datetime.now(UTC)
# The names of pods lead to this machine, for services and for what asks Python.


@pytest.fixture(autouse=True)
def pods_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the names of pods to this machine."""
    resolve = socket.getaddrinfo

    def here(host: Any, *args: Any, **named: Any) -> Any:
        is_pod = str(host).endswith((".redis-nodes", ".sentinels"))
        return resolve("127.0.0.1" if is_pod else host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", here)


def issued(
    folder: Path, *names: str, by: trustme.CA | None = None, ends: datetime | None = None
) -> tuple[str, ...]:
    """A certificate, beside ``ca.crt``: the options that make a Redis serve it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    made = (by or authority).issue_cert(*names, not_after=ends)
    made.private_key_pem.write_to_path(folder / "tls.key")
    made.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    return (
        "--tls-cert-file",
        str(folder / "tls.crt"),
        "--tls-key-file",
        str(folder / "tls.key"),
        "--tls-ca-cert-file",
        str(folder / "ca.crt"),
        "--tls-auth-clients",
        "no",
    )


@contextmanager
def watched(
    folder: Path,
    *names: str,
    by: trustme.CA | None = None,
    ends: datetime | None = None,
) -> Iterator[RedisSettings]:
    """A Redis and a Sentinel with one certificate, as services on Kubernetes are told of them.

    The Sentinel announces the pods' names: redis-0 is the master, redis-1 its replica.
    ``by``: the authority that signs it, if not the one that clients trust.
    """
    tls = issued(folder, *names, by=by, ends=ends)
    with redis(folder / "redis", *tls, tls=True) as server:
        file = folder / "sentinel.conf"
        file.write_text(
            "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
            f"sentinel monitor fedstream redis-0.redis-nodes {server.port} 2\n"
            f"sentinel known-replica fedstream redis-1.redis-nodes {server.port}\n"
        )
        binary = redis_7()
        assert binary is not None
        sentinel = Redis(binary, folder / "sentinel", str(file), "--sentinel", *tls, tls=True)
        try:
            sentinel.listens()
            yield RedisSettings(
                url="rediss://redis:6379/0",
                tls=TlsSettings(ca=str(folder / "ca.crt")),
                sentinel=SentinelSettings(nodes=(f"sentinel-0.sentinels:{sentinel.port}",)),
            )
        finally:
            sentinel.end()


async def found(settings: RedisSettings) -> list[tuple[str, str]]:
    """The level and line of each finding, without ports."""
    findings = await examine(settings, now=NOW.timestamp())
    return [(one.level, re.sub(r":\d+", "", str(one))) for one in findings]


async def test_documented_names_are_those_that_services_connect_to(tmp_path: Path) -> None:
    with watched(tmp_path, *NAMES, ends=NOW + timedelta(days=90, hours=1)) as settings:
        client = Client(settings, "test")
        assert await client.call("PING") == b"PONG"  # by way of the Sentinel, to redis-0
        await client.close()
        assert await found(settings) == [("ok", f"of {HOSTS}; ends in 90 days")]


REPLACE = (
    "issue it again, and replace it where Redis and the Sentinels read it (on Kubernetes the "
    "Secret fedstream-redis-tls)"
)
STARS = ("redis", "*.redis-nodes", "*.sentinels")
NO_STAR = "matches no name: a star needs two labels behind it"


LACKING = {
    "stars": (
        STARS,
        (
            f"problem is not for sentinel-0.sentinels: it names {', '.join(STARS)}; *.redis-nodes, "
            f"*.sentinels {NO_STAR} -> {REPLACE}, with the names sentinel-0.sentinels\n"
            "not checked no server with a trusted certificate could be asked for their addresses"
        ),
    ),
    "replica": (
        ("redis-0.redis-nodes", "sentinel-0.sentinels"),
        (
            "ok of sentinel-0.sentinels, redis-0.redis-nodes; ends in 90 days\n"
            "problem is not for redis-1.redis-nodes: it names redis-0.redis-nodes, "
            f"sentinel-0.sentinels -> {REPLACE}, with the names redis-1.redis-nodes"
        ),
    ),
    "idle star": (
        (*NAMES, "*.sentinels"),
        (
            f"warning of {HOSTS}: it names {', '.join(NAMES)}, *.sentinels; *.sentinels {NO_STAR} "
            f"-> name each host\nok of {HOSTS}; ends in 90 days"
        ),
    ),
}


@pytest.mark.parametrize(("names", "expected"), LACKING.values(), ids=LACKING)
async def test_names_that_a_certificate_lacks_are_listed(
    tmp_path: Path, names: tuple[str, ...], expected: str
) -> None:
    """The replica's too, which nobody connects to before it is the master."""
    with watched(tmp_path, *names, ends=NOW + timedelta(days=90, hours=1)) as settings:
        assert "\n".join(map(" ".join, await found(settings))) == expected


async def test_nodes_of_a_cluster_are_asked_with_the_login_of_the_url(tmp_path: Path) -> None:
    tls = (
        *issued(tmp_path, "127.0.0.1", ends=NOW + timedelta(days=90, hours=1)),
        "--tls-cluster",
        "yes",
        "--tls-replication",
        "yes",
    )
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with cluster(tmp_path, *tls, masters=2, tls=trusting) as shards:
        for port in shards.ports:
            words = ("ACL", "SETUSER", "default", "resetpass", ">secret")
            assert said(port, *words, tls=trusting) == b"+OK\r\n"
        settings = RedisSettings(
            url=f"rediss://default:secret@127.0.0.1:{shards.ports[0]}",
            cluster=True,
            tls=TlsSettings(ca=str(tmp_path / "ca.crt")),
        )
        good = ("ok", "of 127.0.0.1; ends in 90 days")
        assert await found(settings) == [good]
        shards.masters[1].kill()  # which the other one names
        assert await found(settings) == [good, ("not checked", "127.0.0.1: connection refused")]


async def test_end_of_a_certificate_is_told_in_days(tmp_path: Path) -> None:
    with watched(tmp_path, *NAMES, ends=NOW + timedelta(days=-3, hours=1)) as settings:
        [(level, said), *_] = await found(settings)
    assert (level, said.partition(": ")[2]) == ("problem", f"ended 3 days ago -> {REPLACE}")


async def test_certificate_of_a_stranger_is_not_believed(tmp_path: Path) -> None:
    with watched(tmp_path, *NAMES, by=trustme.CA()) as settings:
        [first, *_] = await found(settings)
    assert first[0] == "problem"
    assert "(unable to get local issuer certificate): redis.tls.ca must name the aut" in first[1]


async def test_a_server_that_is_away_is_not_checked() -> None:
    away = RedisSettings(url="rediss://127.0.0.1:1")
    assert await found(away) == [("not checked", "127.0.0.1: connection refused")]
    assert await found(RedisSettings(url="redis://127.0.0.1:1")) == []


@pytest.mark.parametrize(
    ("name", "idle"),
    [("*.sentinels", True), ("*.redis-nodes.fedstream", False), ("redis", False)],
)
def test_idle_stars_are_those_that_openssl_ignores(name: str, idle: bool) -> None:
    assert is_idle_star(name) == idle
    assert is_accepted(name, name.replace("*", "x")) != idle


@pytest.mark.parametrize("name", ["*", "redis-*.redis-nodes.svc", "a.*.b.c", "*.*.b.c"])
def test_a_star_counts_only_as_the_whole_first_label(name: str) -> None:
    assert is_idle_star(name)
