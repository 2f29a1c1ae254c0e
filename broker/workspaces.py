"""Workspaces: the saved progress of interrupted tasks, each a string under a key of its site.

Any trainer of the site may write any bytes there, so reads are bounded. The format is that of
:mod:`fedstream.trainer.workspace`.
"""

from __future__ import annotations

from fedstream.broker.client import Client
from fedstream.broker.commands import Command


def reading(key: str, *, most: int) -> Command:
    """The command that reads at most ``most + 1`` bytes of a workspace.

    More than ``most`` bytes in the reply mean that the workspace is too large; b"" means that there
    is none.
    """
    return ("GETRANGE", key, 0, most)


async def read(client: Client, key: str, *, most: int) -> bytes:
    """Read a workspace, as :func:`reading` says."""
    data: bytes = await client.call(*reading(key, most=most))
    return data


async def write(client: Client, key: str, data: bytes | memoryview, *, expire_s: float) -> None:
    """Write a workspace, replacing the previous one; it expires after ``expire_s`` seconds."""
    await client.call("SET", key, data, "PX", round(expire_s * 1000))


async def delete(client: Client, key: str) -> None:
    """Delete a workspace, if there is one."""
    await client.call("UNLINK", key)
