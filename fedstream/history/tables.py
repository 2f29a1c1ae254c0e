"""Data frames of a run. :class:`fedstream.history.record.RunRecord` documents each column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstream.broker.errors import FedstreamError
from fedstream.history import report
from fedstream.history.reading import UpdateRow, VersionRow

if TYPE_CHECKING:
    import pandas as pd

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


def versions(rows: Sequence[VersionRow], *, simulated: bool) -> pd.DataFrame:
    """One row for each version, indexed by its number."""
    frame: pd.DataFrame = _pandas().DataFrame.from_records(rows, columns=VersionRow._fields)
    _number(frame, "staleness", "weight", "loss")
    _stamp(frame, simulated=simulated)
    return frame.set_index("version")


def updates(rows: Sequence[UpdateRow], *, simulated: bool) -> pd.DataFrame:
    """One row for each admitted update, in the order in which they were decided."""
    frame: pd.DataFrame = _pandas().DataFrame.from_records(rows, columns=UpdateRow._fields)
    frame["version"] = frame["version"].astype("Int64")
    _number(frame, "weight", "loss", "norm")
    for name in _CATEGORIES:
        frame[name] = frame[name].astype("category")
    _stamp(frame, simulated=simulated)
    return frame.rename_axis("update")


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


def _number(frame: pd.DataFrame, *names: str) -> None:
    """Let these columns hold floats even if all are missing."""
    for name in names:
        frame[name] = frame[name].astype(float)


def _stamp(frame: pd.DataFrame, *, simulated: bool) -> None:
    """Turn seconds since 1970 into times; a simulation has none."""
    seconds = frame["time"] if not simulated else frame["time"] * float("nan")
    frame["time"] = _pandas().to_datetime(seconds, unit="s", utc=True)


def plain(rows: Sequence[Mapping[str, object]], *, index: str) -> pd.DataFrame:
    """Rows by name as they are."""
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
