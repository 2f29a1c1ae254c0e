"""Rounds through every service, under a rule that would take what is late."""

from __future__ import annotations

from pathlib import Path

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from tests.broker.pipeline import finished, pipeline

BATCH = 2


async def test_round_uses_only_its_own_answers(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    """More devices are asked than fill a version: what the others train comes too late."""
    sets = (
        "strategy.name=afa-cd",
        f"strategy.buffer_size={BATCH}",
        "run.versions=8",
        "scheduler.policy.kind=rounds",
        "scheduler.policy.k=4",
    )
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for name in ("ann", "bob", "cat", "dan"):
            await services.start("trainer", name)
        view = await finished(client, keys)
        assert view.run.max_staleness == 0
    late = view.reasons("refused").get("too stale", 0)
    late += view.reasons("given_up").get("round over", 0)
    assert late > 0
    assert view.reasons("refused").keys() <= {"too stale"}
    with Replayer(tmp_path / "journal") as replayer:
        records = [moment.message for moment in replayer]
    used = [r for r in records if isinstance(r, Taken) and r.outcome in ("applied", "buffered")]
    assert len(used) == 8 * BATCH
    assert {record.staleness for record in used} == {0}
