"""Models as blobs: whole and undamaged, or a clear no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import Keys
from fedstream.core.digest import DigestAlgorithm
from fedstream.core.errors import BlobDamaged, BlobMissing, OutOfMemory
from fedstream.core.layout import Model
from tests.support import full, layout_of

MIB = blobs.CHUNK // 4  # floats


def random_model(floats: int, integers: int = 0) -> Model:
    model = Model(layout_of(floats, integers=integers))
    rng = np.random.default_rng(floats)
    model.floats[:] = rng.standard_normal(floats)
    model.integers[:] = 7
    return model


@pytest.mark.parametrize(
    ("floats", "algorithm"),
    [
        (0, "sha256"),
        (MIB, "sha256"),
        (MIB + 1, "blake3"),
        (blobs.WINDOW * MIB, "blake3"),
        (2 * blobs.WINDOW * MIB + 5, "sha256"),
    ],
)
async def test_model_of_any_size_round_trips(
    client: Client, keys: Keys, floats: int, algorithm: DigestAlgorithm
) -> None:
    model = random_model(floats, integers=1)
    key = keys.model("1.1")
    await blobs.write(client, key, model, expire_s=60)
    again = Model(model.layout)
    await blobs.read(client, key, again, digest=model.digest(algorithm), chunks=None)
    assert again.buffer.tobytes() == model.buffer.tobytes()
    assert 0 < await client.call("PTTL", key) <= 60_000
    chunks = -(-model.layout.nbytes // blobs.CHUNK)
    assert await client.call("HLEN", key) == 1 + chunks


async def test_empty_model_exists_or_not(client: Client, keys: Keys) -> None:
    nothing = Model(layout_of(0))
    with pytest.raises(BlobMissing):
        await blobs.read(client, keys.model("1.1"), nothing, digest=nothing.digest(), chunks=None)
    await blobs.write(client, keys.model("1.1"), nothing, expire_s=60)
    await blobs.read(client, keys.model("1.1"), nothing, digest=nothing.digest(), chunks=None)


async def test_small_model_is_sent_with_the_next_command(client: Client, keys: Keys) -> None:
    for number, floats in enumerate((0, 3, MIB // 4, MIB // 4 + 1)):
        model, key = random_model(floats), keys.update(f"a.{number}")
        ahead = await blobs.prepare(client, key, model, expire_s=60)
        assert bool(ahead) == (model.buffer.nbytes <= blobs.CHUNK)
        assert await client.call("EXISTS", key) == (not ahead)
        await client.pipeline([*ahead, ("PING",)])
        await blobs.read(client, key, Model(model.layout), digest=model.digest(), chunks=None)
        assert 0 < await client.call("PTTL", key) <= 60_000


async def test_expiry_is_set_before_the_first_chunk(client: Client, keys: Keys) -> None:
    async with full(client):
        with pytest.raises(OutOfMemory):
            await blobs.write(client, keys.model("1.1"), random_model(3), expire_s=60)
    assert await client.call("EXISTS", keys.model("1.1")) == 0


async def test_expiry_is_renewed_every_few_chunks(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a model takes, it does not expire while it is being written."""
    real, key, left_ms = client.pipeline, keys.model("1.1"), []

    async def slowly(commands: Sequence[Command]) -> list[Any]:
        """Before the next ones are sent, almost all of the time has passed."""
        replies = await real(commands)
        left, _ = await real([("PTTL", key), ("PEXPIRE", key, 20_000)])
        left_ms.append(left)
        return replies

    monkeypatch.setattr(client, "pipeline", slowly)
    model = random_model((2 * blobs.WINDOW + 1) * MIB)
    await blobs.write(client, key, model, expire_s=600)
    assert len(left_ms) == 4  # its size, and three times some chunks
    assert min(left_ms) > 300_000


async def test_small_blobs_are_read_in_one_exchange(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as if alone: what is missing or damaged does no harm to the others."""
    models = [random_model(floats) for floats in (MIB // 16, 3, 0, MIB // 8, 5, 4)]
    wanted = [
        blobs.Wanted(keys.update(f"a.{n}"), Model(model.layout), model.digest(), None)
        for n, model in enumerate(models)
    ]
    for one, model in zip(wanted, models, strict=True):
        await blobs.write(client, one.key, model, expire_s=60)
    await client.call("HSET", wanted[0].key, 0, models[0].buffer[:-1].tobytes())
    await client.call("HSET", wanted[1].key, 0, models[1].buffer.tobytes() + b"more")
    await client.call("DEL", wanted[4].key)
    await client.call("HDEL", wanted[5].key, 0)
    exchanges, real = 0, client.pipeline

    async def counted(*about: Any, **more: Any) -> list[Any]:
        nonlocal exchanges
        exchanges += 1
        return await real(*about, **more)

    monkeypatch.setattr(client, "pipeline", counted)
    short, long, *well, missing, empty = await blobs.read_together(client, wanted)
    assert exchanges == 1
    assert ("ends after" in str(short), "too long" in str(long)) == (True, True)
    assert well == [None, None]
    assert (type(missing), type(empty)) == (BlobMissing, BlobMissing)
    for n in (2, 3):
        assert wanted[n].into.buffer.tobytes() == models[n].buffer.tobytes()


async def test_small_blobs_are_read_beside_foreign_values(client: Client, keys: Keys) -> None:
    """A site may write anything under the keys of its own updates."""
    models = [random_model(3), random_model(4), random_model(5)]
    wanted = [
        blobs.Wanted(keys.update(f"a.{n}"), Model(model.layout), model.digest(), None)
        for n, model in enumerate(models)
    ]
    await blobs.write(client, wanted[0].key, models[0], expire_s=60)
    await client.call("SET", wanted[1].key, "mine", "EX", 60)
    await blobs.write(client, wanted[2].key, models[2], expire_s=60)
    first, foreign, last = await blobs.read_together(client, wanted)
    assert (first, type(foreign), last) == (None, BlobDamaged, None)
    for n in (0, 2):
        assert wanted[n].into.buffer.tobytes() == models[n].buffer.tobytes()


async def test_small_blobs_of_many_chunks_are_put_together(client: Client, keys: Keys) -> None:
    """As another release may write them; another digest is noticed."""
    model, key = random_model(1000), keys.update("a.1")
    data = model.buffer.tobytes()
    await client.call("HSET", key, "size", len(data), 0, data[:1500], 1, data[1500:])
    await client.call("PEXPIRE", key, 60_000)
    read = [
        blobs.Wanted(key, Model(model.layout), digest, 2)
        for digest in (model.digest(), model.digest("blake3"), "0" * 64, f"{'0' * 64}-blake3")
    ]
    *well, damaged, other = await blobs.read_together(client, read)
    assert well == [None, None]
    assert f"has digest {model.digest()}, expected" in str(damaged)
    assert f"has digest {model.digest('blake3')}, expected" in str(other)
    assert read[0].into.buffer.tobytes() == data


async def test_missing_blob_is_named(client: Client, keys: Keys) -> None:
    with pytest.raises(BlobMissing, match=r"model:1\.1 does not exist") as raised:
        await blobs.read(client, keys.model("1.1"), random_model(3), digest="", chunks=None)
    assert raised.value.name == keys.model("1.1")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (("HSET", "1", b"short"), "ends after"),
        (("HSET", "0", bytes(blobs.CHUNK + 9)), "too long"),
        (("HSET", "1", bytes(blobs.CHUNK)), "has digest"),
        (("HSET", "size", 4), f"has 4 bytes, expected {2 * blobs.CHUNK + 4}"),
        (("HSET", "size", "many"), "has many bytes"),
    ],
)
async def test_damage_is_detected(
    client: Client, keys: Keys, damage: tuple[str, str, str | bytes], says: str
) -> None:
    model = random_model(2 * MIB + 1)
    key = keys.model("1.1")
    await blobs.write(client, key, model, expire_s=60)
    command, *arguments = damage
    await client.call(command, key, *arguments)
    digest = model.digest("blake3")
    with pytest.raises(BlobDamaged, match=says):
        await blobs.read(client, key, Model(model.layout), digest=digest, chunks=None)


@pytest.mark.parametrize("chunk", [0, 1, 2])
async def test_unwritten_chunk_is_a_missing_blob(client: Client, keys: Keys, chunk: int) -> None:
    model = random_model(2 * MIB + 1)
    await blobs.write(client, keys.model("1.1"), model, expire_s=60)
    await client.call("HDEL", keys.model("1.1"), chunk)
    with pytest.raises(BlobMissing):
        await blobs.read(
            client, keys.model("1.1"), Model(model.layout), digest=model.digest(), chunks=None
        )


async def test_key_of_another_type_is_a_damaged_blob(client: Client, keys: Keys) -> None:
    """Whoever may write updates can put anything in the place of one that was admitted."""
    await client.call("SET", keys.update("a.1"), "x", "PX", 60_000)
    with pytest.raises(BlobDamaged, match=r"update:a\.1 is not a blob"):
        await blobs.read(client, keys.update("a.1"), random_model(3), digest="", chunks=None)
