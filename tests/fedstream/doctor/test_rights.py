"""Rights of a Redis user: checked on each Redis, for releases before 7 check them differently."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.rights import ROLES, commands, rights_of, rules
from fedstream.doctor import checkup as doctor
from fedstream.doctor import rights
from tests.fedstream.doctor.conftest import Change, Look, wrong


@pytest.fixture
async def user(client: Client) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Makes a user with these rights: its part of a URL."""
    made = []

    async def new(name: str, *rights: str) -> str:
        made.append(name)
        await client.call("ACL", "SETUSER", name, "on", ">secret", *rights)
        return f"{name}:secret@"

    yield new
    for name in made:
        await client.call("ACL", "DELUSER", name)


async def test_user_without_the_services_rights(
    look: Look, change: Change, user: Any, redis: RedisSettings, keys: Keys
) -> None:
    login = await user("half", f"~{keys.prefix}*", "+@all", "-xack", "-publish")
    findings = await look(f"redis.url={redis.url.replace('//', f'//{login}')}")
    said = "may not XACK, which every service needs -> allow that, as `fedstream acl` does"
    assert wrong(findings, "rights of half") == [("problem", said)]
    login = await user("elsewhere", "~another:*", "+@all")
    findings = await look(f"redis.url={redis.url.replace('//', f'//{login}')}")
    [(level, said)] = wrong(findings, "rights of elsewhere")
    assert level == "problem"
    assert "may not " in said


async def test_checks_without_permission_are_skipped(
    look: Look, change: Change, user: Any, redis: RedisSettings
) -> None:
    login = await user("shy", "~*", "+@all", "-info", "-evalsha", "-multi", "-time")
    findings = await look(f"redis.url={redis.url.replace('//', f'//{login}')}")
    skipped = {one.about: one.text for one in findings if one.level == "not checked"}
    assert skipped == {
        "redis server": "may not INFO",
        "redis databases": "may not INFO",
        "clock": "may not TIME",
        "rights of shy": "needs Redis 7 and EVALSHA, or MULTI and DISCARD",
        "redis memory": "needs INFO",
    }
    assert doctor.exit_code(findings) == 0


async def _is_7(client: Client) -> bool:
    return int((await client.call("INFO", "server")).split(b"redis_version:")[1][:1]) >= 7


async def test_rights_are_checked_from_outside_and_by_the_users_themselves(
    look: Look, change: Change, user: Any, client: Client, redis: RedisSettings, keys: Keys
) -> None:
    if not await _is_7(client):
        pytest.skip("rights to read alone are of Redis 7")
    for role in ROLES:
        login = await user(role, *rules(role, keys.name).split())
        findings = await look(f"redis.url={redis.url.replace('//', f'//{login}')}")
        assert [one for one in findings if one.level == "problem"] == []
        assert [one.level for one in findings if one.about == f"rights of {role}"] == ["ok"]
    await user("trainer", "clearselectors")
    findings = await look()
    said = wrong(findings, "rights of trainer")[0][1]
    assert said.startswith("may not EVALSHA; to use fedstream:{")
    assert wrong(findings, "rights of coordinator") == []
    by_itself = await look(f"redis.url={redis.url.replace('//', '//trainer:secret@')}")
    assert wrong(by_itself, "rights of trainer") == wrong(findings, "rights of trainer")


def test_every_command_of_a_role_can_be_checked() -> None:
    needed = {one for role in ROLES for part in rights_of(role) for one in commands(part)}
    assert needed - rights._SAMPLES.keys() == set()
