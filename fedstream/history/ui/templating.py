"""The pages' templates, and formats of numbers with their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedstream.core import __version__
from fedstream.history.devices import OUTLIER, mark_of_score, style_of_score
from fedstream.history.display import duration
from fedstream.runtime.text import escaped
from fedstream.terminal import counted, number

LACKING = "–"  # noqa: RUF001  (a table's sign for no value)
_KIB = 1024


def rendered(template: str, **about: object) -> str:
    """A page of a template. All values are escaped, because many come from other parties."""
    return templates().get_template(template).render(release=__version__, **about)


@cache
def templates() -> Environment:
    """The templates of all pages."""
    found = Environment(
        loader=PackageLoader("fedstream.history.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters |= _FILTERS
    found.globals |= {
        "outlier": OUTLIER,
        "mark_of": mark_of_score,
        "style_of": style_of_score,
    }
    return found


def _shown(value: object) -> object:
    """A value without characters that could hide or reorder the text around it."""
    return value if isinstance(value, Markup) else escaped(value)


def shown_number(value: float | None) -> str:
    """A number with four significant digits."""
    return LACKING if value is None or not isfinite(value) else number(value)


def shown_count(value: int | None) -> str:
    """A whole number."""
    return LACKING if value is None else f"{value:,}"


def shown_percent(value: float | None) -> str:
    """A share."""
    return LACKING if value is None else f"{100 * value:.4g} %"


def shown_bytes(value: float | None) -> str:
    """Bytes in the largest unit of which there is at least one."""
    if value is None:
        return LACKING
    unit, left = "bytes", value
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if left < _KIB:
            break
        unit, left = larger, left / _KIB
    return f"{left:.4g} {unit}"


def shown_seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if value is None or not isfinite(value):
        return LACKING
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.4g} s"


def moment(seconds: float) -> str:
    """A time in seconds since 1970."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return LACKING


def _iso(seconds: float) -> str:
    """A time in ISO 8601, for programs."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def cell_of(value: float | None, key: str) -> str:
    """A figure of a device, as its column shows it."""
    how: Mapping[str, Callable[[Any], str]] = {
        "refused_share": shown_percent,
        "bytes": shown_bytes,
        "used": shown_count,
        "refused": shown_count,
        "most_stale": shown_count,
        "last": shown_count,
        "lost": shown_count,
        "heard_s": lambda value: LACKING if value is None else f"{value:.0f}",
    }
    return how.get(key, shown_number)(value)


_FILTERS: dict[str, Callable[..., str]] = {
    "number": shown_number,
    "count": shown_count,
    "percent": shown_percent,
    "bytes": shown_bytes,
    "seconds": shown_seconds,
    "counted": counted,
    "cell_of": cell_of,
    "duration": duration,
    "moment": moment,
    "iso": _iso,
}
