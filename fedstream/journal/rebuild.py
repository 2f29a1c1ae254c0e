"""Rebuilding models from a journal, for recovery and replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, fields, replace

from pydantic import TypeAdapter, ValidationError

from fedstream.core import reasons
from fedstream.core.digest import algorithm_of
from fedstream.core.errors import ConfigError, Undecodable
from fedstream.core.formats import Format, format_of
from fedstream.core.given import given
from fedstream.core.layout import Model, vector_of
from fedstream.core.messages import Contribution, Upload, first_wrong
from fedstream.core.records import End, Quarantines, counted
from fedstream.journal.errors import (
    Diverged,
    JournalDamaged,
    JournalError,
    NotRecorded,
    RuleChanged,
    UpdateAltered,
)
from fedstream.journal.norms import Norms
from fedstream.journal.progress import (
    PrivacyAccount,
    Progress,
    Step,
    close_round,
    forget,
    open_sum,
    take,
)
from fedstream.journal.records import (
    EntryRecord,
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    SegmentHead,
    Standing,
    StepScaled,
    SumOpened,
    Taken,
    is_used,
)
from fedstream.journal.segment import Record, Segment, SegmentEnd, Tear
from fedstream.journal.updates import update_of
from fedstream.private import NotInstalled
from fedstream.runtime.plugins import NotTrusted, allowed, runs_program
from fedstream.strategies import (
    DeviceVectors,
    Memory,
    State,
    Strategy,
    names_in,
    sources_of,
    strategy_of,
)


def device_vectors(segment: Segment, strategy: Strategy) -> DeviceVectors | None:
    """The strategy's vectors, each read from the segment that last wrote it, and its integers.

    None if the strategy keeps neither, or has not yet. Raises JournalError.
    """
    here, elsewhere, numbers = segment.standing.here, segment.elsewhere, segment.standing.numbers
    if not (here or elsewhere or numbers):
        return None
    vectors = strategy.vectors(strategy.span(segment.layout))
    vectors.numbers.update(numbers)
    most = vectors.devices + len(vectors.names)
    if vectors.numbers and max(vectors.numbers) >= most:
        raise JournalDamaged(
            f"{segment.standing_record.place.where}: has an integer of vector "
            f"{max(vectors.numbers)}, but the strategy has {most} vectors"
        )
    wanted: dict[str, set[int]] = {}
    for device, name in elsewhere.items():
        wanted.setdefault(name, set()).add(device)
    _load(segment, set(here), vectors)
    for name, missing in wanted.items():
        path = segment.path.with_name(name)
        if not path.exists():
            raise JournalError(
                f"{path}: is missing, but {segment.path.name} needs it for {len(missing)} vectors, "
                f"such as {vectors.label(min(missing))}: restore it"
            )
        with Segment(path) as other:
            _load(other, missing, vectors)
    vectors.changed.clear()
    return vectors


def _load(segment: Segment, devices: set[int], vectors: DeviceVectors) -> None:
    for record, message in segment.vectors():
        if message.device not in devices:
            continue
        vector = vector_of(vectors.write(message.device))
        segment.load(record, vector)
        if not vector.is_of(message.digest):
            raise JournalDamaged(
                f"{record.place.where}: {vectors.label(message.device)} does not match its digest"
            )
        devices.discard(message.device)
    if devices:
        raise JournalDamaged(f"{segment.path}: lacks {vectors.label(min(devices))}")


_SHORT = 1e-30  # the smallest gamma H that counts as training
# Tolerated difference of a weight between two machines' C libraries: in its last bits, or too small
# to change any model.
_WEIGHTS, _NO_WEIGHT = 1e-12, 1e-60
_END: TypeAdapter[End] = TypeAdapter(End)


def standing_of(
    progress: Progress, why: str, *, digest: str, time: float, **more: object
) -> tuple[Standing, tuple[Model, ...]]:
    """Make the standing of a run, and the models of its payload."""
    state, memory = progress.state, progress.state.memory
    standing = Standing.model_validate(
        {
            "why": why,
            "version": state.version,
            "digest": digest,
            "time": time,
            "arrivals": memory.arrivals,
            "weight": memory.weight,
            "memory": memory.model.digest_like(digest) if memory.model else None,
            "numbers": tuple(memory.devices.numbers.items()) if memory.devices else (),
            "held": progress.held,
            "mean_staleness": progress.mean_staleness,
            "sizes": progress.norms.last,
            "samples": progress.norms.samples,
            "sealed": progress.sealed,
            "closed": memory.closed,
            "opened": memory.opened,
            "accounts": tuple(
                (device, one.squares, one.sums, one.dropped)
                for device, one in sorted(progress.accounts.items())
            ),
            "sums": progress.sums,
            "dropped": progress.dropped,
            "recent": progress.recent,
            "scale": progress.scale,
            "scaled_at": progress.scaled_at,
            **more,
        }
    )
    return standing, tuple(state.models())


def check_checkpoint(segment: Segment) -> None:
    """Raise JournalDamaged unless the models and vectors at the segment's beginning are intact.

    Allocates no memory for them.
    """
    said, record, size = segment.standing, segment.standing_record, segment.layout.nbytes
    parts = [("the checkpoint's model", record, 0, size, said.digest)]
    if said.memory is not None:
        parts.append(("the checkpoint's memory", record, size, size, said.memory))
    parts += [
        ("a vector", one, 0, one.payload_bytes, message.digest)
        for one, message in segment.vectors()
    ]
    for what, one, begin, nbytes, digest in parts:
        if segment.digest(one, begin, nbytes, like=digest) != digest:
            raise JournalDamaged(f"{one.place.where}: {what} does not match its digest")


class Rebuild:
    """Advances a run by a journal's records, and checks it against them.

    Holds two models, the strategy's memory, and the models that updates were loaded into.
    """

    def __init__(self, segment: Segment) -> None:
        """Begin with the standing of ``segment``. Raises JournalError."""
        said, strategy = segment.standing, rule_of(segment)
        model = Model(segment.layout)
        memory = Model(segment.layout) if said.memory is not None else None
        segment.load(segment.standing_record, *([model, memory] if memory else [model]))
        if not model.is_of(said.digest) or (memory and not memory.is_of(str(said.memory))):
            raise Diverged(
                f"{segment.standing_record.place.where}: the checkpoint's "
                "model does not match its digest"
            )
        vectors = device_vectors(segment, strategy)
        stalest = max((one.staleness for one in said.held), default=0)
        kept = Memory(
            memory, said.arrivals, said.weight, vectors, said.closed, said.opened, stalest
        )
        self.progress = Progress(
            State(said.version, model, kept),
            said.held,
            said.mean_staleness,
            Norms(said.sizes, said.samples),
            said.sealed,
            {device: PrivacyAccount(*numbers) for device, *numbers in said.accounts},
            said.sums,
            said.dropped,
            said.recent,
            said.scale,
            said.scaled_at,
        )
        self.strategy = strategy
        self.format = format_in(segment)
        self.digest = said.digest  # of the newest version
        self.time = said.time
        self.reweighed = 0  # updates whose weight this machine computes minimally differently
        self._free: list[Model] = []

    def copy(self) -> Rebuild:
        """A copy at the same place, with its own buffers."""
        other = copy(self)
        other.progress = replace(self.progress, state=self.progress.state.copy())
        other._free = []  # noqa: SLF001  (the same class)
        return other

    def spare(self) -> Model:
        """Take a model to write into; return it with :meth:`free`."""
        return self._free.pop() if self._free else Model(self.progress.state.model.layout)

    def free(self, *models: Model) -> None:
        """Return models for reuse, except those in the run's state."""
        in_use = {id(model) for model in self.progress.state.models()}
        self._free += [model for model in models if id(model) not in in_use]

    def follow(self, record: Record, update: Model | None) -> Step:
        """Follow one record. ``update``: its payload, if the model needs it, which is freed.

        Raises Diverged unless outcome and digest are the recorded ones, and the recorded weight is
        the rule's, up to its last bits.
        """
        step = self.take(record, update)
        if update is not None:
            self.free(update)
        self.check(record, step)
        return step

    def take(self, record: Record, update: Model | None) -> Step:
        """The first half of :meth:`follow`, which does not free ``update``."""
        message, before = record.message, self.progress
        if isinstance(message, Taken):
            before = before.with_sizes(message.sizes)
        used: tuple[Model, ...] = (before.state.model,)
        if isinstance(message, SumOpened):
            used = tuple(before.state.models())
            step = self._opened(record, message, update)
        elif isinstance(message, RoundClosed) and not message.late:
            used = tuple(before.state.models())
            step = close_round(self.strategy, before, message.round, drops=message.dropped > 0)
        elif is_used(message):
            self._check_fits(record, message.upload)
            spare = self.spare()
            used += (spare,)
            step = take(
                self.strategy,
                before,
                message.upload,
                recorded(record, update),
                spare,
                weight=message.weight,
            )
        elif isinstance(message, StepScaled):
            step = Step(replace(before, scale=message.scale, scaled_at=message.at))
        elif isinstance(message, QuarantineSet) and not message.release:
            step = Step(forget(self.strategy, before, message.devices))
        else:
            step = Step(before)
        self.progress = step.after
        self.free(*used)
        return step

    def _opened(self, record: Record, message: SumOpened, masks: Model | None) -> Step:
        """Open a private batch's sum as the record says. Raises JournalDamaged if none is due."""
        before, opens = self.progress, message.masks is not None
        if not self.strategy.is_due(before.state) or opens != (masks is not None):
            raise JournalDamaged(f"{record.place.where}: a sum was opened that was not due")
        return open_sum(self.strategy, before, masks, message.reason)

    def _check_fits(self, record: Record, upload: Upload) -> None:
        """Raise JournalDamaged for a used update that an updater would have refused."""
        state, rule = self.progress.state, self.strategy
        why = unfit(rule, upload)
        if upload.tau > state.version:
            why = f"it was trained from version {upload.tau}, but the newest is {state.version}"
        elif upload.layout != state.model.layout.signature:
            why = "its layout differs"
        elif upload.sends != rule.sends:
            why = reasons.sends(upload.sends)
        elif format_of(upload.format).is_masked != rule.masked:
            why = reasons.WIRE_FORMAT
        if why:
            raise JournalDamaged(
                f"{record.place.where}: an update was used that should not have been: {why}"
            )

    def check(self, record: Record, step: Step) -> None:
        """The second half of :meth:`follow`: compare with the record. Raises Diverged."""
        message, version = record.message, step.after.state.version
        if not isinstance(message, EntryRecord):
            return
        if step.made is not None:
            model = step.after.state.model
            self.digest, self.time = model.digest_like(self.digest), message.time
            if message.given is not None and self.digest == message.digest:
                self._check_given(record, model, message.given)
        found = self.digest if step.made is not None else None
        if (version, found) != (message.version, message.digest):
            now, then = f"digest {found}", str(message.digest)
            if version != message.version or found is None or message.digest is None:
                now, then = _made(version, found), _made(message.version, message.digest)
        elif isinstance(message, Taken) and step.decision is not None:
            outcome, late = step.decision.outcome, step.decision.staleness
            if (outcome, late) == (message.outcome, message.staleness):
                weight = self._weighed(message)
                if math.isclose(weight, message.weight, rel_tol=_WEIGHTS, abs_tol=_NO_WEIGHT):
                    self.reweighed += weight != message.weight
                    return
                now, then = f"weight {weight!r}", f"weight {message.weight!r}"
            else:
                now = f"{outcome} with staleness {late}"
                then = f"{message.outcome} with staleness {message.staleness}"
        else:
            return
        raise Diverged(
            f"{record.place.where}: version {message.version} is not reproduced: {now}, "
            f"the journal says {then}"
        )

    def _check_given(self, record: Record, model: Model, recorded: str) -> None:
        """Raise Diverged unless the version's encoding has the recorded digest."""
        version, sends = record.entry.version, self.strategy.sends
        found = given(
            model, self.format, version=version, sends=sends, digests=algorithm_of(recorded)
        ).digest
        if found != recorded:
            raise Diverged(
                f"{record.place.where}: version {record.entry.version} in {self.format.name} is "
                f"not reproduced: digest {found}, the journal says {recorded}"
            )

    def _weighed(self, message: Taken) -> float:
        """The rule's weight for a recorded update, computed on this machine."""
        upload = message.upload
        version = upload.since + message.staleness  # the newest one when it arrived
        rule = self.strategy.scaled(self.progress.scale)
        return rule.weigh(version, upload.since, upload.samples)


def rule_of(segment: Segment) -> Strategy:
    """The strategy that a segment was written with.

    Raises JournalDamaged if it is unknown; ConfigError if its program can't be loaded; and unless
    :func:`fedstream.runtime.plugins.allowing` permits it, NotTrusted if the program may not run,
    and RuleChanged if its source isn't the recorded one.
    """
    head = segment.head
    try:
        rule = strategy_of(head.strategy, head.devices)
    except NotTrusted as error:
        raise NotTrusted(
            f"{segment.path}: {error}: give --trust-recorded-code if you trust this recording"
        ) from error
    except ConfigError as error:
        if isinstance(error, NotInstalled) or any(map(runs_program, names_in(head.strategy))):
            raise ConfigError(f"{segment.path}: {error}") from error
        raise JournalDamaged(f"{segment.path}: {error}") from error
    if head.sources and not allowed().changed:
        check_sources(segment, rule)
    return rule


def format_in(segment: Segment) -> Format:
    """The format in which a segment's versions were published. Raises JournalDamaged."""
    try:
        return format_of(segment.head.format)
    except Undecodable as error:
        raise JournalDamaged(f"{segment.path}: {error}") from error


def check_sources(segment: Segment, rule: Strategy) -> None:
    """Raise RuleChanged unless ``rule`` has the sources that the segment recorded."""
    now = sources_of(rule)
    for key, then in segment.head.sources.items():
        if now.get(key) != then:
            raise RuleChanged(
                f"{segment.path}: strategy.{key}: its source has changed since (SHA-256 "
                f"{then[:12]}... when recorded, {(now.get(key) or 'none')[:12]}... now): restore "
                "it, or go on with it as it is: --changed-rules"
            )


def _made(version: int, digest: str | None) -> str:
    return f"version {version}, {f'digest {digest}' if digest else 'none made'}"


def unfit(rule: Strategy, upload: Upload) -> str:
    """The reason why a rule can't use an update, by its metadata; '' for none."""
    if rule.remembered is not None and upload.device >= rule.remembered:
        return reasons.UNKNOWN_DEVICE
    # The inverse of gamma H must be a finite float32, so that zero times it is zero.
    if rule.by_steps and not (upload.steps > 0 and _SHORT <= upload.lr * upload.steps < math.inf):
        return reasons.NO_STEPS
    return ""


def recorded(record: Record, update: Model | None) -> Model:
    """The update of a record. Raises NotRecorded without weights."""
    if update is None:
        raise NotRecorded(
            f"{record.place.where}: an update was recorded without its weights "
            "(journal.weights = false)"
        )
    return update


@dataclass
class Recovered:
    """The state of a run according to its journal."""

    head: SegmentHead
    progress: Progress | None  # None: the updates since the checkpoint have no weights
    checkpoint: Progress
    version: int
    digest: str
    time: float  # of the version
    made: tuple[Contribution, ...]  # the updates in it
    journalled: dict[str, int]  # tasks by how they ended
    counts: dict[str, int]  # Redis's last other counts
    done: dict[str, End]  # by task, oldest first
    rounds: list[str]  # control entries, oldest first
    forgotten: int
    finished: str | None
    ending: SegmentEnd  # of the segment, after the last record that counts
    norms: Norms  # of the newest updates, with or without their weights
    quarantines: Quarantines
    evaluation: str  # the newest evaluation on the devices that has a record
    stored: dict[int, str] = field(default_factory=dict)  # device -> segment with its vector
    records: int = 0
    reweighed: int = 0  # updates whose weight this machine computes minimally differently
    torn_bytes: int = 0
    torn: Tear | None = None  # place of a record torn by a crash


def recovered(segment: Segment, until: str | None = None) -> Recovered:
    """Follow the newest segment to its end, or to the end of the version with digest ``until``.

    Raises JournalError, including Diverged.
    """
    said = segment.standing
    rebuild = Rebuild(segment)
    found = Recovered(
        head=segment.head,
        progress=rebuild.progress,
        checkpoint=rebuild.progress,
        version=said.version,
        digest=said.digest,
        time=said.time,
        made=said.made,
        journalled=said.journalled,
        counts=said.counts,
        done={end.task: end for end in _ends(segment)},
        rounds=list(said.rounds),
        forgotten=said.forgotten,
        finished=said.finished,
        ending=segment.beginning,
        norms=rebuild.progress.norms,
        quarantines=Quarantines(said.quarantines, said.quarantined),
        evaluation=said.evaluation,
        stored=dict.fromkeys(said.here, segment.path.name) | segment.elsewhere,
    )
    for record in segment.records():
        message = record.entry
        if until == found.digest and message.digest is not None:
            break
        if found.progress is not None and not _followed(found, rebuild, segment, record):
            break
        found.records += 1
        found.ending = SegmentEnd(segment.path, record.end, record.chain)
        if message.digest is not None:
            found.version, found.digest, found.time = message.version, message.digest, message.time
        found.finished = message.finished or found.finished
        found.counts = message.counts
        if isinstance(message, Taken):
            end = end_of(message)
            found.done[end.task] = end
            found.norms = found.norms.grown(message.sizes) if message.sizes else found.norms
            if is_used(message):
                found.norms = found.norms.with_samples(message.upload.samples)
            found.journalled = counted(found.journalled, end)
        elif message.entry:
            found.rounds.append(message.entry)
        if isinstance(message, QuarantineSet):
            found.quarantines = quarantines_after(found.quarantines, message)
        elif isinstance(message, EvaluationEnded):
            found.evaluation = message.evaluation
    found.torn_bytes, found.torn = segment.size - found.ending.at, segment.torn
    found.reweighed = rebuild.reweighed
    return found


def _ends(segment: Segment) -> Iterator[End]:
    """The recent ends of tasks in the segment's standing. Raises JournalDamaged."""
    names = [one.name for one in fields(End)]
    for row in segment.done():
        try:
            yield _END.validate_python(dict(zip(names, row, strict=False)))
        except ValidationError as error:
            where = segment.standing_record.place.where
            raise JournalDamaged(f"{where}: invalid end of a task: {first_wrong(error)}") from error


def _followed(found: Recovered, rebuild: Rebuild, segment: Segment, record: Record) -> bool:
    """Follow a record; False if its payload never reached the disk, so the tail is torn."""
    update: Model | None = None
    if is_used(record.message) and not record.payload_bytes:
        found.progress = None
        return True
    if record.payload_bytes:
        try:
            update = update_of(segment, record, rebuild.spare())
        except UpdateAltered as error:
            segment.tear(record.place.offset, str(error))
            return False
    step = rebuild.follow(record, update)
    found.progress = step.after
    if step.made is not None:
        found.made = step.made
    return True


def quarantines_after(before: Quarantines, record: QuarantineSet) -> Quarantines:
    """The quarantines after a record."""
    if record.release:
        return before.released(record.devices)
    return before.quarantined(record.devices, record.why, record.time, record.version)


def end_of(record: Taken) -> End:
    """The end of a task according to its record."""
    used = record.outcome in ("applied", "buffered")
    return End(
        task=record.upload.task,
        attempt=record.upload.attempt,
        outcome=record.outcome,
        reason=record.reason,
        device=record.upload.device,
        version=record.version,
        staleness=record.staleness,
        weight=record.weight if used else None,
    )
