"""Output of `fedstream journal`: records, devices and findings as lines, tables and plain values.

Records are shown as they are read, because a journal may be larger than memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from rich.table import Table

from fedstream.core.errors import ConfigError
from fedstream.core.messages import OUTCOMES
from fedstream.core.reasons import MEASURED
from fedstream.history.bisect import Cause
from fedstream.journal import (
    Cut,
    EntryRecord,
    EvaluationEnded,
    JournalError,
    QuarantineSet,
    Record,
    RoundClosed,
    Segment,
    Standing,
    StepScaled,
    SumOpened,
    Taken,
    cuts,
    entries,
)
from fedstream.journal.contributions import DeviceContribution, Spread, direction
from fedstream.journal.inspection import Move, Verdict, moves
from fedstream.journal.records import is_used
from fedstream.runtime.text import escaped
from fedstream.strategies.mixing import norm
from fedstream.terminal import cell, clock, console, line, number, room, spaced

_GAP = 2  # between two columns
_PAGE = 1000  # records in a table: memory holds one table at a time
_WIDTHS = {
    "version": 8,
    "time": 12,
    "device": 6,
    "task": 12,
    "tau": 8,
    "late": 5,
    "weight": 9,
    "outcome": 10,
    "samples": 7,
    "steps": 6,
    "loss": 9,
    "norm": 9,
    "distance": 9,
    "digest": 8,
    "reason": 20,
    "format": 14,
    "bytes": 11,
}
_NORMS = ("norm", "distance")
_REALS = ("weight", "loss", *_NORMS)
_TEXT = ("time", "task", "outcome", "digest", "reason", "format")
_IMPORTANT = (
    "version",
    "device",
    "outcome",
    "late",
    "weight",
    "norm",
    "distance",
    "loss",
    "reason",
    "time",
    "task",
    "tau",
    "digest",
    "steps",
    "samples",
    "format",
    "bytes",
)

NormPair: TypeAlias = tuple[float | None, float | None]  # of the sent vector; of x_new - x
RecordLine: TypeAlias = tuple[Segment, Record, Standing | EntryRecord, NormPair]


# records


@dataclass(frozen=True)
class Filter:
    """Criteria for the records to show; empty ones match everything."""

    devices: frozenset[int] = frozenset()
    outcomes: frozenset[str] = frozenset()
    first: int | None = None  # version
    last: int | None = None

    def is_past(self, message: Standing | EntryRecord) -> bool:
        """Whether neither this record nor a later one in its segment is shown."""
        return self.last is not None and message.version > self.last

    def takes(self, message: Standing | EntryRecord) -> bool:
        """Whether a record is shown; standings have no device and no outcome."""
        if self.first is not None and message.version < self.first:
            return False
        if self.is_past(message):
            return False
        if isinstance(message, Taken):
            wanted = not self.devices or message.upload.device in self.devices
            return wanted and (not self.outcomes or message.outcome in self.outcomes)
        if isinstance(message, QuarantineSet) and self.devices:
            return not self.outcomes and not self.devices.isdisjoint(message.devices)
        return not (self.devices or self.outcomes)


def lines(chain: Sequence[Segment], wanted: Filter, *, norms: bool = False) -> Iterator[RecordLine]:
    """Wanted standings and records, in order.

    ``norms``: add each update's norms, for which all models are rebuilt; otherwise no payload is
    read. Raises JournalError; at the end also if a wanted device has no record.
    """
    missing = set(wanted.devices)
    for segment, cut in cuts(chain):
        if wanted.is_past(segment.standing):
            continue  # not the end: a later segment may adopt a model of an earlier version
        if wanted.takes(segment.standing):
            yield segment, segment.standing_record, segment.standing, (None, None)
        for record, entry, move in _read(segment, cut, norms=norms):
            if wanted.is_past(entry):
                break
            if isinstance(entry, Taken):
                missing.discard(entry.upload.device)
            if wanted.takes(entry):
                yield segment, record, entry, (None, None) if move is None else _norms(move)
    if missing:
        when = "" if wanted.first is None else " in these versions"
        raise JournalError(
            f"{chain[0].path.parent}: device {min(missing)} never took part{when} (the run has "
            f"{chain[-1].head.devices} devices)"
        )


def _read(
    segment: Segment, cut: Cut | None, *, norms: bool
) -> Iterator[tuple[Record, EntryRecord, Move | None]]:
    if not norms:
        for record, entry in entries(segment, cut):
            yield record, entry, None
        return
    for move in moves(segment, cut):
        if not isinstance(move.message, Standing):
            yield move.record, move.message, move


def _norms(move: Move) -> NormPair:
    """An update's norm, and its distance from the model it was mixed into; None: unknown."""
    if move.update is None or not isinstance(move.message, Taken):
        return None, None
    sent = norm(move.update.floats)
    if move.before is None or not is_used(move.message):
        return sent, None
    return sent, norm(direction(move.message.upload, move.update, move.before))


def show(found: Iterable[RecordLine], *, norms: bool = False) -> None:
    """Print records as tables, each segment under a heading line."""
    widths = {name: width for name, width in _WIDTHS.items() if norms or name not in _NORMS}
    important = [name for name in _IMPORTANT if name in widths]
    names = fitting(widths, important, room())
    here = console(width=_side_by_side(widths, names))
    table = _table(names, header=True)
    segment: Segment | None = None
    for segment, _, message, measured in found:
        if isinstance(message, Standing):
            if table.row_count:
                here.print(table)
            for text in _boundary(segment):
                here.print(cell(text, style="cyan"), soft_wrap=True)
            table = _table(names, header=True)
            continue
        shown = _cells(message, measured)
        table.add_row(*(cell(shown[name]) for name in names))
        if table.row_count == _PAGE:
            here.print(table)
            table = _table(names, header=False)
    if table.row_count:
        here.print(table)
    if segment is None:
        line("no records")
        return
    _tell_hidden(widths, names)


def _side_by_side(widths: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(widths[name] + _GAP for name in names)


def _tell_hidden(all_names: Iterable[str], names: Sequence[str]) -> None:
    """Print which columns there is no room for."""
    if hidden := [spaced(name) for name in all_names if name not in names]:
        text = f"no room for {', '.join(hidden)}: widen the terminal, or use --csv or --json"
        console().print(cell(text, style="dim"))


def _table(names: Sequence[str], *, header: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim")
    for name in names:
        side = "left" if name in _TEXT else "right"
        table.add_column(name, width=_WIDTHS[name], no_wrap=True, justify=side)  # type: ignore[arg-type]
    return table


def _boundary(segment: Segment) -> Iterator[str]:
    """Yield a segment's heading, the run's initial model, and the digests of user programs."""
    head, said = segment.head, segment.standing
    yield (
        f"{segment.path.name}: epoch {head.epoch}, {said.why} with version {said.version} "
        f"({said.digest[:8]}) by {_words(_without_policy(head.strategy))}"
    )
    if said.why == "begun" and head.start:
        yield f"  version 0 is {head.start}"
    sources = {f"strategy.{key}": digest for key, digest in head.sources.items()}
    for key, digest in (sources | head.parts).items():
        yield f"  {key}: SHA-256 of its file {digest}"


def _without_policy(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded strategy with a policy of which a heading has room for what limits sums."""
    if not isinstance(terms := rule.get("private"), Mapping):
        return dict(rule)
    policy = terms.get("policy", {})
    limits = {key: policy.get(key) for key in ("min_batch", "clip", "sigma", "participations")}
    return {**rule, "private": {**terms, "policy": limits}}


def _words(value: object) -> str:
    """Strategy parameters as words, without JSON punctuation."""
    if not isinstance(value, Mapping):
        return str(value)
    first, *more = (
        _words(inner) if key in ("name", "kind") else f"{key} {_words(inner)}"
        for key, inner in value.items()
        if inner is not None
    )
    return f"{first} ({', '.join(more)})" if more else first


def _values(entry: EntryRecord, measured: NormPair) -> dict[str, object]:
    """A record's values by column, without the time; a control entry has few."""
    about: dict[str, object] = {"version": entry.version, "digest": entry.digest}
    if not isinstance(entry, Taken):
        return about | _control(entry)
    upload, (sent, distance) = entry.upload, measured
    return about | {
        "device": upload.device,
        "task": upload.task,
        "tau": upload.tau,
        "late": entry.staleness,
        "weight": entry.weight,
        "outcome": entry.outcome,
        "samples": upload.samples,
        "steps": upload.steps,
        "loss": upload.loss,
        "norm": sent,
        "distance": distance,
        "reason": entry.reason,
        "format": upload.format,
        "bytes": upload.size,
    }


def _cells(entry: EntryRecord, measured: NormPair) -> dict[str, str]:
    """Cells of a row. A task's id begins with the time, so only its end is shown."""
    values = _values(entry, measured)
    found = dict.fromkeys(_WIDTHS, "") | {
        name: number(value) if name in _REALS else str(value)
        for name, value in values.items()
        if value is not None
    }
    return found | {
        "time": clock(entry.time, "%H:%M:%S.%f")[: _WIDTHS["time"]],
        "digest": found["digest"][:8],
        "task": found["task"][-_WIDTHS["task"] :],
        "outcome": spaced(found["outcome"]),
        "bytes": f"{values['bytes']:,}" if "bytes" in values else "",
    }


def _control(
    entry: RoundClosed | QuarantineSet | EvaluationEnded | StepScaled | SumOpened,
) -> dict[str, str]:
    """Cells of a record that is of no update."""
    if isinstance(entry, SumOpened):
        if entry.reason:
            return {"outcome": "dropped", "reason": entry.reason}
        what = "sum" if entry.digest else "bucket"
        return {"outcome": "opened", "reason": f"{what} of {entry.updates}"}
    if isinstance(entry, EvaluationEnded):
        found = entry.outcomes.get(MEASURED, 0)
        what = f"version {entry.measured} by {found} of {entry.devices} devices"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in entry.metrics.items())
        return {"outcome": "evaluation", "reason": f"{what}: {metrics or 'too few'}"}
    if isinstance(entry, StepScaled):
        scores = ", ".join(f"{value:.4g} at {scale:.4g}" for scale, value in entry.scores)
        why = f"{entry.key} {entry.rate:.4g}: {entry.metric} {scores}"
        return {"outcome": "step", "reason": why}
    if isinstance(entry, RoundClosed):
        return {"outcome": "round end", "reason": entry.why or f"of version {entry.round}"}
    what = "release" if entry.release else "quarantine"
    named = " ".join(map(str, entry.devices))
    if len(entry.devices) == 1:
        return {"outcome": what, "device": named, "reason": entry.why}
    why = f": {entry.why}" if entry.why else ""
    return {"outcome": what, "device": "", "reason": f"devices {named}{why}"}


def write_lines(path: Path, found: Iterable[RecordLine]) -> int:
    """Write records to a new CSV file, one per row; returns their number. Raises ConfigError."""
    count = 0
    with _new(path) as file:
        writer = csv.writer(file)
        writer.writerow(_WIDTHS)
        for _, _, message, measured in found:
            if isinstance(message, Standing):
                continue
            count += 1
            row = _values(message, measured)
            row["time"] = clock(message.time, "%Y-%m-%dT%H:%M:%S.%f%z")
            writer.writerow(_in_csv(row.get(name)) for name in _WIDTHS)
    return count


def _in_csv(value: object) -> object:
    """Value made safe for a file that may be viewed in a terminal."""
    return escaped(value) if isinstance(value, str) else value


@contextmanager
def _new(path: Path) -> Iterator[TextIO]:
    """Create a CSV file. Raises ConfigError if it exists or can't be created."""
    try:
        with path.open("x", newline="", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"--csv {path}: {error.strerror}: choose another file") from error


def facts(
    segment: Segment, record: Record, message: Standing | EntryRecord, measured: NormPair
) -> dict[str, Any]:
    """Record as plain values; those of a standing include its segment's head."""
    about: dict[str, Any] = {
        "kind": message.kind,
        "segment": segment.path.name,
        "offset": record.place.offset,
        "payload_bytes": record.payload_bytes,
    }
    if isinstance(message, Standing):
        head = segment.head.model_dump(exclude={"layout", "needs", "time"})
        return (
            about | head | message.model_dump(exclude={"done", "held", "sealed", "made", "counts"})
        )
    if not isinstance(message, Taken):
        return about | message.model_dump(exclude={"counts"})
    upload = message.upload.model_dump(exclude={"layout", "chunks", "sealed"})
    upload["update_digest"] = upload.pop("digest")
    sent, distance = measured
    if sent is not None:
        about |= {"norm": sent, "distance": distance}
    return about | message.model_dump(exclude={"upload", "counts"}) | upload


# devices

_SPREAD = ("mean", "median", "p90", "max")
NAMES = (
    "device",
    *OUTCOMES,
    *(
        f"{how}_{what}"
        for what in ("staleness", "weight", "loss", "norm", "distance")
        for how in _SPREAD
    ),
    "mean_cosine",
)
_IMPORTANT_OF_DEVICES = (
    "mean_distance",
    "max_distance",
    "mean_cosine",
    "mean_staleness",
    "max_staleness",
    "mean_loss",
    "mean_norm",
    "mean_weight",
    "p90_distance",
)


def rows(
    shares: Mapping[int, DeviceContribution], by: str, *, ascending: bool | None = None
) -> list[dict[str, float | None]]:
    """A row for each device, sorted by a column.

    By default, devices ascend and all other columns descend. Missing and non-finite values always
    come last.
    """
    found = [_row(device, share) for device, share in shares.items()]
    up = by == "device" if ascending is None else ascending

    def place(row: Mapping[str, float | None]) -> tuple[bool, float]:
        value = row[by]
        if value is None or not isfinite(value):
            return True, 0.0
        return False, value if up else -value

    return sorted(found, key=place)


def _row(device: int, share: DeviceContribution) -> dict[str, float | None]:
    row: dict[str, float | None] = {"device": device}
    row |= {outcome: share.outcomes[outcome] for outcome in OUTCOMES}
    for what in ("staleness", "weight", "loss", "norm", "distance"):
        numbers: Spread = getattr(share, what)
        spread = numbers.mean, numbers.percentile(50), numbers.percentile(90), numbers.most
        row |= {f"{how}_{what}": value for how, value in zip(_SPREAD, spread, strict=True)}
    return row | {"mean_cosine": share.cosine.mean}


def show_rows(found: Sequence[Mapping[str, float | None]], by: str) -> None:
    """Print the devices as a table, which always has the column ``by`` that sorts them."""
    space = room()
    ends = " " if space is None else "\n"  # a terminal's headers take two lines
    headers = {name: name.replace("_", ends) for name in NAMES}
    cells = [{name: number(row[name]) for name in NAMES} for row in found]
    widths = {
        name: max(len(text) for text in (*header.split("\n"), *(row[name] for row in cells)))
        for name, header in headers.items()
    }
    ended = [outcome for outcome in OUTCOMES if any(row[outcome] for row in found)]
    important = dict.fromkeys(("device", by, *ended, *_IMPORTANT_OF_DEVICES, *NAMES))
    names = fitting(widths, list(important), space)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(headers[name], justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[name] for name in names))
    console(width=_side_by_side(widths, names)).print(table)
    _tell_hidden(NAMES, names)


def write_rows(path: Path, found: Sequence[Mapping[str, float | None]]) -> None:
    """Write the devices to a new CSV file. Raises ConfigError if it exists or can't be created."""
    with _new(path) as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(found)


# findings


def verdict(found: Verdict) -> str:
    """Verdict on a segment, in one line."""
    if found.damage is not None:
        return f"{found.segment}  DAMAGED: {found.damage}"
    text = (
        f"{found.segment}  versions {found.first} to {found.last}, {found.records} records, "
        f"{found.bytes:,} bytes: intact"
    )
    if found.reweighed:
        text += (
            f"; warning: {found.reweighed} recorded weights differ from this machine's in their "
            "last bits (the recorded ones are used)"
        )
    if found.unweighted:
        text += "; updates without weights: not all models could be rebuilt"
    if found.torn:
        text += f"; then a torn tail of {found.torn:,} bytes, as a crash leaves it"
    if found.behind:
        text += f"; {found.behind:,} bytes after its successor's cut are ignored"
    return text


def cause(found: Cause) -> str:
    """Update that may be to blame, in one line."""
    loss = "" if found.loss is None else f", training loss {found.loss:.4g}"
    size = ", masked, in a sum with the others"
    if found.norm is not None and found.distance is not None:
        size = (
            f", norm {found.norm:.4g}, distance {found.distance:.4g} from the model it was mixed "
            "into"
        )
    return (
        f"device {found.device}, task {found.task}: trained from version {found.tau} (staleness "
        f"{found.staleness}), weight {found.weight:.4g}{size}{loss}"
    )


def fitting(widths: Mapping[str, int], important: Sequence[str], room: int | None) -> list[str]:
    """Columns that fit side by side, in table order, chosen by importance.

    ``widths`` are in cells. ``important`` lists the most important first; its first column is
    always shown. ``room`` is the terminal's width; None (no terminal) shows all.
    """
    if room is None:
        return list(widths)
    chosen, left = set(important[:1]), room - widths[important[0]]
    for name in important[1:]:
        if widths[name] + _GAP <= left:
            chosen.add(name)
            left -= widths[name] + _GAP
    return [name for name in widths if name in chosen]
