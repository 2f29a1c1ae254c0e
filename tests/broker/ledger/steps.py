"""What the tests of several roles do and ask."""

from __future__ import annotations

from fedstream.broker.client import Client
from fedstream.core.messages import Assignment, GiveUp, Trigger


def give_up(
    trigger: Trigger | Assignment, attempt: str = "a1", reason: str = "dropped out"
) -> GiveUp:
    return GiveUp(
        task=trigger.task, attempt=attempt, device=trigger.device, trainer="t", reason=reason
    )


async def exists(client: Client, key: str) -> bool:
    return bool(await client.call("EXISTS", key))


async def expires(client: Client, key: str) -> bool:
    return int(await client.call("PTTL", key)) > 0
