"""Runs afterwards and beside each other: a run's record, lists, comparisons and reports."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["Comparison", "RunRecord", "compare", "open_run"]

if TYPE_CHECKING:
    from fedstream.runs.comparison import Comparison, compare
    from fedstream.runs.record import RunRecord, open_run
else:  # on first use: whoever needs one module of the room does not load them all
    _FROM = {
        "Comparison": "fedstream.runs.comparison", "RunRecord": "fedstream.runs.record",
        "compare": "fedstream.runs.comparison", "open_run": "fedstream.runs.record",
    }  # fmt: skip

    def __getattr__(name: str) -> object:
        if name not in _FROM:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_FROM[name]), name)
