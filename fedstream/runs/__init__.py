"""Runs afterwards and beside each other: a run's record, lists, comparisons and reports."""

from fedstream.runs.comparison import Comparison, compare
from fedstream.runs.record import RunRecord, open_run

__all__ = ["Comparison", "RunRecord", "compare", "open_run"]
