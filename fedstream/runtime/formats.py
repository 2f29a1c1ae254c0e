"""How a run sends its models and updates: in which wire formats, and by which digests."""

from __future__ import annotations

import re

from pydantic import field_validator

from fedstream.broker.digest import DigestAlgorithm
from fedstream.runtime.config import Section
from fedstream.wire import ENCODINGS, Format, Undecodable, format_of


class WireSettings(Section):
    """How updates and models are sent; ``+zstd`` after a format's name compresses as well."""

    update: str = "f32"  # of this trainer's: those of one run may differ
    model: str = "f32"  # what is trained from: f32, bf16 or int8
    # What identifies models and updates; once a run has begun, it keeps its own.
    digest: DigestAlgorithm = "blake3"

    @field_validator("update", "model")
    @classmethod
    def _is_a_format(cls, name: str) -> str:
        """Raises ValueError unless ``format_of`` knows the name."""
        try:
            return format_of(name).name
        except Undecodable:
            pass
        if re.fullmatch(r"topk(\+zstd)?", name):
            raise ValueError("topk needs the share of values it keeps, as in topk:0.1")
        if name.startswith("topk:"):
            raise ValueError(
                "the share of topk is a decimal number above 0 and at most 1, with at most nine "
                "digits, as in topk:0.1"
            )
        shown = ", ".join("topk:SHARE" if kind == "topk" else kind for kind in ENCODINGS)
        raise ValueError(f"expected one of {shown}, or one of them with +zstd, as in int8+zstd")

    @field_validator("model")
    @classmethod
    def _is_fit_for_models(cls, name: str) -> str:
        if format_of(name).of_changes:
            raise ValueError(f"{name} is too coarse for models: use f32, bf16 or int8")
        return name

    @property
    def of_updates(self) -> Format:
        """The format that updates are sent in."""
        return format_of(self.update)

    @property
    def of_models(self) -> Format:
        """The format that models are published in."""
        return format_of(self.model)
