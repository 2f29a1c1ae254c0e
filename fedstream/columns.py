"""Which columns of a table a terminal has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GAP = 2  # between two columns


def fitting(widths: Mapping[str, int], important: Sequence[str], room: int | None) -> list[str]:
    """The columns that fit side by side, in their order: the most important first, then whatever
    else there is room for.

    ``widths`` are in cells; ``important`` begins with what is shown in any case. ``room``: the
    terminal's width; None: there is no terminal, and all are shown.
    """
    if room is None:
        return list(widths)
    chosen, left = set(important[:1]), room - widths[important[0]]
    for name in important[1:]:
        if widths[name] + GAP <= left:
            chosen.add(name)
            left -= widths[name] + GAP
    return [name for name in widths if name in chosen]
