"""Choice of the table columns that fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GAP = 2  # between two columns


def fitting(widths: Mapping[str, int], important: Sequence[str], room: int | None) -> list[str]:
    """Columns that fit side by side, in table order, chosen by importance.

    ``widths`` are in cells. ``important`` lists the most important first; its first column is
    always shown. ``room`` is the terminal's width; None (no terminal) shows all.
    """
    if room is None:
        return list(widths)
    chosen, left = set(important[:1]), room - widths[important[0]]
    for name in important[1:]:
        if widths[name] + GAP <= left:
            chosen.add(name)
            left -= widths[name] + GAP
    return [name for name in widths if name in chosen]
