"""Pictures and tables of runs: matplotlib's figure, PNG, HTML and text."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from fedstream.observe import curves
from fedstream.observe.display import short
from fedstream.runtime.text import visible
from fedstream.terminal import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedstream.broker.messages import Goal
    from fedstream.observe.history import History
    from fedstream.observe.recall import Measurement
    from fedstream.runs.reading import Reading

_CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0"


def curves_of(numbers: Mapping[str, Any], reading: Reading, history: History, clock: str) -> Figure:
    """The picture of one run; ``clock`` names its seconds."""
    from matplotlib import rc_context

    head = reading.head
    title = (
        f"{short(numbers['task'])} · {short(str(numbers['strategy']))} · "
        f"{numbers['devices']} devices"
        f"{', simulated' if reading.is_simulated else ''} · {numbers['versions']} versions"
    )
    with rc_context(curves.STYLE):
        return curves.picture(
            title, history, created=head.created, devices=head.devices, time=clock
        )


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    from matplotlib import rc_context

    out = BytesIO()
    with rc_context(curves.STYLE):
        figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def as_html(rows: Iterable[tuple[str, str]], picture: bytes) -> str:
    """Rows as a table, and a PNG below it. Any text may be somebody else's: it is escaped."""
    body = "".join(_row(("th", name), ("td", value)) for name, value in rows)
    return f"<table>{body}</table>{_image(picture)}"


def comparison_html(
    table: Sequence[Sequence[str]], differences: Sequence[Sequence[str]], picture: bytes
) -> str:
    """Two tables, each with its header first, and a PNG below them."""
    parts = [_table(rows) for rows in (table, differences) if rows]
    return "".join((*parts, _image(picture)))


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table as lines of text, its header first: names to the left, numbers to the right."""
    shown = [[visible(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            value.rjust(width) if place else value.ljust(width)
            for place, (value, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )


def overlaid(
    names: Sequence[str],
    runs: Sequence[Sequence[Measurement]],
    metric: str,
    clock: str,
    target: float | None,
    goal: Goal | None,
) -> Figure:
    """A metric over versions, updates and time, one curve for each run.

    ``clock`` names the time. ``target`` is drawn as a line. ``goal``: of
    the metric.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(curves.STYLE):
        figure = Figure(figsize=(12.5, 4.4), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        of = ("version", "updates", "seconds")
        for axes, what, label in zip(panels, of, ("versions", "updates", clock), strict=True):
            for place, (name, points) in enumerate(zip(names, runs, strict=True)):
                axes.plot(
                    [getattr(one, what) for one in points],
                    [one.metrics[metric] for one in points],
                    **curves.line_style(place), marker="o", markersize=2.5,
                    label=visible(name) if axes is panels[0] else None,
                )  # fmt: skip
            if target is not None:
                axes.axhline(
                    target, color="#888888", linewidth=0.8, linestyle=(0, (2, 3)),
                    label=f"target {number(target)}" if axes is panels[0] else None,
                )  # fmt: skip
            axes.set(xlabel=label)
            axes.set_xlim(left=0)
        panels[0].set_ylabel(visible(metric), parse_math=False)
        values = [one.metrics[metric] for points in runs for one in points]
        if values and goal == "max":
            panels[0].set_ylim(min(0.0, *values), 1.02 if max(values) <= 1 else None)
        if not values:
            panels[1].text(
                0.5, 0.5, "not measured", transform=panels[1].transAxes, ha="center",
                color="#888888",
            )  # fmt: skip
        legend = figure.legend(loc="outside upper left", ncols=4)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return figure


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [_row(*(("th", value) for value in header))]
    lines += [_row(*(("td", value) for value in row)) for row in body]
    return f"<table>{''.join(lines)}</table>"


def _row(*cells: tuple[str, str]) -> str:
    inner = "".join(f'<{tag} style="{_CELL}">{_text(value)}</{tag}>' for tag, value in cells)
    return f"<tr>{inner}</tr>"


def _image(picture: bytes) -> str:
    data = b64encode(picture).decode()
    return f'<img src="data:image/png;base64,{data}" style="max-width: 100%">'


def _text(value: str) -> str:
    return html.escape(visible(value))
