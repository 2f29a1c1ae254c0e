"""Workspaces in Redis: read up to a limit, replaced whole, gone by themselves."""

from __future__ import annotations

from fedstream.broker import workspaces
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys


async def test_a_workspace_is_replaced_read_and_deleted(client: Client, keys: Keys) -> None:
    key = keys.workspace("pool", "t")
    assert await workspaces.read(client, key, most=100) == b""
    await workspaces.write(client, key, b"a longer one", expire_s=60)
    await workspaces.write(client, key, b"whole", expire_s=30)
    assert await workspaces.read(client, key, most=100) == b"whole"
    assert 0 < await client.call("PTTL", key) <= 30_000
    await workspaces.delete(client, key)
    await workspaces.delete(client, key)
    assert await workspaces.read(client, key, most=100) == b""


async def test_oversized_workspace_is_not_read_completely(client: Client, keys: Keys) -> None:
    key = keys.workspace("pool", "t")
    await workspaces.write(client, key, b"12345", expire_s=60)
    assert await workspaces.read(client, key, most=5) == b"12345"
    assert await workspaces.read(client, key, most=3) == b"1234"
