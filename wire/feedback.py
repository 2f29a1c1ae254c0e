"""Error feedback: what a format loses of one update is added to the device's next one.

*Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), algorithm 1, lines 4 to 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedstream.broker.layout import Model

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.broker.layout import Floats
    from fedstream.wire.formats import Format


def fed_back(
    update: Model, memory: Floats | None, how: Format
) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Encode an update together with what the device's last one lost.

    ``update``'s parameters become what their receiver decodes. ``memory``: what was lost so far, as
    long as the parameters; None: nothing. Returns the bytes, and what is lost now. If the update is
    not finite, its receiver refuses it, and the memory stays as it was.
    """
    if memory is not None:
        update.parameters[:] += memory
    wanted = update.parameters.copy()
    data = how.encoded(update)
    if not np.isfinite(wanted).all():
        kept = memory if memory is not None else np.zeros_like(wanted)
        return data, kept
    how.decode(data, update)
    return data, np.subtract(wanted, update.parameters, out=wanted)
