"""Changes since the model that a device has: exact, made once, and only if they are smaller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway import changes as made
from fedstream.coordinator.gateway.byte_cache import CachedBytes
from fedstream.coordinator.gateway.changes import ModelChanges, NotWorthIt
from fedstream.core import changes, compressed
from fedstream.core.digest import DigestAlgorithm, digest_of
from fedstream.core.formats import format_of
from fedstream.core.given import given
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Encoded, Version
from fedstream.core.records import head_of
from tests.coordinator.gateway.places import Place, coordinating, joined, serving
from tests.support import Hand, counted, layout_of, model_of, wait_until, with_frozen

SIZE = 20_000  # parameters


def trained(layout: Layout, versions: int, step: float = 1e-3) -> list[Model]:
    """Versions that differ by a hundredth of the weights' size."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.1, layout.floats).astype(np.float32)
    found = []
    for _ in range(versions):
        found.append(model_of(layout, *x.tolist()))
        x = x + rng.normal(0, step, x.size).astype(np.float32)
    return found


async def publish(
    hand: Hand, models: Sequence[Model], name: str = "f32", digests: DigestAlgorithm = "sha256"
) -> list[Version]:
    """A run whose versions will be these models: they are written, and not committed yet."""
    await hand.create()
    versions = []
    for number, model in enumerate(models, 1):
        one = given(model, format_of(name), version=number, sends="delta", digests=digests)
        about: Encoded | None = one.encoded
        version = Version(
            version=number,
            time=1.0,
            epoch=1,
            parent=number - 1,
            digest=model.digest(digests),
            blob=f"{number}.x",
            size=one.payload.buffer.nbytes,
            format=about.format if about else "f32",
            given=about.digest if about else None,
        )
        key = hand.keys.model(version.blob)
        await blobs.write(hand.client, key, one.payload, expire_s=60, encoded=about)
        versions.append(version)
    return versions


def known_as(version: Version) -> str:
    """What devices know a model by."""
    return version.given or version.digest


async def commit(place: Place, hand: Hand, *versions: Version) -> None:
    """Versions come, one after the other, and the gateway sees each."""
    for version in versions:
        assert await hand.commit(version.version, write=False, versions=[version]) == "done"
        await place.gateway.replica.run_cache.look()


async def downloaded(place: Place, hand: Hand, *versions: Version) -> list[bytes]:
    """Versions come, and are downloaded, so that they are in the gateway's memory."""
    found = []
    for version in versions:
        await commit(place, hand, version)
        answer = await place.ask("GET", f"/v1/models/{known_as(version)}", 9)
        assert answer.status == 200
        found.append(answer.body)
    return found


def between(old: Version, new: Version) -> str:
    return f"/v1/models/{known_as(new)}/changes/{known_as(old)}"


def counted_makes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time that changes are made."""
    makes = list[int]()
    between_ = made._between

    def counting(*arguments: object) -> object:
        makes.append(1)
        return between_(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(made, "_between", counting)
    return makes


@pytest.mark.parametrize(
    ("name", "algorithm"), [("f32", "blake3"), ("bf16", "sha256"), ("int8+zstd", "sha256")]
)
async def test_offer_names_what_changed_since_the_devices_model(
    redis: RedisSettings, hand: Hand, name: str, algorithm: DigestAlgorithm
) -> None:
    hand.layout = layout_of(SIZE, buffers=2)
    old, new = await publish(hand, trained(hand.layout, 2), name, algorithm)
    how = format_of(name)
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        whole = await downloaded(place, hand, old, new)
        await hand.open(device=3)
        offer = (await place.check_in(3, wait_s=50, has=known_as(old), formats=[name])).offer
        assert offer.model.changes == between(old, new)
        answer = await place.ask("GET", offer.model.changes, 3)
        assert answer.status == 200
        assert len(answer.body) < 0.9 * len(whole[1])
        before, after = (np.frombuffer(one, np.uint8) for one in whole)
        if how.zstd:
            before, after = (compressed.decode(one, 1 << 20) for one in (before, after))
        frame = np.frombuffer(answer.body, np.uint8)
        found = changes.decode(before, frame, changes.width_of(how.kind))
        assert digest_of(found.data, algorithm) == known_as(new)
        assert bytes(found) == bytes(after)
        assert answer.headers["Etag"] == f'"{digest_of(answer.body, algorithm)}"'
        assert answer.headers["Fedstream-Format"] == f"{name.removesuffix('+zstd')}+changes"
        assert "immutable" in answer.headers["Cache-Control"]
        saved = len(whole[1]) - len(answer.body)
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == saved
        kept = place.context.registry.get_sample_value("fedstream_gateway_changes_bytes")
        assert kept == len(answer.body)


async def test_offer_names_no_changes_that_there_are_not(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(SIZE)
    old, new = await publish(hand, trained(hand.layout, 2))
    async with serving(hand, redis) as place:
        await commit(place, hand, old, new)
        models, head = place.gateway._models, place.gateway.replica.run_cache.head
        assert models.changes_url(head, old.digest) is None, "it is not in memory"
        assert (await place.ask("GET", f"/v1/models/{old.digest}", 9)).status == 200
        assert models.changes_url(head, old.digest) == between(old, new)
        for has in (None, new.digest, "0" * 64):
            assert models.changes_url(head, has) is None


async def test_setting_of_zero_bytes_turns_changes_off(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(SIZE)
    old, new = await publish(hand, trained(hand.layout, 2))
    async with serving(hand, redis, changes_bytes=0) as place:
        await downloaded(place, hand, old, new)
        models, head = place.gateway._models, place.gateway.replica.run_cache.head
        assert models.changes_url(head, old.digest) is None
        answer = await place.ask("GET", between(old, new), 3)
        assert (answer.status, answer.json["reason"]) == (404, "no changes")


async def test_changes_that_save_nothing_are_made_once(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as after a run was begun anew: the device downloads the model."""
    hand.layout = layout_of(SIZE)
    old, new = await publish(hand, trained(hand.layout, 2, step=100.0))
    makes = counted_makes(monkeypatch)
    async with serving(hand, redis) as place:
        await downloaded(place, hand, old)
        await commit(place, hand, new)
        models, head = place.gateway._models, place.gateway.replica.run_cache.head
        assert models.changes_url(head, old.digest) is not None
        for _ in range(2):
            answer = await place.ask("GET", between(old, new), 3)
            assert (answer.status, answer.json["reason"]) == (404, "no changes")
        assert models.changes_url(head, old.digest) is None
        assert models.changes_bytes == 0
        assert len(makes) == 1


async def test_device_cannot_have_changes_made_between_any_two_models(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only up to the newest, or one that was the newest when they were offered."""
    hand.layout = layout_of(SIZE)
    first, second, third, fourth = await publish(hand, trained(hand.layout, 4))
    makes = counted_makes(monkeypatch)
    async with serving(hand, redis) as place:
        models, current = place.gateway._models, place.gateway.replica.run_cache

        async def asks(old: Version, new: Version) -> int:
            return (await place.ask("GET", between(old, new), 3)).status

        await downloaded(place, hand, first, second, third)
        assert [await asks(first, second), await asks(third, second)] == [404, 404]
        assert makes == []
        assert await asks(first, third) == 200
        assert models.changes_url(current.head, second.digest) == between(second, third)
        await downloaded(place, hand, fourth)
        assert await asks(second, third) == 200, "offered before there was a newer one"
        assert await asks(first, third) == 200, "made before"
        assert len(makes) == 2
        assert await asks(fourth, third) == 404, "neither"
        assert await asks(third, fourth) == 200
        assert len(makes) == 3


async def test_frozen_parameters_are_no_model_to_change(redis: RedisSettings, hand: Hand) -> None:
    """A device may say that it has them in place of a version."""
    hand.layout = with_frozen(layout_of(SIZE), *range(100))
    unshared = hand.layout.unshared
    assert unshared is not None
    [new] = await publish(hand, trained(hand.layout, 1))
    head = head_of(unshared)
    key = hand.keys.model(head.blob)
    await blobs.write(hand.client, key, unshared.model(), expire_s=60, encoded=head.encoded)
    async with serving(hand, redis) as place:
        await downloaded(place, hand, new)
        assert (await place.ask("GET", f"/v1/models/{unshared.digest}", 3)).status == 200
        models, current = place.gateway._models, place.gateway.replica.run_cache.head
        assert models.changes_url(current, unshared.digest) is None
        answer = await place.ask("GET", f"/v1/models/{new.digest}/changes/{unshared.digest}", 3)
        assert (answer.status, answer.json["reason"]) == (404, "no changes")


def test_last_offers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_REMEMBERED", 2)
    store = ModelChanges(1)
    for old in ("a", "b", "a", "c"):
        store.offer(old, "new")
    assert [store.is_offered(old, "new") for old in "abc"] == [True, False, True]


async def test_cut_download_of_changes_goes_on(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(SIZE)
    old, new = await publish(hand, trained(hand.layout, 2))
    async with serving(hand, redis) as place:
        [_, model] = await downloaded(place, hand, old, new)
        url = between(old, new)
        whole = await place.ask("GET", url, 3)
        tag, size = whole.headers["Etag"], len(whole.body)
        saved = counted(place.context, "fedstream_gateway_saved_bytes_total")
        assert saved == len(model) - size

        async def part(asked: str, if_range: str) -> tuple[int, bytes, str | None]:
            about = {"Range": asked, "If-Range": if_range}
            answer = await place.ask("GET", url, 3, headers=about)
            return answer.status, answer.body, answer.headers.get("Content-Range")

        assert await part("bytes=0-9", tag) == (206, whole.body[:10], f"bytes 0-9/{size}")
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == saved
        rest = f"bytes 10-{size - 1}/{size}"
        assert await part("bytes=10-", tag) == (206, whole.body[10:], rest)
        for _ in range(3):
            assert (await part("bytes=-1", tag))[:2] == (206, whole.body[-1:])
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == saved
        assert (await part("bytes=0-", tag))[:2] == (206, whole.body)
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == 2 * saved
        of_the_model = f'"{new.digest}"'
        assert await part("bytes=10-", of_the_model) == (200, whole.body, None)
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == 3 * saved
        status, _, there = await part(f"bytes={size}-", tag)
        assert (status, there) == (416, f"bytes */{size}")
        answer = await place.ask("GET", url, 3, headers={"If-None-Match": tag})
        assert (answer.status, answer.body) == (304, b"")
        head = await place.ask("HEAD", url, 3)
        assert (head.status, head.body) == (200, b"")
        assert counted(place.context, "fedstream_gateway_saved_bytes_total") == 3 * saved
        assert int(head.headers["Content-Length"]) == size
        assert (await place.ask("GET", url)).status == 401


async def test_no_room_for_changes_means_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for good: there may be room the next time."""
    layout = layout_of(SIZE)
    a, b, c = (CachedBytes(one.buffer.data, one.digest(), "f32") for one in trained(layout, 3))
    store = ModelChanges(layout.nbytes)
    found = await store.get(a, c, layout)
    with found.read(), pytest.raises(NotWorthIt, match="no room"):
        await store.get(b, c, layout)
    assert store.may_help(b.digest, c.digest)
    assert (await store.get(b, c, layout)).data.nbytes < layout.nbytes
    await wait_until(lambda: store.nbytes <= layout.nbytes)
