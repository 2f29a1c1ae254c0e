"""What names bytes is SHA-256, as anybody else computes it."""

from __future__ import annotations

import hashlib

from fedstream.broker.digest import digest_of
from tests.support import layout_of, model_of


def test_the_digest_is_sha_256() -> None:
    # FIPS 180-2, appendix B.1
    assert digest_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_models_and_layouts_are_named_by_digest() -> None:
    layout = layout_of(4, 2, 1)
    model = model_of(layout, *range(6), integers=[7])
    assert model.digest() == hashlib.sha256(bytes(model.buffer)).hexdigest()
    assert layout.signature == hashlib.sha256(layout.encode()).hexdigest()
