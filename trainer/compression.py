"""Lossy compression of the delta that local training yields."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedstream.core.layout import Floats
from fedstream.runtime.config import Section


class NoCompression(Section):
    """Send the delta unchanged."""

    kind: Literal["none"] = "none"


class Bf16(Section):
    """Round every value to the nearest bfloat16, ties to even: a relative error of at most 2^-8."""

    kind: Literal["bf16"] = "bf16"


class TopK(Section):
    """Keep the k values of largest magnitude and zero the others; on ties the first ones win.

    top_k of *Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), definition 2.2, without
    the memory: the other values are lost.
    """

    kind: Literal["topk"] = "topk"
    share: Annotated[float, Field(gt=0, le=1)]
    """k as a share of the parameters; k is rounded, and at least 1"""


Compression = Annotated[NoCompression | Bf16 | TopK, Field(discriminator="kind")]


def compress(delta: Floats, how: Compression) -> None:
    """Overwrite ``delta``, a vector of any length, with its compressed and decoded values.

    Anarchic Federated Learning, algorithm 1: 'with extra processing if so desired', which section 3
    calls 'rescaling, compression for communication-efficiency, etc.'. This function shows the
    effect of lossy compression on training, device by device; only the wire format
    (:mod:`fedstream.core.formats`) saves bytes. A delta that is not finite stays so, and the
    updater refuses it.
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
