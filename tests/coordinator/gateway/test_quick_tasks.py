"""What a task needs of a gateway bypasses aiohttp, if it is asked for plainly."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.coordinator.gateway.uploading import BY_AIOHTTP, DEVICE, SEVERAL, Scene
from tests.support import counted

_PARAMETERS = 60_000  # 240 kB, which one write sends


async def test_plain_requests_of_a_task_bypass_aiohttp(
    make: Any, scene: Scene, by_aiohttp: list[str]
) -> None:
    hand = await make(_PARAMETERS)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        model = phone.offer.model
        got = await at.ask("GET", model.url, DEVICE)
        assert (got.status, hashlib.sha256(got.body).hexdigest()) == (200, model.digest)
        assert (await phone.posts(at, complete=False)).status == 201
        async with scene.deciding():
            assert (await phone.patches(at, 0)).receipt == (200, "admitted", None)
    assert by_aiohttp == []
    await hand.balanced()


async def test_other_requests_are_left_to_aiohttp(
    make: Any, scene: Scene, by_aiohttp: list[str]
) -> None:
    await make(_PARAMETERS)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        url = phone.offer.model.url
        part = await at.ask("GET", url, DEVICE, headers={"Range": "bytes=0-9"})
        assert (part.status, len(part.body)) == (206, 10)
        assert (await at.ask("HEAD", url, DEVICE)).status == 200
        assert (await phone.posts(at, complete=False)).status == 201
        assert (await phone.looks(at)).status == 204
        phone.always = BY_AIOHTTP
        async with scene.deciding():
            assert (await phone.patches(at, 0)).receipt == (200, "admitted", None)
    assert by_aiohttp == ["GET", "HEAD", "HEAD", "PATCH"]


async def test_large_model_is_left_to_aiohttp(
    make: Any, scene: Scene, by_aiohttp: list[str]
) -> None:
    await make(70_000)  # 280 kB
    async with scene.replica() as at:
        phone = await scene.phone(at)
        got = await at.ask("GET", phone.offer.model.url, DEVICE)
        assert hashlib.sha256(got.body).hexdigest() == phone.offer.model.digest
    assert by_aiohttp == ["GET"]


async def test_upload_is_answered_if_its_task_is_cancelled(
    make: Any, scene: Scene, by_aiohttp: list[str]
) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        sending = await scene.sending(at, phone, 9)
        [task] = at.gateway._app._answering
        task.cancel()
        assert await sending.status() == 500
        sending.close()
        assert counted(at.context, "fedstream_gateway_refused_total", reason="internal") == 1
        assert not at.gateway._app._answering
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert by_aiohttp == []
