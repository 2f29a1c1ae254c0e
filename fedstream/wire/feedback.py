"""Error feedback: what a format loses of one update is added to the device's next one.

*Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), algorithm 1, lines 4 to 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstream.broker.layout import Model

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.broker.layout import Floats
    from fedstream.wire.formats import Format


# A memory may be so many times as long as the update that it is added to, for each share sent. At
# most 2 times are left of updates of one length (Error Feedback Fixes SignSGD, Karimireddy et al.
# 2019, lemma 3); more is what an outlier left, which its receiver refused.
_MOST = 10.0


class FedBack(NamedTuple):
    """An update, encoded, and what becomes of what it loses."""

    data: npt.NDArray[np.uint8]
    lost: Floats  # so far, for the device's next update
    dropped: bool  # whether what was lost before was too large to be added


def fed_back(update: Model, memory: Floats | None, how: Format) -> FedBack:
    """Encode an update together with what the device's last one lost.

    ``update``'s parameters become what their receiver decodes. ``memory``: what was lost so far, as
    long as the parameters; None: nothing. It is dropped if it is far larger than the update.
    If the update is not finite, its receiver refuses it, and the memory stays as it was.
    """
    known = memory
    if memory is not None and not _norm(memory) <= _MOST / how.share * _norm(update.parameters):
        memory = None
    dropped = known is not memory
    if memory is not None:
        update.parameters[:] += memory
    wanted = update.parameters.copy()
    data = how.encoded(update)
    if np.isfinite(wanted).all():
        how.decode(data, update)
        lost = np.subtract(wanted, update.parameters, out=wanted)
        if np.isfinite(lost).all():  # else its receiver refuses what was rounded to infinity
            return FedBack(data, lost, dropped)
    return FedBack(data, memory if memory is not None else np.zeros_like(wanted), dropped)


def _norm(values: Floats) -> float:
    return float(np.linalg.norm(values))
