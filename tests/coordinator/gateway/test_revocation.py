"""A device that is revoked in the middle of its work: all of its work ends."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import aiohttp
import pytest
from yarl import URL

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.upload_state import upload_blob
from fedstream.core import reasons
from fedstream.protocol.headers import as_bearer
from fedstream.protocol.messages import CheckIn, Offer
from tests.coordinator.gateway.phones import Phone, invite, said
from tests.coordinator.gateway.places import SITE, coordinating, ends, joined, owned_by, serving
from tests.coordinator.gateway.uploading import DEVICE, SEVERAL, Scene
from tests.support import Hand, wait_until

pytestmark = pytest.mark.usefixtures("alert")


async def test_its_task_ends_and_its_tokens_too(redis: RedisSettings, hand: Hand) -> None:
    """Long before its lease does."""
    await hand.create()
    async with (
        coordinating(hand, redis),
        serving(hand, redis, identity=None) as place,
        aiohttp.ClientSession(place.url) as http,
    ):
        await invite(hand)
        phone = Phone(http, authority=URL(place.url).authority)  # type: ignore[arg-type]
        await phone.join()

        async def asks(path: str, **body: Any) -> aiohttp.ClientResponse:
            about = {"Authorization": as_bearer(phone.token)}
            return await http.post(path, json=body, headers=about)

        asked = CheckIn(nonce=secrets.token_urlsafe(16), wait_s=50)
        waits = asyncio.create_task(asks("/v1/check-in", **asked.model_dump(mode="json")))
        await owned_by(hand, 3, "gw-0")
        await hand.open(device=3)
        offer = Offer.decode(await (await waits).read())
        beat = f"/v1/tasks/{offer.task.id}/heartbeat"
        assert (await (await asks(beat, attempt=offer.attempt)).json())["go_on"]

        assert await hand.ledger.set_access(SITE, [3], admit=False) == ("set", [3])
        await ends(hand, "given_up", reasons.REVOKED_DEVICE)
        assert await said(await asks(beat, attempt=offer.attempt)) == (401, "token")
        assert await said(await phone.ask_token()) == (401, "revoked")
        await owned_by(hand, 3, None)

        assert await hand.ledger.set_access(SITE, [3], admit=True) == ("set", [3])

        async def is_let_in() -> bool:
            return (await asks(beat, attempt=offer.attempt)).status == 200

        await wait_until(is_let_in)
        assert not (await (await asks(beat, attempt=offer.attempt)).json())["go_on"]


async def test_what_had_arrived_of_its_update_is_deleted(make: Any, scene: Scene) -> None:
    """Also while more of it is on its way, which is taken no more."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        sending = await scene.sending(at, phone, 2 * CHUNK + 9)
        blob = upload_blob(hand.client, hand.keys, SITE, phone.offer.task.id, phone.offer.attempt)
        assert (await blob.written()).chunks
        async with scene.deciding():
            await hand.ledger.set_access(SITE, [DEVICE], admit=False)
            await ends(hand, "given_up", reasons.REVOKED_DEVICE)
            sending.writer.write(phone.data[2 * CHUNK + 9 :])
            assert await sending.status() == 403
        sending.close()
        written = await blob.written()
        assert (written.chunks, written.note) == (None, None)


async def test_who_waits_is_sent_away_and_others_are_not(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        revoked = asyncio.create_task(place.check_in(3, wait_s=50))
        other = asyncio.create_task(place.check_in(4, wait_s=50))
        await owned_by(hand, 3, "gw-0")
        await owned_by(hand, 4, "gw-0")
        await hand.ledger.set_access(SITE, [3], admit=False)
        assert (await revoked).status == 204
        await owned_by(hand, 3, None)
        assert not other.done()
        await hand.open(device=4)
        assert (await other).offer.task.device == 4


async def test_task_that_comes_later_ends_as_well(redis: RedisSettings, hand: Hand) -> None:
    """It was on its way, or the gateway was not there when its device was revoked."""
    await hand.create()
    async with coordinating(hand, redis, trainer_silence_s=60.0):
        async with serving(hand, redis) as place:
            await joined(hand, place)
            await hand.open(device=3)
            await place.check_in(3, wait_s=50)
        await hand.ledger.set_access(SITE, [3], admit=False)
        async with serving(hand, redis):
            await ends(hand, "given_up", reasons.REVOKED_DEVICE)
