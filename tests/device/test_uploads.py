"""Uploading an update: in parts, resumed where it was cut, until its receipt is there."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.core.digest import digest_of
from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.device.connection import TurnedAway
from fedstream.device.folder import FinishedUpdate
from fedstream.device.gateway import OwnGateway
from fedstream.device.uploads import UpdateUpload
from fedstream.protocol.messages import Receipt, UpdateReport
from tests.device.fake import CHUNK, FakeGateway

SIZE = 10_500  # bytes: ten and a half of the gateway's chunks
PART = 4 * CHUNK
ADMITTED = Receipt(state="admitted")
WAITS = Receipt(state="received")


@pytest.fixture
def update(gateway: FakeGateway, model: Model) -> FinishedUpdate:
    """An update of the offered task."""
    offer = gateway.offer(model)
    data = np.random.default_rng(0).integers(256, size=SIZE, dtype=np.uint8)
    report = UpdateReport(
        digest=digest_of(data.data),
        samples=1,
        steps=1,
        lr=0.1,
        tau=0,
        base="0" * 64,
        layout=gateway.layout.signature,
    )
    return FinishedUpdate("task-1", offer.attempt, offer.update.url, report, data, None)


@pytest.fixture
def upload(own: OwnGateway, update: FinishedUpdate) -> UpdateUpload:
    return UpdateUpload(own, update, lambda _what: None, part=PART)


def arrived(gateway: FakeGateway, update: FinishedUpdate) -> bool:
    sent = gateway.sent[update.attempt]
    return sent.complete and bytes(sent.data) == update.data.tobytes()


def methods(gateway: FakeGateway) -> list[str]:
    return [one.split()[0] for one in gateway.asked if "/updates/" in one]


async def test_update_arrives_in_parts(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)
    assert methods(gateway) == ["POST", "PATCH", "PATCH"]
    assert gateway.sent[update.attempt].report == update.report
    assert gateway.bytes_sent == SIZE


@pytest.mark.parametrize(("method", "after"), [("POST", 500), ("PATCH", 2999)])
async def test_cut_part_is_sent_again_from_the_last_whole_chunk(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate, method: str, after: int
) -> None:
    gateway.fails(method, "/v1/tasks/", after=after)
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)
    assert gateway.bytes_sent == SIZE + after % CHUNK, "less than a chunk came twice"
    assert "HEAD" in methods(gateway)


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_lost_answer_to_a_part_costs_no_bytes(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate, method: str
) -> None:
    gateway.fails(method, "/v1/tasks/")
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)
    assert gateway.bytes_sent == SIZE


async def test_lost_receipt_is_asked_for_without_the_bytes(
    own: OwnGateway, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    gateway.fails("POST", "/v1/tasks/")
    gateway.receipts["task-1"] = [ADMITTED, ADMITTED]
    assert await UpdateUpload(own, update, lambda _what: None).receipt() == ADMITTED
    assert methods(gateway) == ["POST", "HEAD", "PATCH"]
    assert gateway.bytes_sent == SIZE


async def test_question_that_another_request_overtook_is_asked_again(
    own: OwnGateway, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    gateway.fails("POST", "/v1/tasks/")
    gateway.fails("HEAD", "/v1/tasks/", status=409, reason="taken over")
    gateway.receipts["task-1"] = [ADMITTED, ADMITTED]
    assert await UpdateUpload(own, update, lambda _what: None).receipt() == ADMITTED
    assert methods(gateway) == ["POST", "HEAD", "HEAD", "PATCH"]
    assert gateway.bytes_sent == SIZE


async def test_undecided_update_is_asked_for_until_it_is_decided(
    upload: UpdateUpload, gateway: FakeGateway
) -> None:
    refused = Receipt(state="refused", reason="not finite")
    gateway.receipts["task-1"] = [WAITS, WAITS, refused]
    assert await upload.receipt() == refused
    assert methods(gateway) == ["POST", "PATCH", "PATCH", "PATCH", "PATCH"]
    assert gateway.bytes_sent == SIZE


async def test_wrong_offset_is_corrected_by_the_gateway(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    upload._offset = 2 * PART  # as if another process had sent so much
    gateway.fails("POST", "/v1/tasks/", after=PART)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(upload, "_offset", None)
        gateway.faults.clear()
        await upload._sent()
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)
    assert methods(gateway) == ["POST", "PATCH", "PATCH", "PATCH"], "the first was refused by 409"


async def test_expired_upload_begins_anew(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    gateway.fails("PATCH", "/v1/tasks/", status=404, reason="no upload")
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)
    assert methods(gateway) == ["POST", "PATCH", "POST", "PATCH", "PATCH"]


async def test_nobody_knows_an_update_whose_task_is_over(
    upload: UpdateUpload, gateway: FakeGateway
) -> None:
    gateway.offers.clear()
    assert await upload.receipt(begun=True) is None
    assert methods(gateway) == ["HEAD", "POST"]


async def test_busy_gateway_is_waited_for(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    gateway.fails("PATCH", "/v1/tasks/", status=503, headers={"Retry-After": "0"})
    gateway.fails("PATCH", "/v1/tasks/", status=409, reason="taken over")
    assert await upload.receipt() == ADMITTED
    assert arrived(gateway, update)


async def test_refused_request_is_an_error(upload: UpdateUpload, gateway: FakeGateway) -> None:
    gateway.fails("POST", "/v1/tasks/", status=413, reason="too large")
    with pytest.raises(TurnedAway, match="refused the update: it is too large"):
        await upload.receipt()


async def test_offset_beyond_the_end_is_an_error(
    upload: UpdateUpload, gateway: FakeGateway, update: FinishedUpdate
) -> None:
    await upload._sent()
    gateway.sent[update.attempt].data += bytes(SIZE)
    with pytest.raises(FedstreamError, match="of an update of 10500"):
        await upload.receipt(begun=True)


async def test_upload_that_is_over_is_not_sent_again(
    upload: UpdateUpload, gateway: FakeGateway
) -> None:
    """The gateway doesn't know any more how long it was, but what became of it."""
    assert await upload.receipt() == ADMITTED
    sent = gateway.bytes_sent
    gateway.fails("HEAD", "/v1/tasks/", status=410, reason="no upload")
    assert await upload.receipt(begun=True) == ADMITTED
    assert gateway.bytes_sent == sent
    assert methods(gateway)[-2:] == ["HEAD", "PATCH"]
