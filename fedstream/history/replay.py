"""`fedstream replay`: rebuilds a run's versions from its journal, by the same or another rule.

Another rule is replayed alongside the recorded one, on the same updates.
"""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import BaseModel
from rich.table import Table

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.core.messages import Message, Sends
from fedstream.history import pictures, report
from fedstream.history.measuring import measuring, no_test_data
from fedstream.journal import JournalError, journal_of
from fedstream.journal.records import Taken, is_used
from fedstream.journal.replay import Moment, Replayer
from fedstream.private.settings import Buckets
from fedstream.runtime.config import load
from fedstream.settings.config import options
from fedstream.settings.recording import settings_of
from fedstream.strategies import RULES, Strategy, StrategySettings, strategy_of
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.mixing import BLOCK, norm
from fedstream.terminal import cell, console, line, progress, verbatim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MetricValues = dict[str, float]
MeasureAll = Callable[[int, Model], MetricValues]

TABLE = "replay.csv"
PICTURE = "replay.png"
_CONVERTED: dict[Sends, str] = {
    "delta": "it got each model minus the recorded one that it was trained from",
    "model": "it got each delta plus the recorded model that it was trained from",
}
SKIP = "--skip-update-digests"
_POINTS = 10  # default number of versions to measure
_UNMEASURED = "; --evaluate-every 0 measures nothing and needs no task"


# another rule


_OVER = "private.over"  # the one key of private runs that a replay can change
_DECIDES = tuple(f"strategy.adapt.{key}" for key in Adapt.model_fields.keys() - {"least", "most"})


class _Rule(BaseModel):
    strategy: StrategySettings
    private: Buckets = Buckets()


def rule_by(
    sets: Sequence[str], strategy: str | None = None
) -> Callable[[Mapping[str, Any]], Strategy] | None:
    """Function that applies ``--set`` and ``--strategy`` to a recorded strategy.

    None if neither is given. Raises ConfigError.
    """
    for item in sets:
        if not item.strip().startswith(("strategy.", f"{_OVER}=")):
            raise ConfigError(
                f"--set {item}: a replay can change only the strategy, as in --set "
                f"strategy.alpha=0.3, and {_OVER}; everything else is as recorded"
            )
        if item.strip().startswith(_DECIDES):
            raise ConfigError(
                f"--set {item}: no effect, because a replay takes the recorded changes of the "
                "step and decides none: set only strategy.adapt.least and strategy.adapt.most"
            )
    if not sets and strategy is None:
        return None

    overs = [item for item in sets if item.strip().startswith(_OVER)]

    def rule(recorded: Mapping[str, Any]) -> Strategy:
        was = strategy_of(recorded, 0)  # may what it names be loaded?
        terms = recorded.get("private")
        if overs and terms is None:
            raise ConfigError(f"--set {overs[0]}: this run is not private")
        plain = {key: value for key, value in recorded.items() if key != "private"}
        buckets = {key: terms[key] for key in Buckets.model_fields} if terms else {}
        # A separate layer: if the name or a kind changes, the recorded keys below it are dropped.
        found = load(
            _Rule,
            path=None,
            environ=dict(_layer("FEDSTREAM_STRATEGY", plain))
            | dict(_layer("FEDSTREAM_PRIVATE", buckets)),
            sets=sets,
            options=options(strategy=strategy),
        )
        if terms is None:
            return found.strategy
        from fedstream.strategies.private_sums import PrivateSums

        assert isinstance(was, PrivateSums)  # noqa: S101  (as it was recorded with terms)
        return was.replaced(found.strategy, found.private.over)

    return rule


def _layer(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        inner = f"{name}__{key.upper()}"
        if isinstance(value, Mapping):
            yield from _layer(inner, value)
        elif value is not None:
            yield inner, value if isinstance(value, str) else json.dumps(value)


def devices_of(without: Sequence[str]) -> frozenset[int]:
    """Devices named by ``--without``. Raises ConfigError."""
    devices = set()
    for item in without:
        what, _, number = item.partition("=")
        if what.strip() != "device" or not number.strip().isdecimal():
            raise ConfigError(f"--without {item}: expected a device, as in --without device=7")
        devices.add(int(number))
    return frozenset(devices)


# measuring


@dataclass(frozen=True)
class Point:
    """Metrics and distance at a version."""

    version: int  # as recorded
    original: MetricValues
    changed: MetricValues | None = None  # None: no other rule
    changed_version: int | None = None  # the other rule counts its own versions
    distance: float | None = None  # between the two models, Euclidean


@dataclass
class ReplayResult:
    """Result of a replay."""

    changed: bool
    begin: int = 0  # version
    version: int = 0  # the last
    records: int = 0
    made: int = 0  # versions, as recorded
    identical: int = 0
    updates_checked: bool = True  # against their recorded digests
    updates: dict[str, int] = field(default_factory=dict)  # number by fate under another rule
    why_dropped: Counter[str] = field(default_factory=Counter)  # of these, by reason
    refused: Counter[str] = field(default_factory=Counter)  # recorded without bytes, by reason
    converted_to: Sends | None = None  # what another rule takes, if devices did not send that
    inherited: int | None = None  # updates used whose base was influenced by a left-out device
    oldest: int = 0  # version in the journal; the influence of earlier ones is unknown
    distance: float | None = None  # between the last model and the recorded one
    checkpoints: int = 0
    adopted: list[int] = field(default_factory=list)
    torn: str | None = None
    seconds: float = 0.0
    points: list[Point] = field(default_factory=list)
    error: str | None = None

    @property
    def same(self) -> str:
        """Number of identical versions, in words."""
        unchecked = "" if self.updates_checked else f"; digests of updates not checked ({SKIP})"
        return f"{self.identical} of {self.made} versions identical{unchecked}"


def distance(one: Model, other: Model) -> float:
    """Euclidean distance over parameters and floating-point buffers."""
    parts = (slice(at, at + BLOCK) for at in range(0, one.layout.floats, BLOCK))
    return hypot(*(norm(one.floats[part] - other.floats[part]) for part in parts))


def replay(
    folder: Path,
    *,
    begin: int | None,
    until: int | None,
    every: int | None,
    strategy: str | None = None,
    sets: Sequence[str],
    without: Sequence[str],
    config: Path | None,
    task: str | None,
    trusted: bool,
    data_root: str | None,
    out: Path | None,
    check_updates: bool,
    as_json: bool,
) -> int:
    """Run the command; returns its exit code. Raises FedstreamError.

    ``strategy``, ``sets`` and ``without`` define another rule; ``trusted``: the task that the
    recording names may be loaded; ``check_updates``: check the digest of every update.
    """
    rule, devices = rule_by(sets, strategy), devices_of(without)
    other = rule is not None or bool(devices)
    named = []
    if strategy is not None:
        named = [f"strategy.name={strategy}"]
        RULES.find(strategy)  # the user names it, so a recording may name it too
    files_in = report.beside(folder, "replay", out, (TABLE, PICTURE)) if other else None
    with Replayer(
        journal_of(folder),
        strategy=rule,
        without=devices,
        from_version=begin,
        until=until,
        beside=other,
        check_updates=check_updates,
    ) as replayer:
        end = replayer.newest if until is None else until
        if every is None:
            every = max(1, (end - replayer.begin) // _POINTS) if other else 0
        measure = None
        if every:
            settings = settings_of(
                folder,
                config,
                trusted=trusted,
                otherwise=_UNMEASURED,
                task=task,
                data_root=data_root,
            )
            measure = measuring(settings)
            if measure is None:
                missing = no_test_data(settings.task.name)
                if not other:
                    raise missing
                line(f"{missing}: only their distances are shown", err=True)
        begin = replayer.begin
        with progress("replay", end - begin, quiet=as_json) as step:
            found = follow(replayer, every, measure, lambda version: step(version - begin))
        files: list[Path] = []
        if files_in is not None and found.points:
            files = write(
                files_in, _title(replayer.head.run, [*named, *sets], devices), found.points
            )
    if as_json:
        verbatim(report.as_json(as_numbers(found, files)) + "\n")
    else:
        show(found, files)
        if found.error is not None:
            line(f"fedstream: {found.error}", err=True)
    return 0 if found.error is None else 1


def _title(run: str, sets: Sequence[str], devices: frozenset[int]) -> str:
    changes = [f"with {', '.join(sets)}"] if sets else []
    if devices:
        word = "device" if len(devices) == 1 else "devices"
        changes.append(f"without {word} {', '.join(map(str, sorted(devices)))}")
    return f"{run}, replayed {', '.join(changes)}"


def follow(
    replayer: Replayer,
    every: int,
    measure: MeasureAll | None,
    step: Callable[[int], None],
) -> ReplayResult:
    """Replay to the end; errors in the journal end the replay and are returned as ``error``.

    ``step`` is called with every version; every ``every``-th version and the last become points.
    """
    out = ReplayResult(
        replayer.changed,
        begin=replayer.begin,
        version=replayer.begin,
        updates_checked=replayer.check_updates,
    )
    if out.changed:
        out.updates = dict.fromkeys(("used", "dropped", "left_out", "no_base", "unfit"), 0)
        out.converted_to = replayer.converts_to
    influenced, out.oldest = replayer.influenced, replayer.oldest
    if influenced is not None:
        out.inherited = 0
    started = time.monotonic()
    last: Moment | None = None
    try:
        for moment in replayer:
            last = moment
            out.records += 1
            if out.changed and is_used(moment.message):
                fate = _fate(moment)
                out.updates[fate] += 1
                if fate == "dropped" and moment.step.decision is not None:
                    out.why_dropped[moment.step.decision.reason] += 1
                if out.inherited is not None and influenced is not None and fate == "used":
                    out.inherited += moment.message.upload.tau >= influenced
            elif out.changed and _is_refused(moment.message):
                out.refused[moment.message.reason] += 1
            if moment.message.digest is None:
                continue
            out.version = moment.message.version
            out.made += 1
            out.identical += moment.identical is True
            step(out.version)
            if every and (out.version - out.begin) % every == 0:
                out.points.append(_point(moment, measure))
    except JournalError as error:
        out.error = str(error)
        last = None
    if every and last is not None and (not out.points or out.points[-1].version != out.version):
        out.points.append(_point(last, measure))
    if out.changed and last is not None and last.original is not None:
        out.distance = distance(last.original.state.model, last.model)
    out.checkpoints, out.adopted = replayer.checkpoints, replayer.adopted
    torn = replayer.torn
    out.torn = f"{torn.place}{torn.lost}" if torn else None
    out.seconds = time.monotonic() - started
    return out


def _is_refused(message: Message) -> TypeGuard[Taken]:
    return isinstance(message, Taken) and message.outcome == "refused"


def _fate(moment: Moment) -> str:
    """Fate of an update under another rule."""
    decision = moment.step.decision
    if decision is None:
        return moment.unused
    return "dropped" if decision.outcome == "dropped" else "used"


def _point(moment: Moment, measure: MeasureAll | None) -> Point:
    version, changed = moment.message.version, moment.model
    original = moment.original.state.model if moment.original else changed
    metrics = measure(version, original) if measure else {}
    if changed is original:
        return Point(version, metrics)
    return Point(
        version,
        metrics,
        measure(version, changed) if measure else {},
        moment.version,
        distance(original, changed),
    )


# showing


def rows(points: Sequence[Point], *, changed: bool) -> Iterator[list[object]]:
    """Rows of the table; the first has the columns' names."""
    names = sorted({name for point in points for name in point.original})
    if not changed:
        yield ["version", *names]
    else:
        both = [f"{name} {which}" for name in names for which in ("original", "changed")]
        yield ["version", *both, "distance", "version changed"]
    for point in points:
        if point.changed is None:
            yield [point.version, *(point.original.get(name) for name in names)]
            continue
        values = [one.get(name) for name in names for one in (point.original, point.changed)]
        yield [point.version, *values, point.distance, point.changed_version]


def show(out: ReplayResult, files: Sequence[Path]) -> None:
    """Print the result."""
    if out.points:
        header, *body = rows(out.points, changed=out.changed)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in header:
            table.add_column(cell(name), justify="right")
        for row in body:
            table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row))
        console().print(table)
    lines = in_words(out)
    lines.append(
        f"{out.made} versions from {out.begin} to {out.version}, {out.records} records, "
        f"{out.checkpoints} checkpoint{'' if out.checkpoints == 1 else 's'} passed, "
        f"{_pace(out)}"
    )
    if out.adopted:
        lines.append(f"the journal restarts with version {', '.join(map(str, out.adopted))}")
    if out.torn:
        lines.append(f"the journal ends with a torn record, as a crash leaves it: {out.torn}")
    lines += [str(file) for file in files]
    line("\n".join(lines))


def in_words(out: ReplayResult) -> list[str]:
    """The result in words: metrics, the distance of the models, and the updates' outcomes."""
    lines = [] if out.error is not None else [_result(out)]
    return [*lines, _used(out)] if out.changed else lines


def _result(out: ReplayResult) -> str:
    if out.distance is None:
        return out.same
    said = f"distance {out.distance:.4g} from the original; the original: {out.same}"
    last = out.points[-1] if out.points else None
    if last is not None and last.changed is not None and "accuracy" in last.changed:
        was, now = last.original["accuracy"], last.changed["accuracy"]
        return f"accuracy {now:.4f}, originally {was:.4f} ({now - was:+.4f}); {said}"
    return said


def _used(out: ReplayResult) -> str:
    updates = out.updates
    text = f"the changed rule used {updates['used']} of {sum(updates.values())} updates"
    if dropped := updates["dropped"]:
        text += f", dropped {dropped} ({', '.join(sorted(out.why_dropped))})"
    if left_out := updates["left_out"]:
        text += f", {left_out} left out"
    if unfit := updates["unfit"]:
        text += f", could not use {unfit} (no steps, or an unknown device)"
    if no_base := updates["no_base"]:
        text += f", could not convert {no_base} (trained from models that the journal lacks)"
    if refused := out.refused.total():
        why = ", ".join(sorted(out.refused))
        text += f"; {refused} that were refused ({why}) are journalled without their bytes"
    if out.converted_to is not None:
        text += f"; {_CONVERTED[out.converted_to]}"
    if out.inherited is not None:
        least = "at least " if out.oldest else ""  # earlier versions may have had it too
        text += (
            f"; {least}{out.inherited} of the {updates['used']} were trained from a model "
            "influenced by what was left out"
        )
    return text


def _pace(out: ReplayResult) -> str:
    seconds = out.seconds
    text = f"{seconds:.1f} s" if seconds >= 1 else f"{max(1, round(1000 * seconds))} ms"
    # Two digits: more would be noise.
    return f"{text}, {float(f'{out.made / seconds:.2g}'):,g} versions/s" if out.made else text


def as_numbers(out: ReplayResult, files: Sequence[Path]) -> dict[str, Any]:
    """Result as plain values, for JSON."""
    points = [dict(point.__dict__) for point in out.points]
    return dict(out.__dict__) | {"points": points, "files": [str(file) for file in files]}


# files


def write(out: Path, title: str, points: Sequence[Point]) -> list[Path]:
    """Write the table and picture of a comparison. Raises ConfigError."""
    with report.usable(out):
        out.mkdir(parents=True, exist_ok=True)
        with (out / TABLE).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows(points, changed=True))
        (out / PICTURE).write_bytes(pictures.png(_picture(title, points)))
    return [out / TABLE, out / PICTURE]


def _picture(title: str, points: Sequence[Point]) -> Figure:
    """The accuracy by both rules, and the distance between their models."""
    accuracies = {
        point.version: (point.original["accuracy"], point.changed["accuracy"])
        for point in points
        if point.changed is not None and "accuracy" in point.original
    }
    return pictures.replayed(title, accuracies, {one.version: one.distance for one in points})
