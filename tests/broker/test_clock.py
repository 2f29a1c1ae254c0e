"""Redis's clock, counted on between its answers, whatever this machine's clock shows."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from fedstream.broker import client as client_module
from fedstream.broker import clock
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.clock import Clock
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.trainer import Outbox

LATE = st.floats(0.0, 2.0)


@given(st.lists(st.tuples(LATE, LATE, LATE), min_size=1, max_size=5))
def test_clock_is_never_wrong_by_more_than_the_last_answer_took(
    asked: list[tuple[float, float, float]],
) -> None:
    """Redis's clock is at 5000 when the machine is started; questions and answers are late."""
    now, redis = 0.0, Clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "uptime", lambda: now)
        for pause_s, question_s, answer_s in asked:
            sent = now = now + pause_s
            now = sent + question_s + answer_s
            redis.read(5000.0 + sent + question_s, sent)
            assert abs(redis.now() - (5000.0 + now)) <= question_s + answer_s + 1e-9
        quick = now
        redis.read(5000.0 + now, quick)
        assert redis.now() == pytest.approx(5000.0 + now)
        now += 10.0
        redis.read(5000.0 + now, quick)  # a slow answer changes nothing
        assert redis.now() == pytest.approx(5000.0 + now)


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0])
async def test_client_knows_redis_time_from_its_first_connection_on(
    redis: RedisSettings, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + wrong_s)
    client = Client(redis)
    assert client.clock.now() == pytest.approx(now() + wrong_s, abs=60), "nothing better is known"
    await client.call("PING")
    assert client.clock.now() == pytest.approx(now(), abs=60)
    client.clock.read(1e9, clock.uptime())  # long ago
    assert await client.time() == pytest.approx(now(), abs=60)
    assert client.clock.now() == pytest.approx(now(), abs=60)
    await client.close()


async def test_any_service_follows_redis_clock_with_the_commands_that_it_sends(
    redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(redis)
    await client.call("PING")
    for seconds, follows in ((1000.0, False), (0.0, True)):
        monkeypatch.setattr(client_module, "_CLOCK_S", seconds)
        for _ in range(2):
            client.clock.read(1e9, clock.uptime())  # long ago
            assert await client.pipeline([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]
            assert (client.clock.now() == pytest.approx(time.time(), abs=60)) is follows
    await client.close()


async def test_user_that_may_not_ask_for_the_time_works_on_and_is_warned_once(
    client: Client, redis: RedisSettings, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users of an older release don't have the right."""
    if redis.cluster:
        pytest.skip("the user would have to be made on every node")
    monkeypatch.setattr(client_module, "_CLOCK_S", 0.0)
    await client.call("ACL", "SETUSER", "old", "on", ">secret", "~*", "&*", "+@all", "-time")
    old = Client(redis.model_copy(update={"username": "old", "password": SecretStr("secret")}))
    await old.call("PING")
    warnings: list[str] = []
    old.warn = warnings.append
    lease = Lease(old, keys, "updater", "u-0", seconds=10)
    assert await lease.acquire()
    assert await lease.hold()
    assert await Outbox(old, keys, "pool").announce("t-0", [3])
    [warning] = warnings
    assert "fedstream acl" in warning
    assert old.clock.now() == pytest.approx(time.time(), abs=60)
    await old.close()
