"""A client takes up renewed passwords and certificates with its next connection."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from fedstream.broker.client import Client
from fedstream.broker.settings import RedisSettings, SentinelSettings, TlsSettings
from fedstream.core.errors import ConfigError, LoginRefused, Unavailable
from tests.broker.certificates import authority, signed
from tests.broker.servers import Redis, redis, redis_7, said
from tests.broker.test_sentinel import NAME, sentinel
from tests.support import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="the users' rights need Redis 7"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with redis(tmp_path_factory.mktemp("redis")) as one:
        yield one


def accepts(server: Redis, *passwords: str) -> None:
    """Set the passwords of the user, and end its connections."""
    words = ("resetpass", "on", "+@all", *(f">{one}" for one in passwords))
    assert said(server.port, "ACL", "SETUSER", "me", *words) == b"+OK\r\n"
    said(server.port, "CLIENT", "KILL", "USER", "me")


@pytest.fixture
async def made() -> AsyncIterator[list[Client]]:
    """Clients that are closed at the end."""
    clients: list[Client] = []
    yield clients
    for one in clients:
        await one.close()


def client(made: list[Client], server: Redis, **login: Any) -> Client:
    made.append(Client(RedisSettings(url=server.url, username="me", **login)))
    return made[-1]


async def test_a_password_is_replaced_while_two_are_accepted(
    server: Redis, made: list[Client], tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    accepts(server, "old")
    ours = client(made, server, password_file=str(file))
    assert await ours.call("PING") == b"PONG"
    file.write_text("new\r\nold\n")  # before Redis knows the new one
    said(server.port, "CLIENT", "KILL", "USER", "me")
    assert await asked_anew(ours) == b"PONG"
    accepts(server, "new", "old")
    assert await asked_anew(ours) == b"PONG"
    accepts(server, "new")  # before the file is without the old one
    assert await asked_anew(ours) == b"PONG"
    given = client(made, server, password="other\nnew")  # noqa: S106  # as an environment variable has it
    assert await given.call("PING") == b"PONG"


async def test_a_refused_password_is_waited_out_once_one_was_accepted(
    server: Redis, made: list[Client], tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    accepts(server, "old")
    ours = client(made, server, password_file=str(file))
    with pytest.raises(LoginRefused, match=r"refuses: .*redis\.password_file"):
        await ours.call("PING")  # a mistake, so a service ends
    file.write_text("old")
    fixed = client(made, server, password="old")  # noqa: S106
    assert [await one.call("PING") for one in (ours, fixed)] == [b"PONG", b"PONG"]
    accepts(server, "new")
    with pytest.raises(Unavailable, match=r"refuses: .*waiting for files") as raised:
        await asked_anew(ours)
    assert raised.value.retriable
    with pytest.raises(LoginRefused):
        await asked_anew(fixed)  # it can't change in this process
    file.write_text("new")
    assert await ours.call("PING") == b"PONG"


async def test_a_password_that_sentinels_refuse_is_waited_out_if_it_is_theirs_that_has_a_file(
    server: Redis, made: list[Client], tmp_path: Path
) -> None:
    file, other = tmp_path / "watch", tmp_path / "password"
    file.write_text("old")
    other.write_text("p")
    accepts(server, "p")
    with sentinel(tmp_path / "sentinel", server.port) as watching:
        accepts(watching, "old")
        nodes = (f"127.0.0.1:{watching.port}",)
        ours, fixed = (
            client(
                made,
                server,
                **login,
                sentinel=SentinelSettings(nodes=nodes, master=NAME, username="me", **asked),
            )
            for login, asked in (
                ({"password": "p"}, {"password_file": str(file)}),
                ({"password_file": str(other)}, {"password": SecretStr("old")}),
            )
        )
        assert [await one.call("PING") for one in (ours, fixed)] == [b"PONG", b"PONG"]
        accepts(watching, "new")
        for one in (ours, fixed):  # only a call that fails makes it ask the Sentinels again
            waiting = asyncio.create_task(one.call("WAIT", 1, 20_000, wait_s=20))
            await wait_until(lambda: b"blocked_clients:1" in said(server.port, "INFO", "clients"))
            said(server.port, "CLIENT", "KILL", "USER", "me")
            with pytest.raises(Unavailable):
                await waiting
        with pytest.raises(Unavailable, match=r"refuses: .*waiting for files"):
            await ours.call("PING")
        with pytest.raises(LoginRefused):
            await fixed.call("PING")
        file.write_text("new")
        assert await ours.call("PING") == b"PONG"


async def asked_anew(ours: Client) -> Any:
    """The reply by a new connection: Redis has closed the one before."""
    with suppress(Unavailable):
        await ours.call("PING")
    return await ours.call("PING")


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read: No such file"), ("\n", "contains no password")]
)
@pytest.mark.parametrize("key", ["redis.password_file", "redis.sentinel.password_file"])
def test_an_unusable_password_file_is_reported_at_start(
    tmp_path: Path, key: str, content: str | None, says: str
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    login = {"password_file": str(file)}
    settings = {"sentinel": {"nodes": ["h:1"], **login}} if "sentinel" in key else login
    with pytest.raises(ConfigError, match=rf"^{key}: {file}: {says}"):
        Client(RedisSettings.model_validate({"url": "redis://h:1", **settings}, strict=False))


def renewed(folder: Path, authority_name: str, number: int) -> tuple[Path, Path]:
    signed(folder, f"server-{number}", authority_name, "127.0.0.1")
    return folder / f"server-{number}.crt", folder / f"server-{number}.key"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")
async def test_redis_changes_to_a_certificate_of_another_authority(
    made: list[Client], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        authority(tmp_path, name)
    first, second = ((tmp_path / f"{name}.crt").read_text() for name in ("first", "second"))
    trusted = tmp_path / "ca.crt"
    trusted.write_text(first)
    cert, key = renewed(tmp_path, "first", 1)
    options = (
        "--tls-cert-file",
        str(cert),
        "--tls-key-file",
        str(key),
        "--tls-ca-cert-file",
        str(trusted),
        "--tls-auth-clients",
        "no",
    )
    with redis(tmp_path / "redis", *options, tls=True) as server:
        both = ssl.create_default_context(cadata=first + second)

        def changes(authority_name: str, number: int) -> None:
            for path, text in zip(
                (cert, key), renewed(tmp_path, authority_name, number), strict=True
            ):
                path.write_text(text.read_text())
            words = ("tls-cert-file", str(cert), "tls-key-file", str(key))
            assert said(server.port, "CONFIG", "SET", *words, tls=both) == b"+OK\r\n"
            said(server.port, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", tls=both)

        words = ("ACL", "SETUSER", "me", "on", "+@all", ">p")
        assert said(server.port, *words, tls=both) == b"+OK\r\n"
        settings = RedisSettings(
            username="me",
            url=f"rediss://127.0.0.1:{server.port}",
            password=SecretStr("p"),
            tls=TlsSettings(ca=str(trusted)),
        )
        made.append(Client(settings))
        assert await made[0].call("PING") == b"PONG"
        changes("first", 2)
        assert await asked_anew(made[0]) == b"PONG"
        changes("second", 3)  # the authorities come a moment later
        with pytest.raises(Unavailable, match=r"is not trusted.*waiting for files"):
            await asked_anew(made[0])
        trusted.write_text(first + second)
        assert await made[0].call("PING") == b"PONG"
        stranger = Client(settings)
        trusted.write_text(first)
        with pytest.raises(LoginRefused):
            await stranger.call("PING")
