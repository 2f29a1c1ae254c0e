"""What a device leaves out of its update: a lossy transformation of the delta that it sends.

Anarchic Federated Learning, algorithm 1: 'with extra processing if so desired', which section 3
calls 'rescaling, compression for communication-efficiency, etc.'. What is sent is what a receiver
would decode, in float32: training sees what is lost, but no bytes are saved yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from fedstream.runtime.config import Section

if TYPE_CHECKING:
    from fedstream.broker.layout import Floats


class NoCompression(Section):
    """The delta as it is."""

    kind: Literal["none"] = "none"


class Bf16(Section):
    """Every value rounded to the nearest bfloat16, ties to even: at most 2^-8 of it off."""

    kind: Literal["bf16"] = "bf16"


class TopK(Section):
    """The k values of largest size, the others zero; of equal ones those that come first.

    top_k of *Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), definition 2.2, without
    its memory: what is left out is lost.
    """

    kind: Literal["topk"] = "topk"
    share: Annotated[float, Field(gt=0, le=1)]
    """k over the number of parameters; k is rounded, and at least 1"""


Compression = Annotated[NoCompression | Bf16 | TopK, Field(discriminator="kind")]


def compress(delta: Floats, how: Compression) -> None:
    """Puts what a receiver would decode in place of ``delta``, a vector of any length.

    One that is not finite stays so, and the updater refuses it.
    """
    match how:
        case Bf16():
            import torch

            vector = torch.from_numpy(delta)
            vector.copy_(vector.to(torch.bfloat16))
        case TopK(share=share):
            _keep_largest(delta, max(1, round(share * delta.size)))


def _keep_largest(delta: Floats, k: int) -> None:
    sizes = np.abs(delta)
    if k >= sizes.size or not np.isfinite(sizes).all():
        return
    least = np.partition(sizes, -k)[-k]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: k - np.count_nonzero(kept)]] = True
    delta[~kept] = 0.0
