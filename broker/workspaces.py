"""Workspaces: the saved progress of interrupted tasks, each a string under a key of its site.

Any trainer of the site may write anything there, so readers say how much they are willing to read.
What is in a workspace is the trainers' business (:mod:`fedstream.trainer.workspace`).
"""

from __future__ import annotations

from fedstream.broker.client import Client
from fedstream.broker.commands import Command


def reading(key: str, *, most: int) -> Command:
    """The command that reads a workspace, for a pipeline; its reply is b"" if there is none.

    Of a workspace of more than ``most`` bytes, it is the first ``most + 1``.
    """
    return ("GETRANGE", key, 0, most)


async def read(client: Client, key: str, *, most: int) -> bytes:
    """Read a workspace, as :func:`reading` says."""
    data: bytes = await client.call(*reading(key, most=most))
    return data


async def write(client: Client, key: str, data: bytes | memoryview, *, expire_s: float) -> None:
    """Write a workspace over the one before, expiring ``expire_s`` seconds from now."""
    await client.call("SET", key, data, "PX", round(expire_s * 1000))


async def delete(client: Client, key: str) -> None:
    """Delete a workspace, if there is one."""
    await client.call("UNLINK", key)
