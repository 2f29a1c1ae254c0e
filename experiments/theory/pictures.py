"""The look of the pictures: the style of a run's own picture, with dashed bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.history.pictures import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN, OTHER, THIRD, FOURTH = "#1f5fa8", "#d9772b", "#3a8f5c", "#8a4fa3"
FAINT, BOUND = "#eec39c", "#b03030"


@contextmanager
def picture(path: Path, panels: int) -> Iterator[list[Axes]]:
    """Panels, one below the other, to draw into; written as PNG, 960 pixels wide."""
    # Figure rather than pyplot: no global state, no display, half the import.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.4 * panels), layout="constrained")
        yield list(figure.subplots(panels, 1, squeeze=False)[:, 0])
        # No metadata: the same results give the same bytes.
        figure.savefig(path, dpi=120, metadata={"Software": None})
