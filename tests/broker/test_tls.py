"""Redis over TLS: with the right authority it works as without, and what is wrong is said."""

from __future__ import annotations

import re
import shutil
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.settings import SentinelSettings, TlsSettings
from fedstream.core.errors import BrokerError, ConfigError, Unavailable
from fedstream.settings.config import read
from tests.broker.certificates import authority, signed
from tests.broker.servers import cluster, redis, redis_7, said

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys"),
]


@dataclass(frozen=True)
class Guarded:
    """A server that speaks TLS alone, and the files to talk to it."""

    port: int
    folder: Path

    def settings(self, ca: str | None = "ca", **files: Any) -> RedisSettings:
        paths = {name: str(self.folder / f"{file}") for name, file in files.items()}
        if ca is not None:
            paths["ca"] = str(self.folder / f"{ca}.crt")
        return RedisSettings(url=f"rediss://127.0.0.1:{self.port}/0", tls=TlsSettings(**paths))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority(folder, "ca")
    authority(folder, "stranger")
    for name, address in (("server", "127.0.0.1"), ("elsewhere", "127.0.0.9"), ("we", "127.0.0.1")):
        signed(folder, name, "ca", address)
    return folder


@pytest.fixture(scope="module")
def guarded(files: Path) -> Iterator[Guarded]:
    """It asks for no certificate of ours."""
    yield from served(files, "server", "no")


@pytest.fixture(scope="module")
def mutual(files: Path) -> Iterator[Guarded]:
    """It wants one."""
    yield from served(files, "server", "yes")


@pytest.fixture(scope="module")
def misplaced(files: Path) -> Iterator[Guarded]:
    """Its certificate is for another address."""
    yield from served(files, "elsewhere", "no")


def options(files: Path, name: str, clients: str) -> tuple[str, ...]:
    """Of a server with TLS."""
    return (
        "--tls-cert-file",
        str(files / f"{name}.crt"),
        "--tls-key-file",
        str(files / f"{name}.key"),
        "--tls-ca-cert-file",
        str(files / "ca.crt"),
        "--tls-auth-clients",
        clients,
    )


def served(files: Path, name: str, clients: str) -> Iterator[Guarded]:
    if redis_7() is None:
        pytest.skip("no Redis 7")
    folder = files / f"{name}-{clients}"
    server = redis(folder, *options(files, name, clients), tls=True)
    try:
        port = server.__enter__().port
    except AssertionError as error:
        if not re.search("Bad directive|Failed finding TLS support", str(error)):
            raise
        pytest.skip("this redis-server was built without TLS")
    try:
        yield Guarded(port, files)
    finally:
        server.__exit__(None, None, None)


async def answer(settings: RedisSettings) -> Any:
    client = Client(settings, "tls")
    try:
        return await client.call("PING")
    finally:
        await client.close()


async def test_model_round_trips_over_tls(guarded: Guarded) -> None:
    client = Client(guarded.settings(), "tls")
    chunks = [bytes([n]) * (1 << 20) for n in range(8)]
    await client.pipeline([("HSET", "it", n, memoryview(chunk)) for n, chunk in enumerate(chunks)])
    assert await client.pipeline([("HGET", "it", n) for n in range(8)]) == chunks
    await client.call("UNLINK", "it")
    await client.close()


async def test_client_certificate_is_sent_on_request(mutual: Guarded) -> None:
    assert await answer(mutual.settings(cert="we.crt", key="we.key")) == b"PONG"
    with pytest.raises(Unavailable, match=r"reset|closed|required"):  # by a Redis that says no more
        await answer(mutual.settings())


async def test_ends_of_certificates_are_those_that_new_connections_rely_on(tmp_path: Path) -> None:
    """Also while a connection lasts that began with another one."""
    for name, days in (("lasting", 9), ("brief", 4), ("stranger", 9)):
        authority(tmp_path, name, days=days)
    for name, by, days in (
        ("first", "lasting", 2),
        ("next", "lasting", 6),
        ("outlasting", "brief", 8),
        ("untrusted", "stranger", 3),
    ):
        signed(tmp_path, name, by, "127.0.0.1", days=days)
    both = [(tmp_path / f"{name}.crt").read_text() for name in ("lasting", "brief")]
    (tmp_path / "ca.crt").write_text("".join(both))

    async def days_left(client: Client) -> list[int]:
        await client.read_certificates()
        return [round((ends - time.time()) / 86400) for ends in client.certificates.values()]

    async def shows(name: str) -> None:
        cert, key = (str(tmp_path / f"{name}.{end}") for end in ("crt", "key"))
        words = ("CONFIG", "SET", "tls-cert-file", cert, "tls-key-file", key)
        assert said(one.port, *words, tls=trusting) == b"+OK\r\n"

    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    for one in served(tmp_path, "first", "no"):
        client = Client(one.settings(), "tls")
        sentinel = SentinelSettings(nodes=(f"127.0.0.1:{one.port}",))
        guided = Client(one.settings().model_copy(update={"sentinel": sentinel}), "tls")

        assert await days_left(client) == [2]
        await shows("next")
        assert await days_left(client) == [6]
        await shows("outlasting")
        assert await days_left(client) == [4], "as its authority"
        assert await days_left(guided) == [4], "a Sentinel's"
        await shows("untrusted")
        assert await days_left(client) == [4], "the last that was trusted"
        await client.close()
    assert await days_left(client) == [], "there is no server any more"
    plain = Client(RedisSettings(url=f"redis://127.0.0.1:{one.port}"))
    assert await days_left(plain) == []


async def test_cluster_nodes_are_reached_over_tls(guarded: Guarded) -> None:
    """``guarded``: there is a server that can."""
    files = guarded.folder
    ours = ssl.create_default_context(cafile=files / "ca.crt")
    arguments = (*options(files, "server", "optional"), "--tls-cluster", "yes")
    with cluster(files / "cluster", *arguments, tls=ours) as made:
        told = replace(guarded, port=made.ports[0]).settings()
        settings = told.model_copy(update={"cluster": True})
        places = set()
        for name in "abcdef":
            key = Keys(name).run
            stranger, bound = Client(settings, "tls"), Client(settings, "tls")
            assert await stranger.call("SET", key, "x") == b"OK"  # where it was sent on to
            bound.bind(key)
            assert await bound.call("GET", key) == b"x"  # where the slots' list says
            assert bound.address == stranger.address
            places.add(bound.address)
            await stranger.close()
            await bound.close()
        assert places == {f"127.0.0.1:{port}" for port in made.ports}


@pytest.mark.parametrize("ca", ["stranger", None])
async def test_unknown_authority_is_not_trusted(guarded: Guarded, ca: str | None) -> None:
    with pytest.raises(BrokerError, match=r"is not trusted: .*redis\.tls\.ca") as raised:
        await answer(guarded.settings(ca))
    assert not raised.value.retriable
    assert "\n" not in str(raised.value)


async def test_certificate_for_another_address_is_not_trusted(misplaced: Guarded) -> None:
    with pytest.raises(BrokerError, match=r"is not for 127\.0\.0\.1: issue one that names 127"):
        await answer(misplaced.settings())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ca": "no.crt"}, "redis.tls.ca: {}/no.crt: cannot be read: No such file or directory"),
        ({"ca": "server.key"}, "redis.tls.ca: {}/server.key: contains no PEM certificate"),
        ({"cert": "no.crt", "key": "we.key"}, "redis.tls.cert: {}/no.crt: cannot be read: No such"),
        ({"cert": "we.crt", "key": "no.key"}, "redis.tls.key: {}/no.key: cannot be read: No such"),
        ({"cert": "we.crt", "key": "server.key"}, "redis.tls.cert, redis.tls.key: {}/we.crt and"),
    ],
)
def test_unusable_certificate_files_are_reported_at_start(
    files: Path, given: dict[str, str], says: str
) -> None:
    paths = {name: str(files / file) for name, file in given.items()}
    with pytest.raises(ConfigError) as raised:
        Client(RedisSettings(url="rediss://127.0.0.1:1/0", tls=TlsSettings(**paths)))
    assert str(raised.value).startswith(says.format(files))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["redis.tls.ca=a.crt"], "redis.tls needs a redis.url that starts with rediss://"),
        (
            ["redis.url=rediss://h", "redis.tls.cert=a.crt"],
            "redis.tls.cert and redis.tls.key: set both or neither",
        ),
        (
            ["redis.cluster=true", 'redis.sentinel.nodes=["a:1"]'],
            "redis.sentinel and redis.cluster = true: set only one",
        ),
        (
            ["redis.cluster=true", "redis.url=unix:///a"],
            "redis.url = unix://... does not work with redis.cluster = true",
        ),
        (['redis.sentinel.nodes=["a:1", "b:x"]'], "redis.sentinel.nodes: 'b:x' is not an address"),
        (['redis.sentinel.nodes=["a:70000"]'], "redis.sentinel.nodes: 'a:70000' is not an address"),
        (["redis.sentinel.nodes=[]"], "redis.sentinel.nodes: name at least one"),
        (["redis.sentinel.master=m"], "redis.sentinel.nodes: name at least one"),
    ],
)
def test_conflicting_keys_are_both_named(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(None, sets)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cluster_has_one_database() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: database 2, but a cluster"):
        Client(RedisSettings(url="redis://127.0.0.1:1/2", cluster=True))


@pytest.mark.parametrize(
    ("key", "shown"), [("password", "redis.password"), ("passwrod", "redis.passwrod")]
)
def test_secrets_appear_in_no_message(key: str, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(None, [f"redis.{key}={{a='geheim'}}", "redis.timeout_s=0"])
    assert shown in str(raised.value)
    assert "geheim" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        Client(RedisSettings(url="http://me:geheim@there"))
    assert "geheim" not in str(raised.value)
    with pytest.raises(ValidationError):
        RedisSettings.model_validate_json('{"password": 5}')
