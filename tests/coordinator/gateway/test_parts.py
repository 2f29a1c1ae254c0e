"""What may be added to an upload, and how bytes become chunks: without a socket or Redis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.coordinator.gateway.parts import Chunks, Flaw, TooLong, UploadPart

CHUNK = 8  # bytes, instead of nearly 1 MiB


@pytest.mark.parametrize(
    ("part", "at", "flaw"),
    [
        (UploadPart(16, 4, completes=True), 16, None),
        (UploadPart(16, None, completes=True), 16, None),
        (UploadPart(0, 20, completes=True), 0, None),
        (UploadPart(0, 20, completes=False), 0, None),
        (UploadPart(8, 8, completes=False), 8, None),
        (UploadPart(8, 0, completes=False), 8, None),
        (UploadPart(20, 0, completes=True), 20, None),
        (UploadPart(8, 12, completes=True), 16, "offset"),
        (UploadPart(16, 4, completes=True), 8, "offset"),
        (UploadPart(16, 5, completes=True), 16, "length"),
        (UploadPart(16, 5, completes=False), 16, "length"),
        (UploadPart(16, 3, completes=True), 16, "length"),
        (UploadPart(16, 0, completes=True), 16, "length"),
        (UploadPart(8, 7, completes=False), 8, "too short"),
        (UploadPart(16, 3, completes=False), 16, "too short"),
        (UploadPart(16, 4, completes=False), 16, None),  # the last bytes, of fewer than a chunk
    ],
)
def test_a_part_has_to_fit(part: UploadPart, at: int, flaw: Flaw | None) -> None:
    assert part.flaw(length=20, at=at, chunk=CHUNK) == flaw


@pytest.mark.parametrize(
    ("part", "at", "repeats"),
    [
        (UploadPart(16, 4, completes=True), 20, True),  # the last part again
        (UploadPart(0, 20, completes=True), 20, True),  # all of it again
        (UploadPart(20, 0, completes=True), 20, True),  # nothing but the end
        (UploadPart(8, None, completes=True), 20, True),
        (UploadPart(16, 4, completes=False), 20, False),
        (UploadPart(16, 3, completes=True), 20, False),
        (UploadPart(16, 4, completes=True), 16, False),  # not yet there
        (UploadPart(21, None, completes=True), 20, False),
    ],
)
def test_the_end_may_come_again(part: UploadPart, at: int, repeats: bool) -> None:
    assert part.repeats_the_end(length=20, at=at) is repeats


@given(st.binary(max_size=60), st.lists(st.integers(0, 20)), st.integers(0, 3))
def test_chunks_are_the_bytes(data: bytes, cuts: list[int], after: int) -> None:
    """However they come in, and from whichever chunk on: all of one length but the last."""
    begin = min(after * CHUNK, len(data))
    chunks, found, at = Chunks(len(data), begin, chunk=CHUNK), dict[int, bytes](), begin
    for size in [*cuts, len(data)]:
        for number, chunk in chunks.take(data[at : at + size]):
            assert number not in found
            found[number] = bytes(chunk)
            assert chunks.offset == min((number + 1) * CHUNK, len(data))
        at = min(at + size, len(data))
        assert chunks.received == at
    assert chunks.is_whole
    assert b"".join(found[number] for number in sorted(found)) == data[begin:]
    assert all(len(chunk) == CHUNK for number, chunk in found.items() if number != max(found))
    with pytest.raises(TooLong):
        list(chunks.take(b"x"))
