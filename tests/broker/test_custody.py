"""What sites wrote and forgot, found a few keys at a time, also on one node of a cluster."""

from __future__ import annotations

import pytest

from broker import custody
from broker.client import Client
from broker.keys import Keys


async def test_a_step_looks_at_some_keys_and_the_next_goes_on(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custody, "_STEP", 10)
    names = {keys.update(f"north/{n}") for n in range(300)}
    await client.pipeline([("HSET", name, "size", 1) for name in sorted(names)])
    cursor, steps = b"0", list[list[str]]()
    while not steps or cursor != b"0":
        cursor, found = await custody.expire_forgotten(client, keys, cursor)
        steps.append(found)
    assert len(steps) > 10  # Redis may give a few more than it is asked for
    assert sorted(name for found in steps for name in found) == sorted(names)  # each once
