"""Downloading a model: once, from where it was cut, and only the bytes of its digest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedstream.broker.errors import BlobDamaged, Unavailable
from fedstream.broker.layout import Model
from fedstream.device.gateway import OwnGateway
from fedstream.device.models import ModelStore, Superseded
from fedstream.wire import format_of
from fedstream.wire.given import given
from tests.device.fake import FakeGateway
from tests.support import layout_of, model_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def store(own: OwnGateway, folder: Path) -> ModelStore:
    return ModelStore(own, folder, lambda _what: None)


def names(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


def downloads(gateway: FakeGateway) -> int:
    return sum(one.startswith("GET /v1/models/") for one in gateway.asked)


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "f32+zstd", "int8+zstd"])
async def test_model_is_what_a_trainer_would_read(
    store: ModelStore, gateway: FakeGateway, model: Model, name: str
) -> None:
    offered = gateway.offer(model, published=name, version=3).model
    found = await store.model(offered, model.layout)
    copy = given(model, format_of(name), version=3, sends="model")
    expected = Model(model.layout)
    format_of(name).decode(copy.payload.buffer, expected)
    np.testing.assert_array_equal(found.buffer, expected.buffer)
    assert store.has == offered.digest


async def test_model_that_is_there_is_not_downloaded_again(
    store: ModelStore, gateway: FakeGateway, model: Model, own: OwnGateway, folder: Path
) -> None:
    offered = gateway.offer(model).model
    await store.model(offered, model.layout)
    again = await ModelStore(own, folder, lambda _what: None).model(offered, model.layout)
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
    with pytest.raises(BlobDamaged, match=f"expected {offered.digest}"):
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
        assert "more bytes of the model than it said" in str(trouble)
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
