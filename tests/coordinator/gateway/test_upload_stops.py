"""Uploads whose tasks end while they arrive; and the states and interim responses of uploads."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway.upload_state import upload_blob
from fedstream.core import reasons
from fedstream.core.messages import GiveUp
from tests.coordinator.gateway.places import SITE, Place, coordinating, ends, joined, owned_by
from tests.coordinator.gateway.uploading import DEVICE, SEVERAL, Scene, Sending, connected, trained
from tests.support import Clock, wait_until


@pytest.mark.usefixtures("alert")
async def test_revoked_device_is_refused_where_only_its_note_is_known(
    make: Any, scene: Scene
) -> None:
    """Whoever had its task is away, so nobody has given it up."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
    async with scene.replica(name="gw-1") as another:
        reader, writer = await connected(another)
        about = phone.going_on(CHUNK)
        writer.write(phone.head("PATCH", about, len(phone.data) - CHUNK))
        writer.write(phone.data[CHUNK : 2 * CHUNK])
        blob = upload_blob(hand.client, hand.keys, SITE, phone.offer.task.id, phone.offer.attempt)

        async def has_come() -> bool:
            return (await blob.written()).chunks == 2

        await wait_until(has_come)
        await hand.ledger.set_access(SITE, [DEVICE], admit=False)

        async def is_known() -> bool:
            return DEVICE in await another.gateway._auth.revoked()

        await wait_until(is_known)
        writer.write(phone.data[2 * CHUNK :])
        assert await Sending(reader, writer).status() == 403
        writer.close()
        assert (await blob.written()).note is None
    assert await hand.queue() == []


async def test_rest_of_an_update_that_has_become_too_stale_is_not_taken(
    make: Any, scene: Scene
) -> None:
    """It would be refused when all of it has come: staleness counts from the hand-out."""
    hand = await make(SEVERAL, max_staleness=1)
    async with coordinating(hand, scene.redis), scene.replica() as at:
        await joined(hand, at, DEVICE)
        await hand.open(device=DEVICE)
        phone = trained(hand, (await at.check_in(DEVICE, wait_s=50)).offer)
        sending = await scene.sending(at, phone, CHUNK)
        for version in (1, 2):
            await hand.commit(version)
        await at.gateway.replica.run_cache.look()
        sending.writer.write(phone.data[CHUNK : 2 * CHUNK])
        assert await sending.status() == 422
        sending.close()
        await ends(hand, "given_up", reasons.BECAME_STALE)
        assert (await phone.looks(at)).status == 410, "nothing of it is kept"
        told = await phone.posts(at, phone.data)
        assert told.receipt == (422, "given up", reasons.BECAME_STALE)
        assert (await at.check_in(DEVICE)).status == 204, "the task is not offered again"


async def test_rest_of_an_update_whose_deadline_passes_is_not_taken(
    make: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = await make(SEVERAL)
    clock = Clock(monkeypatch)
    async with coordinating(hand, scene.redis), scene.replica() as at:
        phone = await _in_time(scene, at)
        sending = await scene.sending(at, phone, CHUNK)
        clock.ahead_s = 2 * _DEADLINE_S
        sending.writer.write(phone.data[CHUNK : 2 * CHUNK])
        assert await sending.status() == 422
        sending.close()
        told = await phone.posts(at, phone.data)
        assert told.receipt == (422, "given up", reasons.DEADLINE_PASSED)
        assert (await phone.looks(at)).status == 410
    await hand.balanced()


async def test_what_was_decided_elsewhere_is_told_of_an_update_that_is_not_taken(
    make: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task has ended in another way, which this replica has not noticed yet."""
    hand = await make(SEVERAL)
    clock = Clock(monkeypatch)
    async with coordinating(hand, scene.redis), scene.replica(task_lease_s=3600.0) as at:
        phone = await _in_time(scene, at)
        sending = await scene.sending(at, phone, CHUNK)
        held = at.gateway.replica.sessions.held(phone.offer.task.id, DEVICE)
        elsewhere = GiveUp(
            task=held.task.task,
            attempt=held.attempt,
            device=DEVICE,
            trainer="gw-1",
            reason=reasons.DROPPED_OUT,
        )
        await hand.client.call("XDEL", held.stream, held.entry.id)  # as who answers a task does
        await hand.said(elsewhere, site=SITE)
        await ends(hand, "given_up", reasons.DROPPED_OUT)
        assert phone.offer.task.id in at.gateway.replica.sessions
        clock.ahead_s = 2 * _DEADLINE_S
        sending.writer.write(phone.data[CHUNK : 2 * CHUNK])
        told = await sending.reader.readuntil(b"}")
        assert b" 422 " in told
        assert reasons.DROPPED_OUT.encode() in told
        sending.close()
    assert (await hand.ledger.tally()).reasons("given_up") == {reasons.DROPPED_OUT: 1}


_DEADLINE_S = 3600.0


async def _in_time(scene: Scene, at: Place) -> Any:
    """A device that has trained a task with a deadline far away."""
    await at.check_in(DEVICE)
    await owned_by(scene.hand, DEVICE, "gw-0")
    await scene.hand.open(device=DEVICE, deadline=time.time() + _DEADLINE_S)
    return trained(scene.hand, (await at.check_in(DEVICE, wait_s=50)).offer)


async def test_upload_that_is_over_says_how_long_it_was_or_that_it_is_gone(
    make: Any, scene: Scene
) -> None:
    """By the draft, a good answer to HEAD has Upload-Offset, whatever else."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        state = await phone.looks(at)
        size = str(len(phone.data))
        assert (state.status, state.headers["Upload-Complete"]) == (204, "?1")
        assert (state.headers["Upload-Offset"], state.headers["Upload-Length"]) == (size, size)
        assert "max-size" in state.headers["Upload-Limit"]
        await hand.client.call(
            "DEL", *await hand.client.call("KEYS", hand.keys.upload_note(SITE, "*"))
        )
        assert (await phone.looks(at)).status == 410
        assert (await phone.patches(at, len(phone.data))).receipt == (200, "admitted", None)


async def test_interim_responses_tell_who_speaks_the_draft_how_far_it_is(
    make: Any, scene: Scene
) -> None:
    await make(SEVERAL)
    async with scene.replica() as at, scene.deciding():
        phone = await scene.phone(at)
        version = {"Upload-Draft-Interop-Version": "8"}
        told = await _answers(
            at,
            phone.head("POST", phone.creating() | version, 2 * CHUNK).replace(b"?1", b"?0"),
            phone.data[: 2 * CHUNK],
        )
        assert [one.split()[1] for one in told] == [b"104", b"104", b"104", b"201"]
        for one in told[:3]:
            assert b"Upload-Draft-Interop-Version: 8" in one
        assert f"Location: {phone.path}".encode() in told[0]
        assert b"Upload-Limit: max-size=" in told[0]
        assert b"Upload-Offset: %d\r\n" % CHUNK in told[1]
        rest = phone.data[2 * CHUNK :]
        about = phone.going_on(2 * CHUNK) | {**version, "Expect": "100-continue"}
        told = await _answers(at, phone.head("PATCH", about, len(rest)), rest)
        assert [one.split()[1] for one in told] == [b"100", b"104", b"104", b"104", b"200"]
        assert not any(b"Location" in one for one in told)


async def test_nobody_else_gets_interim_responses(make: Any, scene: Scene) -> None:
    """Many clients take them for the final ones."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for version in ({}, {"Upload-Draft-Interop-Version": "7"}):
            about = phone.creating(complete=False) | version
            told = await _answers(at, phone.head("POST", about, 2 * CHUNK), phone.data[: 2 * CHUNK])
            assert [one.split()[1] for one in told] == [b"201"]


async def _answers(at: Place, head: bytes, body: bytes) -> list[bytes]:
    """The heads of all responses to a request, up to the final one."""
    reader, writer = await connected(at)
    writer.write(head + body)
    heads = [await reader.readuntil(b"\r\n\r\n")]
    while heads[-1].split()[1].startswith(b"1"):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
    writer.close()
    return heads
