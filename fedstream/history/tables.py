"""Data frames of a run. :class:`fedstream.history.record.RunRecord` documents each column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstream.core.errors import FedstreamError
from fedstream.core.messages import OUTCOMES
from fedstream.history import report
from fedstream.history.table import NONE, Columns, RowArray, Texts

if TYPE_CHECKING:
    import pandas as pd

    from fedstream.journal import SegmentHead

_CATEGORIES = ("outcome", "reason", "trainer", "site")


def _pandas() -> Any:
    """pandas, which is an extra. Raises FedstreamError without it."""
    try:
        import pandas as pd
    except ImportError as error:
        raise FedstreamError(
            "data frames need pandas: pip install 'fedstream[notebook]'"
        ) from error
    return pd


def versions(columns: Columns, head: SegmentHead, digests: Sequence[str]) -> pd.DataFrame:
    """One row for each version, indexed by its number."""
    made = columns.made
    frame: pd.DataFrame = _pandas().DataFrame(
        {
            "version": made["version"],
            **_times(made["time"], head),
            "updates": columns.count(),
            "total_updates": columns.total(),
            **{name: columns.mean(name) for name in ("staleness", "weight", "loss")},
            **{name: columns.sum(name) for name in ("samples", "steps")},
            "adopted": made["adopted"],
            "digest": digests,
        }
    )
    return frame.set_index("version")


def updates(columns: Columns, head: SegmentHead, texts: Texts) -> pd.DataFrame:
    """One row for each admitted update, in the order in which they were decided."""
    pandas, rows = _pandas(), columns.updates
    contained = pandas.Series(columns.contained, dtype="Int64")
    frame: pd.DataFrame = pandas.DataFrame(
        {
            "version": contained.mask(columns.contained == NONE),
            **_times(rows["time"], head),
            **{name: rows[name] for name in ("device", "tau", "staleness", "weight")},
            "outcome": [OUTCOMES[one] for one in rows["outcome"].tolist()],
            "reason": [columns.reasons[one] for one in rows["reason"].tolist()],
            **{name: rows[name] for name in ("samples", "steps", "lr", "loss", "norm")},
            "trained_s": rows["seconds"],
            "waited_s": rows["waited"],
            "task": texts.tasks,
            "trainer": texts.trainers,
            "site": texts.sites,
        }
    )
    for name in _CATEGORIES:
        frame[name] = frame[name].astype("category")
    return frame.rename_axis("update")


def _times(times: RowArray, head: SegmentHead) -> dict[str, Any]:
    """Times as dates, which a simulation lacks, and as seconds since the run's beginning."""
    dates = times if head.created else times * float("nan")
    return {
        "time": _pandas().to_datetime(dates, unit="s", utc=True),
        "seconds": (times - head.created).clip(min=0.0),
    }


def metrics(found: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """One row for each measured version, indexed by its number."""
    return _by_name(found, "version")


def _by_name(found: Mapping[int, Mapping[str, float]], index: str) -> pd.DataFrame:
    """Test metrics of versions or devices, by their numbers."""
    pandas = _pandas()
    ordered = sorted(found.items())
    rows = [{report.column(name): v for name, v in values.items()} for _, values in ordered]
    numbers = pandas.Index([number for number, _ in ordered], name=index, dtype="int64")
    frame: pd.DataFrame = pandas.DataFrame(rows, index=numbers, dtype=float)
    return frame


def plain(rows: Sequence[Mapping[str, object]], *, index: str) -> pd.DataFrame:
    """A frame of rows that need no conversion. ``index``: the column with their numbers."""
    frame: pd.DataFrame = _pandas().DataFrame.from_records(rows, index=index)
    return frame


def devices(
    updates: pd.DataFrame, own: Mapping[int, Mapping[str, float]], numbers: Iterable[int]
) -> pd.DataFrame:
    """One row for each device, with its part in the updates and its own metrics."""
    pandas = _pandas()
    refused = updates["outcome"] == "refused"
    used = updates[~refused].groupby("device")
    found: pd.DataFrame = pandas.DataFrame(index=pandas.Index(numbers, name="device"))
    found["updates"] = used.size().reindex(found.index, fill_value=0)
    for name in ("staleness", "weight", "loss", "norm"):
        found[name] = used[name].mean()
    found["refused"] = updates[refused].groupby("device").size().reindex(found.index, fill_value=0)
    return found.join(_by_name(own, "device"))
