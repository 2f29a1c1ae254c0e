"""Questions that take a replay to answer: a bisection, or another rule. Each comes from a form.

A form's fields are also an address, so a link asks the same question again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeAlias
from urllib.parse import urlencode

import numpy as np

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.messages import Goal
from fedstream.history.bisect import Limit, limit_of
from fedstream.history.recorded_run import RecordedRun
from fedstream.journal.errors import ONLY_SUMS

_MEASUREMENTS = 50  # approximate number of versions that a curve of another rule has
_MOST_SETTINGS = 50
_LONGEST = 200  # characters of a metric's name
_DIGITS = 18  # more than any version or device has
_PROGRAM = re.compile(r"[:\\]")  # its name has a colon, which a quoted value can also escape

Fields: TypeAlias = Mapping[str, str]
Problems: TypeAlias = dict[str, str]  # what is wrong, by field


@dataclass(frozen=True)
class Bisection:
    """With which update did a metric go bad?"""

    metric: str
    limit: Limit
    every: int | None = None  # measure every N-th version; None: about 50 in all
    until: int | None = None  # the last version that counts; None: the newest
    # The metric as the run measured it: what is known of a run that goes on doesn't change what is
    # asked.
    recorded: Mapping[int, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class OtherRule:
    """What would another rule have made of the same updates, or the same without some devices?"""

    strategy: str | None  # None: as recorded
    sets: tuple[str, ...]
    without: frozenset[int]
    begin: int | None  # apply it after this version
    every: int  # measure every N-th version
    until: int | None = None  # the last version that counts; None: the newest


@dataclass(frozen=True)
class Distances:
    """How far did each device's updates go, and did the model go there too?"""

    until: int | None = None  # the last version that counts; None: the newest


Question: TypeAlias = Bisection | OtherRule | Distances


class _Reading:
    """Reads values from a form, and notes their errors."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.problems: Problems = {}

    def text(self, name: str) -> str:
        return self.fields.get(name, "").strip()

    def whole(self, name: str, least: int) -> int | None:
        """A whole number; None if it is left out, or wrong."""
        text = self.text(name)
        if not text:
            return None
        if _is_number(text) and int(text) >= least:
            return int(text)
        self.problems[name] = f"{text[:40]!r} is not a whole number from {least} on"
        return None

    def real(self, name: str) -> float | None:
        text = self.text(name)
        try:
            return float(text) if text else None
        except ValueError:
            self.problems[name] = f"{text[:40]!r} is not a number"
            return None

    def until(self, run: RecordedRun) -> int | None:
        """The last version that counts; None if it is left out, or wrong."""
        found = self.whole("until", 0)
        if found is not None and not run.oldest <= found <= run.newest:
            self.problems["until"] = (
                f"version {found} is not in the journal, which has {run.oldest} to {run.newest}"
            )
        return found


# bisection

BISECTION = ("metric", "side", "bound", "until", "every")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def bisection(fields: Fields, run: RecordedRun) -> tuple[Bisection | None, Problems]:
    """The question in a form and its problems; the question is None if there are problems."""
    reading = _Reading(fields)
    metric, every = reading.text("metric"), reading.whole("every", 1)
    until = reading.until(run)
    if not metric:
        reading.problems["metric"] = "which metric? Give one of the task's, such as accuracy"
    elif len(metric) > _LONGEST:
        reading.problems["metric"] = (
            f"a metric's name has at most {_LONGEST} characters, not {len(metric):,}"
        )
    bound, above = reading.real("bound"), reading.text("side") == "above"
    limit = None
    if "bound" not in reading.problems:
        try:
            limit = limit_of(None if above else bound, bound if above else None)
        except ConfigError as error:
            reading.problems["bound"] = str(error)
    if reading.problems or limit is None:
        return None, reading.problems
    recorded = {one.version: one.metrics[metric] for one in run.measured if metric in one.metrics}
    return Bisection(metric, limit, every, until, recorded), {}


@dataclass(frozen=True)
class Worsening:
    """A metric's first value, its best, and the worst after the best."""

    metric: str
    goal: Goal
    first: float
    best: float
    worst: float

    @property
    def is_grave(self) -> bool:
        """Whether more than half of the gain was lost."""
        return abs(self.worst - self.best) > abs(self.best - self.first) / 2


def worsening(run: RecordedRun) -> Worsening | None:
    """The first metric's first, best and worst later value; None if unmeasured or without goal."""
    metric = run.metrics[0] if run.metrics else "accuracy"
    goal = run.goal_of(metric)
    values = [one.metrics[metric] for one in run.measured if metric in one.metrics]
    values = [value for value in values if isfinite(value)]
    if not values or goal is None:
        return None
    best, worst_of = (min(values), max) if goal == "min" else (max(values), min)
    return Worsening(metric, goal, values[0], best, worst_of(values[values.index(best) :]))


def first_bisection(run: RecordedRun) -> dict[str, str]:
    """The initial form: the first metric; a bound halfway from its best to its worst later value.

    There is no bound if nothing was measured, or if the metric never got worse or has no goal.
    """
    it = worsening(run)
    if it is None:
        return {"metric": run.metrics[0] if run.metrics else "accuracy", "side": "below"}
    side = "above" if it.goal == "min" else "below"
    return {"metric": it.metric, "side": side, "bound": _between(it.best, it.worst)}


def _between(one: float, other: float) -> str:
    """The roundest number near the middle of two others."""
    low, high = sorted((one, other))
    texts = (f"{(one + other) / 2:.{digits}g}" for digits in range(1, 18))
    return next((text for text in texts if low < float(text) < high), "")


# distances

DISTANCES = ("until",)


def distances(fields: Fields, run: RecordedRun) -> tuple[Distances | None, Problems]:
    """The question in a form and its problems; the question is None if there are problems."""
    reading = _Reading(fields)
    until = reading.until(run)
    if run.models.head.masked:
        reading.problems["until"] = f"{ONLY_SUMS}: a single one has no distance"
    return (None if reading.problems else Distances(until)), reading.problems


# another rule

OTHER_RULE = ("strategy", "alpha", "staleness", "set", "without", "from", "until", "every")
_KEYS = {"staleness": "strategy.staleness.kind", "alpha": "strategy.alpha"}


def other_rule(fields: Fields, run: RecordedRun) -> tuple[OtherRule | None, Problems]:
    """The question in a form and its problems; the question is None if there are problems.

    The command's own errors are among the problems. A program that only the form names is not
    loaded: any visitor of the page could make it run.
    """
    reading = _Reading(fields)
    strategy = reading.text("strategy") or None
    quick = [(name, f"{key}={reading.text(name)}") for name, key in _KEYS.items()]
    given = [(name, item) for name, item in quick if reading.text(name)]
    given += [("set", one.strip()) for one in reading.text("set").splitlines() if one.strip()]
    if len(given) > _MOST_SETTINGS:
        reading.problems["set"] = f"{len(given)} settings: at most {_MOST_SETTINGS}"
    for name, item in [("strategy", f"name={strategy}"), *given] if strategy else given:
        if _PROGRAM.search(item):
            reading.problems[name] = (
                f"{item[:80]}: on this page, a rule is one of fedstream's or of an installed "
                "package; for one of your own, use fedstream replay"
            )
    parts = [one for one in re.split(r"[\s,;]+", reading.text("without")) if one]
    without: frozenset[int] = frozenset()
    if wrong := [one for one in parts if not _is_number(one)]:
        reading.problems["without"] = (
            f"{wrong[0][:40]!r} is not the number of a device: name them as in 3, 7"
        )
    else:
        without = frozenset(map(int, parts))
    begin, every, until = reading.whole("from", 0), reading.whole("every", 1), reading.until(run)
    if begin is not None and until is not None and begin > until:
        reading.problems.setdefault("until", f"version {until} is before version {begin}")
    if not (strategy or given or without or reading.problems):
        reading.problems["strategy"] = "what is to be different? Change the rule, or name a device"
    if not reading.problems:
        reading.problems |= _refused(run, strategy, given, without, begin)
    if reading.problems:
        return None, reading.problems
    sets = tuple(item for _, item in given)
    last = run.newest if until is None else until
    usual = max(1, (last - (run.oldest if begin is None else begin)) // _MEASUREMENTS)
    return OtherRule(strategy, sets, without, begin, every or usual, until), {}


def keys_in(recorded: Mapping[str, Any], prefix: str = "strategy.") -> dict[str, Any]:
    """A recorded rule's settings by their keys; of a private rule, those that a replay changes."""
    found: dict[str, Any] = {}
    for key, value in recorded.items():
        if key == "private":
            found["private.over"] = value["over"]
        elif isinstance(value, Mapping):
            found |= keys_in(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def rule_of(run: RecordedRun, other: RecordedRun) -> str:
    """The address that asks for a replay of this run's updates by the other run's rule.

    '' if both have the same rule.
    """
    ours, theirs = keys_in(run.models.head.strategy), keys_in(other.models.head.strategy)
    if ours == theirs:
        return ""
    name = "strategy.name"
    fields = {}
    if ours[name] != theirs[name]:
        fields["strategy"] = theirs[name]
    items = [
        f"{key}={json.dumps(value)}"
        for key, value in theirs.items()
        if key != name and (ours.get(key) != value or "strategy" in fields)
        if key != "private.over" or key in ours
    ]
    fields["set"] = "\n".join(items)
    return f"/what-if?{urlencode(fields)}"


def _refused(
    run: RecordedRun,
    strategy: str | None,
    given: Sequence[tuple[str, str]],
    without: frozenset[int],
    begin: int | None,
) -> Problems:
    """The errors of the command with these options, by the fields that cause them."""
    from fedstream.history.replay import rule_by
    from fedstream.journal.replay import Replayer

    def tried(count: int) -> Problems:
        """The error of a rule with the first ``count`` settings, noted at the last of them."""
        found: Problems = {}
        with _noting(found, given[count - 1][0] if count else "strategy"):
            rule = rule_by([item for _, item in given[:count]], strategy)
            with Replayer(run.journal, strategy=rule) as replayer:
                if rule is not None:
                    _ = replayer.converts_to  # makes the rule of each segment
        return found

    found: Problems = {}
    updates = run.columns.updates[run.columns.used]  # a replay would read all records for this
    if without and run.models.head.masked:
        found["without"] = f"{ONLY_SUMS}: no device can be left out of a sum"
    elif missing := without - set(np.unique(updates["device"]).tolist()):
        found["without"] = (
            f"device {min(missing)} never took part (the run has {run.models.head.devices} devices)"
        )
    with _noting(found, "from"):
        Replayer(run.journal, from_version=begin).close()
    if tried(len(given)):  # by which of them?
        found |= next(filter(None, map(tried, range(len(given) + 1))))
    return found


@contextmanager
def _noting(problems: Problems, name: str) -> Iterator[None]:
    """Note an error in the block as a field's problem."""
    try:
        yield
    except FedstreamError as error:
        problems[name] = str(error).replace(" (from --set)", "")  # here, the field is its source
