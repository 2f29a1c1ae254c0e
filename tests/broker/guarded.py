"""A Redis with the users of `fedstream acl`: of each role, of the sites north and south, and of a
second gateway, clinics.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from fedstream.broker import rights
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.broker.keys import Keys
from fedstream.core.errors import BrokerError
from fedstream.operate import acl
from tests.broker.servers import redis, redis_7

RUN = "guarded"
KEYS = Keys(RUN)
PASSWORDS = {f"FEDSTREAM_PASSWORD_{role.upper()}": f"of-{role}" for role in rights.ROLES}
SITES = ("north", "south")
OF_SITES = {f"FEDSTREAM_PASSWORD_SITE_{site.upper()}": f"of-trainer-{site}" for site in SITES}
GATEWAYS = ("gateway", "clinics")
OF_GATEWAYS = {"FEDSTREAM_PASSWORD_SITE_CLINICS": "of-gateway-clinics"}

needs_7 = pytest.mark.skipif(redis_7() is None, reason="%R~ and %W~ came with Redis 7")


class Guarded:
    """A Redis with the users of one run."""

    def __init__(self, port: int) -> None:
        self.port = port

    def settings(self, role: str) -> RedisSettings:
        """As the configuration of a role has it."""
        return RedisSettings.model_validate_json(
            f'{{"url": "redis://127.0.0.1:{self.port}/0", "username": "{role}", '
            f'"password": "of-{role}"}}'
        )

    @asynccontextmanager
    async def client(self, role: str) -> AsyncIterator[Client]:
        """A connection as this role."""
        client = Client(self.settings(role))
        try:
            yield client
        finally:
            await client.close()


@contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """Runs while the block does."""
    file = folder / "users.acl"
    acl.write(
        file,
        acl.file_of(RUN, PASSWORDS | OF_SITES | OF_GATEWAYS, SITES, GATEWAYS)
        + "user admin on >of-admin ~* &* +@all\n",
    )
    with redis(folder / "redis", "--aclfile", str(file)) as server:
        yield Guarded(server.port)


async def is_denied(client: Client, command: Command) -> bool:
    """Whether Redis refuses this user the command."""
    try:
        await client.pipeline([command])
    except BrokerError as error:
        return "refuses: " in str(error)
    return False
