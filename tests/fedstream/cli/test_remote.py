"""A deployment elsewhere: asked through its coordinator's HTTP, or in its Redis as an operator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from fedstream.broker import rights
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.cli.app import main
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.app import App
from fedstream.core.messages import Assignment
from fedstream.history import status
from tests.support import EveryRole, Hand

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fedstream status`, or another one: exit code, stdout and stderr."""

    async def run(*arguments: str, words: tuple[str, ...] = ("status",)) -> tuple[int, str, str]:
        def ended() -> int:
            with pytest.raises(SystemExit) as end:
                main([*words, *arguments])
            return int(end.value.code or 0)

        return await asyncio.to_thread(ended), *capsys.readouterr()

    return run


async def serving(client: Client, keys: Keys) -> TestServer:
    """A coordinator's routes."""
    app = web.Application()
    app.add_routes(App(client, EveryRole(client, keys, "c"), keys, 4).routes())
    server = TestServer(app)
    await server.start_server()
    return server


@pytest.fixture
async def url(client: Client, keys: Keys) -> AsyncIterator[str]:
    """Where a coordinator answers."""
    server = await serving(client, keys)
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.mark.parametrize("path", ["/", "/v1/runs/whatever"])
async def test_coordinator_status_equals_redis_status(
    hand: Hand, command: Command, url: str, path: str
) -> None:
    await hand.create(versions=7)
    await hand.announce("ann")
    asked = ("--url", url + path, "--run", hand.keys.name)
    code, said, wrong = await command(*asked, "--json")
    assert (code, wrong) == (0, "")
    assert json.loads(said) == await status.read(hand.client, hand.keys)
    code, said, _ = await command(*asked)
    assert code == 0
    assert f"{hand.keys.name}, running" in said
    assert "ann" in said


async def test_other_run_is_named_in_the_error(hand: Hand, command: Command, url: str) -> None:
    await hand.create()
    code, said, wrong = await command("--url", url, "--run", "another")
    assert (code, said, wrong.count("\n")) == (1, "", 1)
    assert "answered 404: this deployment serves run" in wrong
    assert hand.keys.name in wrong


async def test_coordinator_reports_a_redis_outage(command: Command, keys: Keys) -> None:
    client = Client(RedisSettings(url="redis://127.0.0.1:1/0"))
    server = await serving(client, keys)
    code, _, wrong = await command("--url", str(server.make_url("")), "--run", keys.name)
    assert (code, wrong.count("\n")) == (1, 1)
    assert "answered 503: Redis at 127.0.0.1:1 does not answer" in wrong
    await server.close()
    await client.close()


async def test_other_http_server_is_not_a_coordinator(command: Command) -> None:
    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="[]")

    app = web.Application()
    app.add_routes([web.get("/v1/runs/{run}", hello)])
    server = TestServer(app)
    await server.start_server()
    code, _, wrong = await command("--url", str(server.make_url("")))
    assert (code, wrong.count("\n")) == (1, 1)
    assert "does not answer like a coordinator" in wrong
    await server.close()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1/v1/runs/demo: "),
        (["--url", "http://nowhere.invalid"], 1, "no answer from http://nowhere.invalid/"),
        (["--url", "127.0.0.1:8080"], 2, "is not a coordinator's address"),
        (["--url", "http://[::1"], 2, "is not a coordinator's address"),
        (["--url", "http://me:geheim@a"], 2, "'http://...@a' is not a coordinator's address"),
        (["--url", "http://127.0.0.1:1/a b"], 1, "no answer from http://127.0.0.1:1/a b/v1/"),
        (["--url", "http://a", "--redis", "redis://a"], 2, "give only one"),
    ],
)
async def test_error_is_one_line_with_its_exit_code(
    command: Command, arguments: list[str], code: int, said: str
) -> None:
    ended, shown, wrong = await command(*arguments)
    assert (ended, shown, wrong.count("\n")) == (code, "", 1)
    assert wrong.startswith("fedstream: ")
    assert said in wrong


@pytest.fixture
async def operator(
    client: Client, keys: Keys, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """A Redis that asks who one is, and the environment of an operator: its URL."""
    version = re.search(rb"redis_version:(\d+)", await client.call("INFO", "server"))
    if version is None or int(version[1]) < 7:
        pytest.skip("rights by key and subcommand need Redis 7")
    password = "a long secret"  # noqa: S105
    rules = rights.rules("operator", keys.name).split()
    await client.call("ACL", "SETUSER", "operator", "on", f">{password}", *rules)
    monkeypatch.setenv("FEDSTREAM_REDIS__USERNAME", "operator")
    monkeypatch.setenv("FEDSTREAM_REDIS__PASSWORD", password)
    yield redis.url
    await client.call("ACL", "DELUSER", "operator")


async def test_operator_user_can_inspect_and_repair(
    hand: Hand, operator: str, command: Command
) -> None:
    await hand.create()
    for _ in range(2):
        [trigger] = await hand.open()
        [(entry, _)] = await hand.take()
        task = Assignment.decode(trigger.assignment())
        await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "crashed", task=task)
    where = ("--redis", operator, "--run", hand.keys.name)
    asked: list[tuple[str, ...]] = [
        ("status",),
        ("top", "--once"),
        ("dead", "list"),
        ("dead", "show", trigger.task),
        ("dead", "retry", trigger.task),
        ("dead", "drop", "--all", "--yes"),
        ("purge", "--yes", "--force"),
    ]
    for one in asked:
        code, said, wrong = await command(*where, words=one)
        assert (code, wrong) == (0, ""), one
        assert said


async def test_wrong_password_is_a_one_line_error(
    hand: Hand, operator: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    monkeypatch.setenv("FEDSTREAM_REDIS__PASSWORD", "a guess")
    for words in (("status",), ("top", "--once"), ("dead", "list")):
        where = ("--redis", operator, "--run", hand.keys.name)
        code, said, wrong = await command(*where, words=words)
        assert (code, said, wrong.count("\n")) == (1, "", 1)
        assert "refuses: " in wrong
        assert "a guess" not in wrong


async def test_coordinators_token_comes_from_the_environment(
    hand: Hand, command: Command, client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "0123456789abcdef"
    app = web.Application()
    guarded = App(client, EveryRole(client, keys, "c"), keys, 4, Tokens(SecretStr(right)))
    app.add_routes(guarded.routes())
    server = TestServer(app)
    await server.start_server()
    address = str(server.make_url("")).rstrip("/")
    await hand.create()
    try:
        code, _, said = await command("--url", address, "--run", keys.name)
        assert code == 1
        assert "401" in said
        assert "token" in said
        monkeypatch.setenv("FEDSTREAM_HTTP__TOKEN", "\n" * 16)
        code, _, said = await command("--url", address, "--run", keys.name)
        assert code == 2
        assert "FEDSTREAM_HTTP__TOKEN" in said
        assert "expected tokens of at least 16 characters, one a line" in said
        monkeypatch.setenv("FEDSTREAM_HTTP__TOKEN", right)
        code, shown, _ = await command("--url", address, "--run", keys.name)
        assert code == 0
        assert keys.name in shown
    finally:
        await server.close()
