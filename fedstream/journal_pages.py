"""What `fedstream journal` shows: records, devices and findings as lines, tables and plain values.

Records are shown as they are read: a journal may be larger than memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from broker.errors import ConfigError
from broker.messages import OUTCOMES
from fedstream.journal_bisect import Cause
from fedstream.terminal import cell, clock, console, number
from updater.inspection import Share, Verdict, entries
from updater.journal import Entry, JournalError, Record, Segment, Standing, Taken, cuts

_PAGE = 1000  # records in a table, so that the next can be read
_COLUMNS = {
    "version": 8, "time": 12, "device": 6, "task": 12, "tau": 8, "late": 5, "weight": 9,
    "outcome": 9, "samples": 7, "steps": 6, "loss": 9, "digest": 8, "reason": 24,
}  # fmt: skip
_TEXT = ("time", "task", "outcome", "digest", "reason")
_WIDTH = sum(_COLUMNS.values()) + 2 * len(_COLUMNS)

Line = tuple[Segment, Record, Standing | Entry]


# records


@dataclass(frozen=True)
class Filter:
    """Which records to show; what is not given does not matter."""

    devices: frozenset[int] = frozenset()
    outcomes: frozenset[str] = frozenset()
    first: int | None = None  # version
    last: int | None = None

    def is_past(self, message: Standing | Entry) -> bool:
        """Whether nothing is shown from here on, in this segment."""
        return self.last is not None and message.version > self.last

    def takes(self, message: Standing | Entry) -> bool:
        """Whether a record is shown; a standing is no device's, and no outcome."""
        if self.first is not None and message.version < self.first:
            return False
        if self.is_past(message):
            return False
        if isinstance(message, Taken):
            wanted = not self.devices or message.upload.device in self.devices
            return wanted and (not self.outcomes or message.outcome in self.outcomes)
        return not (self.devices or self.outcomes)


def lines(chain: Sequence[Segment], wanted: Filter) -> Iterator[Line]:
    """Standings and records in order, as far as they are wanted; no payload is read.

    Raises JournalError, at the end also for a device that never took part in what was read.
    """
    missing = set(wanted.devices)
    for segment, cut in cuts(chain):
        if wanted.is_past(segment.standing):
            continue  # and not the end: an adopted model may be of an earlier version
        if wanted.takes(segment.standing):
            yield segment, segment.standing_record, segment.standing
        for record, entry in entries(segment, cut):
            if wanted.is_past(entry):
                break
            if isinstance(entry, Taken):
                missing.discard(entry.upload.device)
            if wanted.takes(entry):
                yield segment, record, entry
    if missing:
        when = "" if wanted.first is None else " in these versions"
        raise JournalError(
            f"{chain[0].path.parent}: device {min(missing)} never took part{when} (the run has "
            f"{chain[-1].head.devices} devices)"
        )


def show(found: Iterable[Line]) -> None:
    """Prints records as tables, each segment under a line of its own."""
    here = _console()
    table = _table(header=True)
    for segment, _, message in found:
        if isinstance(message, Standing):
            if table.row_count:
                here.print(table)
            here.print(cell(_boundary(segment), style="cyan"), soft_wrap=True)
            table = _table(header=True)
            continue
        table.add_row(*(cell(text) for text in _cells(message)))
        if table.row_count == _PAGE:
            here.print(table)
            table = _table(header=False)
    if table.row_count:
        here.print(table)


def _console() -> Console:
    """A line that is too long for the terminal is better than numbers cut short."""
    return console(width=max(console().width, _WIDTH))


def _table(*, header: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim")
    for name, width in _COLUMNS.items():
        side = "left" if name in _TEXT else "right"
        table.add_column(name, width=width, no_wrap=True, justify=side)  # type: ignore[arg-type]
    return table


def _boundary(segment: Segment) -> str:
    head, said = segment.head, segment.standing
    return (
        f"{segment.path.name}: epoch {head.epoch}, {said.why} with version {said.version} "
        f"({said.digest[:8]}) by {_words(head.strategy)}"
    )


def _words(value: object) -> str:
    """A strategy's parameters without the signs that programs need."""
    if not isinstance(value, Mapping):
        return str(value)
    first, *more = (
        _words(inner) if key in ("name", "kind") else f"{key} {_words(inner)}"
        for key, inner in value.items()
        if inner is not None
    )
    return f"{first} ({', '.join(more)})" if more else first


def _cells(entry: Entry) -> list[str]:
    """A row. A task's id ends with what tells it from others; its beginning is the time."""
    at = clock(entry.time, "%H:%M:%S.%f")[: _COLUMNS["time"]]
    digest = (entry.digest or "")[:8]
    if not isinstance(entry, Taken):
        why = entry.why or f"of version {entry.round}"
        return [str(entry.version), at, *[""] * 5, "round end", "", "", "", digest, why]
    upload = entry.upload
    return [
        str(entry.version), at, str(upload.device), upload.task[-_COLUMNS["task"] :],
        str(upload.tau), str(entry.staleness), f"{entry.weight:.4g}", entry.outcome,
        str(upload.samples), str(upload.steps), number(upload.loss), digest, entry.reason,
    ]  # fmt: skip


def facts(segment: Segment, record: Record, message: Standing | Entry) -> dict[str, Any]:
    """A record as plain values; of a standing, where its segment belongs too."""
    about: dict[str, Any] = {
        "kind": message.kind, "segment": segment.path.name, "offset": record.place.offset,
        "payload_bytes": record.payload_bytes,
    }  # fmt: skip
    if isinstance(message, Standing):
        head = segment.head.model_dump(exclude={"layout", "needs", "time"})
        return about | head | message.model_dump(exclude={"done", "held", "made", "counts"})
    if not isinstance(message, Taken):
        return about | message.model_dump(exclude={"counts"})
    upload = message.upload.model_dump(exclude={"layout"})
    upload["update_digest"] = upload.pop("digest")
    return about | message.model_dump(exclude={"upload", "counts"}) | upload


# devices

NAMES = (
    "device", *OUTCOMES, "mean_staleness", "max_staleness", "mean_weight", "mean_loss",
    "mean_norm", "mean_distance", "mean_cosine",
)  # fmt: skip


def check_column(name: str) -> None:
    """Raises ConfigError if there is no such column."""
    if name not in NAMES:
        raise ConfigError(f"--sort {name}: must be one of {', '.join(NAMES)}")


def rows(shares: Mapping[int, Share], by: str) -> list[dict[str, float | None]]:
    """A row for each device, sorted by a column: devices from the first, else the largest first."""
    found = [_row(device, share) for device, share in shares.items()]
    if by == "device":
        return found
    return sorted(found, key=lambda row: _or_least(row[by]), reverse=True)


def _or_least(value: float | None) -> float:
    return value if value is not None and isfinite(value) else float("-inf")


def _row(device: int, share: Share) -> dict[str, float | None]:
    return {
        "device": device,
        **{outcome: share.outcomes[outcome] for outcome in OUTCOMES},
        "mean_staleness": share.staleness.value,
        "max_staleness": share.staleness.most if share.staleness.count else None,
        "mean_weight": share.weight.value,
        "mean_loss": share.loss.value,
        "mean_norm": share.norm.value,
        "mean_distance": share.distance.value,
        "mean_cosine": share.cosine.value,
    }


def show_rows(found: Sequence[Mapping[str, float | None]]) -> None:
    """Prints the devices as a table."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in NAMES:
        table.add_column(name.replace("_", " "), justify="right")
    for row in found:
        table.add_row(*(number(row[name]) for name in NAMES))
    _console().print(table)


def write_rows(path: Path, found: Sequence[Mapping[str, float | None]]) -> None:
    """The devices as a new CSV file. Raises ConfigError if it can't be made, or is there."""
    try:
        with path.open("x", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, NAMES)
            writer.writeheader()
            writer.writerows(found)
    except OSError as error:
        raise ConfigError(f"--csv {path}: {error.strerror}: name another file") from error


# findings


def verdict(found: Verdict) -> str:
    """What was found in a segment, in a line."""
    if found.damage is not None:
        return f"{found.segment}  DAMAGED: {found.damage}"
    text = (
        f"{found.segment}  versions {found.first} to {found.last}, {found.records} records, "
        f"{found.bytes:,} bytes: whole"
    )
    if found.reweighed:
        text += (
            f"; warning: {found.reweighed} weights end in other bits than this machine computes "
            "(the recorded ones are used)"
        )
    if found.unweighted:
        text += "; updates without weights: not all models could be rebuilt"
    if found.torn:
        text += f"; behind them a torn tail of {found.torn:,} bytes, as a crash leaves it"
    if found.behind:
        text += f"; {found.behind:,} bytes behind its successor's cut do not count"
    return text


def cause(found: Cause) -> str:
    """An update to blame, in a line."""
    loss = "" if found.loss is None else f", training loss {found.loss:.4g}"
    return (
        f"device {found.device}, task {found.task}: trained from version {found.tau} (staleness "
        f"{found.staleness}), weight {found.weight:.4g}, norm {found.norm:.4g}, distance "
        f"{found.distance:.4g} from the model that it was mixed into{loss}"
    )
