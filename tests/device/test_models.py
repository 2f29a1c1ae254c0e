"""Downloading a model: once, from where it was cut, and only the bytes of its digest."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard

from fedstream.core.digest import algorithm_of
from fedstream.core.errors import BlobDamaged, Unavailable
from fedstream.core.formats import format_of
from fedstream.core.given import given
from fedstream.core.layout import Model
from fedstream.device.gateway import OwnGateway
from fedstream.device.models import ModelStore, Superseded
from fedstream.protocol.messages import OfferedModel
from tests.device.fake import FakeGateway
from tests.support import layout_of, model_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def store_of(own: OwnGateway, folder: Path, said: list[str] | None = None) -> ModelStore:
    say = (lambda _line: None) if said is None else said.append
    return ModelStore(own, folder, say, lambda _what: None)


@pytest.fixture
def store(own: OwnGateway, folder: Path, said: list[str]) -> ModelStore:
    return store_of(own, folder, said)


def names(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


def downloads(gateway: FakeGateway) -> int:
    return sum(one.startswith("GET /v1/models/") for one in gateway.asked)


@pytest.mark.parametrize("name", ["f32", "int8+zstd"])
async def test_model_is_what_a_trainer_would_read(
    store: ModelStore, gateway: FakeGateway, model: Model, name: str
) -> None:
    offered = gateway.offer(model, published=name, version=3).model
    found = await store.model(offered, model.layout)
    copy = given(model, format_of(name), version=3, sends="model", digests="sha256")
    expected = Model(model.layout)
    format_of(name).decode(copy.payload.buffer, expected)
    np.testing.assert_array_equal(found.buffer, expected.buffer)
    assert store.has == offered.digest


@pytest.mark.parametrize("name", ["f32", "bf16+zstd"])
async def test_model_is_checked_by_what_made_its_digest(
    store: ModelStore, gateway: FakeGateway, model: Model, name: str
) -> None:
    gateway.digests = "blake3"
    offered = gateway.offer(model, published=name).model
    assert algorithm_of(offered.digest) == "blake3"
    await store.model(offered, model.layout)
    assert store.has == offered.digest
    other = offered.model_copy(update={"digest": f"{'0' * 64}-blake3"})
    gateway.models[other.digest] = gateway.models[offered.digest]
    with pytest.raises(BlobDamaged):
        await store.model(other, model.layout)


async def test_model_that_is_there_is_not_downloaded_again(
    store: ModelStore, gateway: FakeGateway, model: Model, own: OwnGateway, folder: Path
) -> None:
    offered = gateway.offer(model).model
    await store.model(offered, model.layout)
    again = await store_of(own, folder).model(offered, model.layout)
    assert again.digest() == model.digest()
    assert downloads(gateway) == 1


async def test_newer_model_takes_the_olds_place(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path
) -> None:
    await store.model(gateway.offer(model).model, model.layout)
    newer = model.copy()
    newer.floats[0] += 1
    await store.model(gateway.offer(newer).model, model.layout)
    assert names(folder) == [newer.digest()]


async def test_cut_download_goes_on_where_it_stopped(
    store: ModelStore, gateway: FakeGateway
) -> None:
    large = model_of(layout_of(500_000), 0.5)
    offered = gateway.offer(large).model
    shown = list[str]()
    store._show = shown.append
    for after, arrived in ((700_000, "35%"), (900_000, "80%")):
        until = partial(lambda share: shown[-1].endswith(share) if shown else False, arrived)
        gateway.fails("GET", "/v1/models/", after=after, until=until)
    asked: list[str | None] = []
    connection = store._gateway.connection
    opened = connection.opened

    def noted(method: str, path: str, **how: object) -> object:
        nonlocal asked
        headers = how.get("headers")
        assert isinstance(headers, dict)
        asked += [headers.get("Range")] if method == "GET" else []
        return opened(method, path, **how)  # type: ignore[arg-type]

    connection.opened = noted  # type: ignore[method-assign, assignment]
    found = await store.model(offered, large.layout)
    assert found.digest() == large.digest()
    assert asked == [None, "bytes=700000-", "bytes=1600000-"]
    assert shown[-1] == "downloading the model: 100%"


async def test_part_of_another_process_is_used(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path
) -> None:
    offered = gateway.offer(model).model
    (folder / f"{offered.digest}.part").write_bytes(model.buffer.tobytes()[:100])
    (folder / f"{'0' * 64}.part").write_bytes(b"of another model")
    assert (await store.model(offered, model.layout)).digest() == model.digest()
    assert names(folder) == [offered.digest]


@pytest.mark.parametrize("length", [100, 10_000])
async def test_damaged_part_is_replaced(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path, length: int
) -> None:
    offered = gateway.offer(model).model
    part = folder / f"{offered.digest}.part"
    part.write_bytes(b"x" * length)
    if length < offered.size:
        with pytest.raises(BlobDamaged):  # found when all of it is there
            await store.model(offered, model.layout)
        assert not part.exists()
    assert (await store.model(offered, model.layout)).digest() == model.digest()


async def test_damaged_file_is_downloaded_again(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path
) -> None:
    offered = gateway.offer(model).model
    (folder / offered.digest).write_bytes(b"\0" * offered.size)
    assert (await store.model(offered, model.layout)).digest() == model.digest()
    assert downloads(gateway) == 1


async def test_bytes_of_another_digest_are_refused(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path
) -> None:
    offered = gateway.offer(model).model
    gateway.models[offered.digest] = b"\0" * offered.size
    with pytest.raises(BlobDamaged, match=f"not {offered.digest}"):
        await store.model(offered, model.layout)
    assert names(folder) == []


async def test_more_bytes_than_offered_are_not_kept(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    offered = gateway.offer(model).model
    right = gateway.models[offered.digest]
    gateway.models[offered.digest] = right + b"\0"
    wait = store._gateway.connection.wait

    async def mended(trouble: object) -> None:
        assert "more bytes of the model than announced" in str(trouble)
        gateway.models[offered.digest] = right
        await wait(trouble)  # type: ignore[arg-type]

    store._gateway.connection.wait = mended  # type: ignore[method-assign]
    assert (await store.model(offered, model.layout)).digest() == model.digest()


async def test_model_of_an_impossible_size_is_not_downloaded(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    offered = gateway.offer(model).model.model_copy(update={"size": 1 << 50})
    with pytest.raises(BlobDamaged, match="1125899906842624 bytes, not 368"):
        await store.model(offered, model.layout)
    assert downloads(gateway) == 0


async def test_superseded_model_is_told(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    offered = gateway.offer(model).model
    gateway.models.clear()
    with pytest.raises(Superseded):
        await store.model(offered, model.layout)


async def test_expired_token_is_renewed(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    gateway.fails("GET", "/v1/models/", status=401, reason="token")
    await store.model(gateway.offer(model).model, model.layout)
    assert gateway.asked.count("POST /v1/token") == 2


async def test_unknown_format_says_what_to_do(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    offered = gateway.offer(model).model.model_copy(update={"format": "f64"})
    with pytest.raises(Unavailable, match="does not know: upgrade"):
        await store.model(offered, model.layout)


# what changed


def moved(model: Model, by: float = 1e-3) -> Model:
    """The next version."""
    newer = model.copy()
    newer.parameters[:] += np.float32(by)
    return newer


def of_changes(gateway: FakeGateway) -> list[str]:
    """Which downloads were of changes, and which of a model."""
    paths = [one for one in gateway.asked if one.startswith("GET /v1/models/")]
    return ["changes" if "/changes/" in one else "model" for one in paths]


@pytest.mark.parametrize("name", ["f32", "bf16", "int8+zstd"])
async def test_newer_model_is_made_of_what_changed(
    store: ModelStore, gateway: FakeGateway, own: OwnGateway, model: Model, folder: Path, name: str
) -> None:
    offer = gateway.offer(model, published=name)
    await store.model(offer.model, model.layout)
    for version in (1, 2):
        newer = moved(model, 1e-3 * version)
        offer = gateway.offer(newer, published=name, version=version, since=offer)
        store = store_of(own, folder)  # also after a restart
        found = await store.model(offer.model, model.layout)
        expected = Model(model.layout)
        published = np.frombuffer(gateway.models[offer.model.digest], np.uint8)
        format_of(name).decode(published, expected)
        np.testing.assert_array_equal(found.buffer, expected.buffer)
        found.floats[:] = 0  # training may write into it
        assert names(folder) == [offer.model.digest]
    assert of_changes(gateway) == ["model", "changes", "changes"]


async def large_changes(store: ModelStore, gateway: FakeGateway) -> tuple[Model, OfferedModel, str]:
    """A large model, offered to a store that has the one before, and the URL of what changed."""
    large = model_of(layout_of(500_000), 0.5)
    large.parameters[:] = np.random.default_rng(0).normal(0, 0.1, 500_000)
    first = gateway.offer(large)
    await store.model(first.model, large.layout)
    newer = moved(large)
    offered = gateway.offer(newer, since=first).model
    assert offered.changes is not None
    return newer, offered, offered.changes


async def test_cut_changes_go_on_where_they_stopped(
    store: ModelStore, gateway: FakeGateway
) -> None:
    newer, offered, url = await large_changes(store, gateway)
    size = len(gateway.changes[url])
    shown = list[str]()
    store._show = shown.append
    arrived = f"{300_000 / size:.0%}"
    gateway.fails("GET", url, after=300_000, until=lambda: arrived in str(shown[-1:]))
    found = await store.model(offered, newer.layout)
    assert found.digest() == newer.digest()
    assert of_changes(gateway) == ["model", "changes", "changes"]
    assert gateway.ranges[-1] == "bytes=300000-"


async def test_other_changes_after_a_cut_replace_what_came(
    store: ModelStore, gateway: FakeGateway
) -> None:
    """Another replica may have another compressor."""
    newer, offered, url = await large_changes(store, gateway)
    inside = zstandard.ZstdDecompressor().decompress(gateway.changes[url])
    shown = list[str]()
    store._show = shown.append

    def other() -> bool:
        gateway.changes[url] = zstandard.ZstdCompressor(level=5).compress(inside)
        return bool(shown)

    gateway.fails("GET", url, after=300_000, until=other)
    assert (await store.model(offered, newer.layout)).digest() == newer.digest()
    assert of_changes(gateway) == ["model", "changes", "changes"]


async def test_gateway_without_changes_sends_the_model(
    store: ModelStore, gateway: FakeGateway, model: Model, said: list[str]
) -> None:
    first = gateway.offer(model)
    await store.model(first.model, model.layout)
    newer = moved(model)
    offer = gateway.offer(newer, since=first)
    gateway.changes.clear()
    assert (await store.model(offer.model, model.layout)).digest() == newer.digest()
    assert of_changes(gateway) == ["model", "changes", "model"]
    assert store.bad_changes == 0
    assert said == []


def bomb(_changes: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(1 << 20))


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (lambda _changes: b"no frame", "not a Zstandard frame"),
        (lambda changes: changes[:-1], "not a Zstandard frame"),
        (bomb, "a frame of 1048576 bytes"),
        (lambda _changes: zstandard.ZstdCompressor().compress(bytes(368)), "with digest"),
        (lambda _changes: zstandard.ZstdCompressor().compress(bytes(364)), "changes of 364 bytes"),
        (lambda changes: changes + bytes(10_000), "10.* bytes of changes, for a model of 368"),
        (lambda _changes: b"", "0 bytes of changes"),
    ],
    ids=["noise", "cut", "bomb", "other model", "too few", "too many", "none"],
)
async def test_bad_changes_cost_no_more_than_the_model(
    store: ModelStore,
    gateway: FakeGateway,
    model: Model,
    said: list[str],
    folder: Path,
    spoilt: Callable[[bytes], bytes],
    why: str,
) -> None:
    first = gateway.offer(model)
    await store.model(first.model, model.layout)
    newer = moved(model)
    offer = gateway.offer(newer, since=first)
    assert offer.model.changes is not None
    gateway.changes[offer.model.changes] = spoilt(gateway.changes[offer.model.changes])
    assert (await store.model(offer.model, model.layout)).digest() == newer.digest()
    assert of_changes(gateway) == ["model", "changes", "model"]
    assert store.bad_changes == 1
    [line] = said
    assert re.search(why, line)
    assert line.endswith("; downloading all of it")
    assert names(folder) == [newer.digest()]


async def test_damaged_older_model_spoils_nothing(
    store: ModelStore, gateway: FakeGateway, model: Model, folder: Path
) -> None:
    first = gateway.offer(model)
    await store.model(first.model, model.layout)
    (folder / first.model.digest).write_bytes(bytes(first.model.size))
    newer = moved(model)
    offer = gateway.offer(newer, since=first)
    assert (await store.model(offer.model, model.layout)).digest() == newer.digest()
    assert store.bad_changes == 1


async def test_changes_are_not_asked_for_again_and_again_in_vain(
    store: ModelStore, gateway: FakeGateway, model: Model
) -> None:
    offer, newer = gateway.offer(model), model
    await store.model(offer.model, model.layout)
    for _ in range(5):
        newer = moved(newer)
        offer = gateway.offer(newer, since=offer)
        gateway.changes = dict.fromkeys(gateway.changes, b"no frame")
        assert (await store.model(offer.model, model.layout)).digest() == newer.digest()
    assert of_changes(gateway).count("changes") == 3
