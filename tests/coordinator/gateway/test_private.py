"""A gateway in a private run: what it offers, and which updates it takes."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.replica import RunCache
from fedstream.core.errors import ConfigError
from fedstream.core.formats import F32, Format, format_of
from fedstream.private.sealing import EpochKey
from tests.coordinator.gateway.places import Place, coordinating, joined, serving
from tests.coordinator.gateway.uploading import Sender, queued, trained
from tests.private.enrolled import epoch_of, policy_of
from tests.support import Hand, layout_of, wait_until

POLICY = policy_of(parameters=64)
LINE = "line-of-the-run"
KNOWS: dict[str, Any] = {"formats": ["f32", "mask32"]}
SEAL = base64.b64encode(b"sealed").decode()


async def created(make: Any, **changes: Any) -> Hand:
    """A private run, whose helper's key is in Redis."""
    about = {"policy": POLICY.text.decode(), "lineage": LINE, "sends": "delta"}
    hand: Hand = await make(64, **about | changes)
    await hand.client.call("SET", hand.keys.sealing, epoch_of(POLICY)[1].encode())
    return hand


async def test_offer_names_the_policy_the_run_and_the_helpers_newest_key(
    make: Any, redis: RedisSettings
) -> None:
    hand = await created(make)
    async with coordinating(hand, redis), serving(hand, redis) as at:
        await joined(hand, at, **KNOWS)
        _, newer = epoch_of(POLICY)
        await hand.client.call("SET", hand.keys.sealing, newer.encode())
        await wait_until(lambda: _knows(at, newer.encode()))
        await hand.open(device=3)
        offer = (await at.check_in(3, wait_s=50, **KNOWS)).offer
    assert offer.private is not None
    assert (offer.private.policy, offer.private.run) == (POLICY.digest, LINE)
    assert EpochKey.decode(offer.private.epoch_key) == newer
    assert (offer.update.format, offer.update.sends, offer.update.most) == ("mask32", "delta", 256)


def _knows(at: Place, key: bytes) -> bool:
    """Whether the gateway has read this key."""
    return at.gateway.replica.run_cache._epoch_key == key


async def test_device_that_cannot_mask_gets_no_task(make: Any, redis: RedisSettings) -> None:
    """Such as one of an earlier release, which would send its update as it is."""
    hand = await created(make)
    async with serving(hand, redis) as at:
        answer = await at.check_in(3)
        assert (answer.status, answer.json["reason"]) == (406, "format")
        assert "start the device with its policy" in answer.json["error"]
        assert await hand.ledger.owners() == {}


async def test_no_task_is_offered_before_the_helpers_key_is_there(
    make: Any, redis: RedisSettings
) -> None:
    hand = await created(make)
    key = await hand.client.call("GETDEL", hand.keys.sealing)
    async with coordinating(hand, redis), serving(hand, redis) as at:
        answer = await at.check_in(3, **KNOWS)
        assert (answer.status, answer.json["reason"]) == (503, "unavailable")
        await hand.client.call("SET", hand.keys.sealing, key)
        await wait_until(lambda: _knows(at, key))
        await joined(hand, at, **KNOWS)


@pytest.mark.parametrize(
    ("wire", "sealed", "says"),
    [
        (F32, SEAL, "an update in f32; expected mask32"),
        (format_of("mask16"), SEAL, "an update in mask16; expected mask32"),
        (format_of("mask32"), None, "needs the seal"),
    ],
)
async def test_update_that_is_not_masked_and_sealed_is_refused_before_its_bytes_are_read(
    make: Any, redis: RedisSettings, wire: Format, sealed: str | None, says: str
) -> None:
    hand = await created(make)
    async with coordinating(hand, redis), serving(hand, redis) as at:
        sender = await _sender(hand, at, wire, sealed)
        answer = await sender.posts(at, sender.data)
        assert answer.refusal == (422, "format")
        assert says in answer.said["error"]
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []


async def test_masked_update_reaches_the_queue_with_its_seal(
    make: Any, redis: RedisSettings
) -> None:
    """As large as one with ML-KEM, whose seed takes 1,168 bytes."""
    hand, seal = await created(make), bytes(range(256)) * 8
    async with coordinating(hand, redis), serving(hand, redis) as at:
        sender = await _sender(hand, at, format_of("mask32"), base64.b64encode(seal).decode())
        assert (await sender.posts(at, sender.data)).receipt == (200, "admitted", None)
    upload, data = await queued(hand)
    assert (upload.sealed, data) == (seal, sender.data)


async def test_masked_update_is_refused_in_a_run_that_is_not_private(
    make: Any, redis: RedisSettings
) -> None:
    hand = await make(64)
    async with coordinating(hand, redis), serving(hand, redis) as at:
        sender = await _sender(hand, at, format_of("mask32"), SEAL)
        assert sender.offer.private is None
        assert (await sender.posts(at, sender.data)).refusal == (422, "format")


@pytest.mark.parametrize(
    ("update", "supernodes", "says"),
    [
        ("int8", False, r"wire\.update = 'int8': run .* is private"),
        ("f32", True, r"gateway\.flower_app: run .* is private"),
    ],
)
def test_gateway_that_cannot_serve_a_private_run_ends(
    hand: Hand, update: str, supernodes: bool, says: str
) -> None:
    cache = RunCache(hand.ledger, format_of(update), supernodes=supernodes)  # type: ignore[arg-type]
    hand.layout = layout_of(64)
    with pytest.raises(ConfigError, match=says):
        cache._check(hand.run(policy=POLICY.text.decode(), sends="delta"))


async def _sender(hand: Hand, at: Place, wire: Format, sealed: str | None) -> Sender:
    """A device that has trained a task, and sends this."""
    await joined(hand, at, **KNOWS)
    await hand.open(device=3)
    offer = (await at.check_in(3, wait_s=50, **KNOWS)).offer
    report = {} if sealed is None else {"sealed": sealed}
    plain = trained(hand, offer, F32, format=wire.name, **report)
    data = plain.data[: wire.sizes(hand.layout)[1]]
    return Sender(offer, data, plain.report, offer.task.device)
