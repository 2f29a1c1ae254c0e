"""What names bytes: SHA-256 or BLAKE3, as anybody computes them. Each digest says which."""

from __future__ import annotations

import hashlib
import re

import pytest

from fedstream.core.digest import DIGEST_PATTERN, DigestAlgorithm, Digester, algorithm_of, digest_of
from fedstream.core.layout import Payload
from tests.support import layout_of, model_of

BOTH: tuple[DigestAlgorithm, ...] = ("blake3", "sha256")
# FIPS 180-2, appendix B.1
SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def payload(data: bytes) -> Payload:
    made = Payload.empty(len(data))
    made.buffer.data[:] = data
    return made


def test_bare_digests_are_of_sha_256() -> None:
    assert digest_of(b"abc") == SHA256_OF_ABC


@pytest.mark.parametrize(
    ("length", "begins"),  # the algorithm's own test vectors: bytes 0, 1 ... 250, 0, 1 ...
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
    ],
)
def test_digests_with_a_suffix_are_of_blake3(length: int, begins: str) -> None:
    data = bytes(n % 251 for n in range(length))
    assert digest_of(data, "blake3") == f"{begins}-blake3"


@pytest.mark.parametrize("algorithm", BOTH)
def test_a_digest_says_what_made_it(algorithm: DigestAlgorithm) -> None:
    digest = digest_of(b"abc", algorithm)
    assert algorithm_of(digest) == algorithm
    assert re.fullmatch(DIGEST_PATTERN, digest)


@pytest.mark.parametrize("text", ["", "abc", "-blake3", SHA256_OF_ABC[1:], f"{SHA256_OF_ABC}-xxh3"])
def test_nothing_is_of_a_text_that_is_no_digest(text: str) -> None:
    assert not payload(b"abc").is_of(text)
    assert not re.fullmatch(DIGEST_PATTERN, text)


@pytest.mark.parametrize("algorithm", BOTH)
def test_bytes_are_compared_with_a_digest_by_what_made_it(algorithm: DigestAlgorithm) -> None:
    digest = digest_of(b"abc", algorithm)
    assert payload(b"abc").is_of(digest)
    assert payload(b"abc").digest_like(digest) == digest
    assert not payload(b"xyz").is_of(digest)


def test_a_digest_is_not_mistaken_for_one_by_the_other_algorithm() -> None:
    assert not payload(b"abc").is_of(f"{SHA256_OF_ABC}-blake3")
    assert not payload(b"abc").is_of(digest_of(b"abc", "blake3").removesuffix("-blake3"))


@pytest.mark.parametrize("algorithm", BOTH)
def test_pieces_make_the_digest_of_the_whole(algorithm: DigestAlgorithm) -> None:
    begun = Digester(algorithm)
    begun.update(b"a")
    other = begun.copy()
    begun.update(memoryview(b"bc"))
    other.update(b"x")
    assert begun.digest() == digest_of(b"abc", algorithm)
    assert other.digest() == digest_of(b"ax", algorithm)


def test_models_and_layouts_are_named_by_digest() -> None:
    layout = layout_of(4, 2, 1)
    model = model_of(layout, *range(6), integers=[7])
    assert model.digest() == hashlib.sha256(bytes(model.buffer)).hexdigest()
    assert layout.signature == hashlib.sha256(layout.encode()).hexdigest()
