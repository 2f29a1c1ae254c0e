"""Norms, distances and cosines of a run's newest updates, from its journal, for the live page.

Only the journal has the updates' weights. The follower rebuilds the models from the newest
checkpoint on, for a short time per snapshot. If the run makes versions faster, the follower skips
some: then the figures are those of a part of the updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from time import thread_time

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Floats
from fedstream.history.live.recent import ROWS, Ring
from fedstream.history.live.snapshot import PUSHED, SeenPushes
from fedstream.history.model_stats import AHEAD
from fedstream.history.table import whole
from fedstream.journal import SUFFIX, Cut, Record, Segment, SegmentEnd
from fedstream.journal.contributions import cosine, direction, sampled
from fedstream.journal.rebuild import Rebuild, rule_of
from fedstream.journal.records import is_used
from fedstream.journal.updates import update_of
from fedstream.strategies.mixing import norm

_STRETCH = 4 * AHEAD  # versions that are read one after the other, however far behind: for cosines
_PATIENCE = 10  # looks after which a journal that could not be read is tried again
_MOST_BYTES = 64 << 20  # of a model; all devices' vectors together may take as much
_KEPT_BYTES = 32 << 20  # of directions that wait for their cosines


@dataclass(frozen=True, slots=True)
class _Course:
    """A version whose updates' cosines wait for later versions."""

    model: Floats  # sampled
    directions: list[tuple[int, Floats]]  # the updates' rows


class _TooLarge(FedstreamError):
    """The run's models are too large to be rebuilt here."""


class JournalFollower:
    """Reads one journal as it grows. One thread at a time may use it."""

    def __init__(self, journal: Path, *, weights: bool = True) -> None:
        """``weights``: the journal has the updates' bytes."""
        self._journal = journal
        self._rows = Ring(PUSHED, ROWS)
        self._problem = "" if weights else "updates are recorded without their weights"
        self._pauses = 0 if weights else -1  # looks that are left out; -1: all
        self._version = 0
        self._segment: Segment | None = None
        self._break_off()

    def give_up(self, why: str) -> SeenPushes:
        """Stop reading for good; returns the figures so far."""
        self._forget()
        self._problem, self._pauses = why, -1
        return self._seen()

    def _forget(self) -> None:
        """Forget the place in the journal."""
        if self._segment is not None:
            self._segment.close()
        self._segment = None
        self._break_off()

    def _break_off(self) -> None:
        """Drop updates that wait for later versions, since the next record isn't adjacent."""
        self._courses: deque[_Course] = deque()
        self._arriving: list[tuple[int, Floats]] = []
        self._kept = self._stretch = 0

    def look(self, seconds: float) -> SeenPushes:
        """Read on for some seconds of processor time; returns the figures so far.

        Raises no FedstreamError: the result names the problem.
        """
        if not self._pauses:
            try:
                self._problem = self._read(thread_time() + seconds)
            except _TooLarge as error:  # it will be so at every look
                self.give_up(str(error))
            except FedstreamError as error:  # damage, a file that is gone, a rule that may not run
                self._forget()
                self._problem, self._pauses = str(error), _PATIENCE
            finally:
                if self._segment is not None:
                    self._segment.close()
        elif self._pauses > 0:
            self._pauses -= 1
        return self._seen()

    def _seen(self) -> SeenPushes:
        return SeenPushes(self._rows.newest(), self._version, self._problem)

    def _read(self, until: float) -> str:
        """Read to the end, or until a time; returns the problem. Raises FedstreamError."""
        try:
            names = sorted(one.name for one in self._journal.iterdir() if one.suffix == SUFFIX)
        except OSError:
            names = []
        if not names:
            return "the journal can't be read from here"
        segment = self._segment
        if segment is None or self._is_left_behind(segment.path.name, names):
            segment = self._begin(Segment(self._journal / names[-1]))
        while not self._advance(segment, until) and segment.path.name != names[-1]:
            segment.close()
            self._segment = later = Segment(self._journal / names[-1])
            there = Cut(self._at.at, self._at.chain, later.path.name)
            follows = later.head.predecessor == segment.path.name and later.follows == there
            is_next = follows and later.standing.why == "continued"
            segment = self._enter(later) if is_next else self._begin(later)
        return ""

    def _is_left_behind(self, name: str, names: Sequence[str]) -> bool:
        """Whether to continue with the newest segment, because too many versions were read."""
        return name not in names or (
            self._stretch >= _STRETCH and any(later > name for later in names[:-1])
        )

    def _begin(self, segment: Segment) -> Segment:
        """Begin anew with a segment's checkpoint. Raises FedstreamError."""
        if self._segment is None:  # the place was lost: what was read from here may come again
            self._rows = Ring(PUSHED, ROWS)
        self._break_off()
        return self._enter(segment)

    def _enter(self, segment: Segment) -> Segment:
        self._segment = segment
        rule, size = rule_of(segment), segment.layout.nbytes
        if size * max(1, (rule.remembered or 0) + len(rule.vector_names)) > _MOST_BYTES:
            raise _TooLarge("its models are too large to be made again beside other work")
        self._rebuild = Rebuild(segment)
        self._at, self._version = segment.beginning, segment.standing.version
        return segment

    def _advance(self, segment: Segment, until: float) -> bool:
        """Read on in a segment; returns whether the time is over."""
        for record in segment.appended(self._at):
            self._take(segment, record)
            self._at = SegmentEnd(segment.path, record.end, record.chain)
            if thread_time() >= until:
                return True
        return False

    def _take(self, segment: Segment, record: Record) -> None:
        entry, rebuild = record.entry, self._rebuild
        update, row, part = None, None, None
        if is_used(entry) and record.payload_bytes:
            update = update_of(segment, record, rebuild.spare())
            wants = direction(entry.upload, update, rebuild.progress.state.model)
            device = whole(entry.upload.device)
            row = device, entry.version, norm(update.floats), norm(wants), nan
            part = sampled(wants).copy()
        step = rebuild.take(record, update)
        if update is not None:
            rebuild.free(update)
        if row is not None and part is not None:  # not before: what is refused here is no figure
            number = self._rows.add(row)
            if self._kept + part.nbytes <= _KEPT_BYTES:
                self._kept += part.nbytes
                self._arriving.append((number, part))
        if step.made is not None:
            self._version = step.after.state.version
            self._stretch += 1
            self._made(sampled(step.after.state.model.parameters).copy())

    def _made(self, model: Floats) -> None:
        """Add a version, and compute the cosines of the version AHEAD versions before it."""
        self._courses.append(_Course(model, self._arriving))
        self._arriving = []
        if len(self._courses) > AHEAD:
            course = self._courses.popleft()
            way = model - course.model
            for row, wants in course.directions:
                self._kept -= wants.nbytes
                if (found := cosine(way, wants)) is not None:
                    self._rows.set(row, "cosine", found)
