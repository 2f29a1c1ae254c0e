"""What a journal should say, worked out from what the trainers noted down.

Parser, arithmetic and digests are the suite's own; the updates' bytes are those that trainers say
they made, not those that the journal has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tests.chaos.arithmetic import Course, Shape, Vector, since
from tests.chaos.formats import decoded, feeds_back, fits
from tests.chaos.pages import Pages, Unreadable, Written, chain, counting, digest_of

Note = Mapping[str, Any]
Notes = Mapping[tuple[str, int, str], Note]
USED = ("applied", "buffered")
_MODELS = ("fedasync", "fedavg")  # rules that take these; the others take deltas
_WEIGHT = 1e-9  # relative: two mathematical libraries may round the last bit otherwise


@dataclass
class Account:
    """A journal, followed from its beginning, and all that is wrong with it."""

    records: list[Written] = field(default_factory=list)
    made: dict[int, str] = field(default_factory=dict)  # version -> digest, as it must be
    shape: Shape = field(default_factory=lambda: Shape(0, 0, 0))
    version: int = -1
    model: str = ""  # digest of the newest
    given: str = ""  # of the newest as devices are given it; '': the same
    devices: dict[int, str] = field(default_factory=dict)  # digests of what is kept of each
    barred: set[int] = field(default_factory=set)  # devices in quarantine at the end
    quarantines: int = 0  # how often that changed
    scale: float | None = None  # of the rule's step in the end; None: it does not adapt
    drift: float = 0.0  # how far SCAFFOLD's c is from the mean of all c_i, at most
    wrong: list[str] = field(default_factory=list)

    @property
    def taken(self) -> list[dict[str, Any]]:
        """The records of updates."""
        return [record.message for record in self.records if record.kind == "taken"]


def notes_of(folder: Path) -> dict[tuple[str, int, str], Note]:
    """What trainers noted down, by task and the model that they began with."""
    found: dict[tuple[str, int, str], Note] = {}
    for path in sorted(folder.glob("*.notes")):
        with path.open("rb") as file:
            for note in msgpack.Unpacker(file, use_list=False):
                found[note["task"], note["tau"], note["base"]] = note
    return found


def accounted(journal: Path, notes: Notes | None) -> Account:
    """Follows a journal to its end, or to where it is no journal.

    ``notes``: what trainers noted down; None: the journal is believed what was sent.
    """
    account = Account()
    try:
        segments = list(counting(chain(journal)))
        if not segments:
            raise Unreadable(f"{journal}: there is no journal")
        _Follower(account, segments[0][0], notes).follow(segments)
    except Unreadable as error:
        account.wrong.append(str(error))
    return account


class _Follower:
    def __init__(self, account: Account, first: Pages, notes: Notes | None) -> None:
        said, head = first.standing.message, first.head
        shape = Shape.of(msgpack.unpackb(head["layout"]))
        size = 4 * (shape.parameters + shape.buffers + shape.controls)
        model = np.frombuffer(first.standing.payload[:size], np.float32)
        self.course = Course(head["strategy"], shape, head["devices"], model, said["version"])
        self.account = account
        account.shape = shape
        self.notes = notes
        self.models: dict[int, bytes] = {}
        self.formats: dict[int, str] = {}  # in which versions were published
        self.given: dict[int, str] = {}  # digests of versions that were encoded
        self.began: dict[int, bytes] = {}  # what trainers had of them
        self.format: str = head.get("format", "f32")
        self.like = said["digest"]  # as all of the run's models' are
        self.finished: str | None = None
        self.ends: int = head["versions"]  # the run's last version, by the newest segment
        self._made(first.standing)

    def follow(self, segments: list[tuple[Pages, list[Written]]]) -> None:
        for number, (segment, records) in enumerate(segments):
            self.format = segment.head.get("format", "f32")
            if number:
                self.account.wrong += self._standing(segment)
            if segment.head["versions"] > self.ends:  # the run was extended
                self.ends, self.finished = segment.head["versions"], None
            for record in records:
                self.account.records.append(record)
                self.account.wrong += [f"{record}: {what}" for what in self._record(record)]
        account, course = self.account, self.course
        account.version, account.model = course.version, self._digest(course.model)
        account.given = self.given.get(course.version, "")
        account.scale = course.scale if "adapt" in course.rule else None
        account.devices = {d: digest_of(v.tobytes()) for d, v in course.last.items()}

    def _standing(self, segment: Pages) -> Iterator[str]:
        """A checkpoint says what the records before it give."""
        said, course = segment.standing.message, self.course
        sums = None if course.sums is None else self._digest(course.sums)
        mine = (course.version, self._digest(course.model), sums, course.arrivals)
        its = (said["version"], said["digest"], said.get("memory"), said["arrivals"])
        if said["why"] == "adopted":
            yield f"{segment.name}: begins with a model of Redis's, which nobody asked for"
        barred = [device for group in said.get("quarantined", ()) for device in group["devices"]]
        inside = (self.account.quarantines, sorted(self.account.barred))
        if (said.get("quarantines", 0), sorted(barred)) != inside:
            yield f"{segment.standing}: {sorted(barred)} in quarantine, its records give {inside}"
        step = (said.get("scale", 1.0), said.get("scaled_at", 0))
        if step != (course.scale, course.scaled_at):
            yield f"{segment.standing}: scale and its version are {step}, not {course.scale}"
        if mine != its:
            yield f"{segment.standing}: the checkpoint is {its}, its records give {mine}"
        models = course.model.tobytes() + (b"" if course.sums is None else course.sums.tobytes())
        if segment.standing.payload != models:
            yield f"{segment.standing}: the checkpoint's bytes are not what its records give"

    def _record(self, record: Written) -> Iterator[str]:
        message, course, before = record.message, self.course, self.course.version
        made = False
        if message["k"] == "quarantine_set":
            yield from self._quarantine(message)
        elif message["k"] == "step_scaled":
            yield from self._scaled(message)
        elif message["k"] == "round_closed":
            if not message["late"] and message["round"] == course.version and course.arrivals:
                course.step()
                made = True
        elif message["outcome"] in USED:
            yield from self._update(record)
            if message["upload"]["device"] in self.account.barred:
                yield "used, although its device is in quarantine"
            made = course.version != before
            if message["outcome"] != ("applied" if made else "buffered"):
                yield f"{message['outcome']}, but it {'made' if made else 'did not make'} a version"
        elif message["outcome"] not in ("refused", "given_up"):
            yield f"ended as {message['outcome']}"
        elif (message.get("reason") == "device quarantined") and (
            message["upload"]["device"] not in self.account.barred
        ):
            yield "refused, although its device is not in quarantine"
        yield from self._version(record, made)

    def _quarantine(self, message: dict[str, Any]) -> Iterator[str]:
        """Devices go into quarantine that were not in it, or are released that were."""
        devices, barred = set(message["devices"]), self.account.barred
        self.account.quarantines += 1
        if not devices or devices & barred != (devices if message["release"] else set()):
            yield f"it changes nothing for some of {sorted(devices)}: {sorted(barred)} were in"
        if message["release"]:
            barred -= devices
        else:
            barred |= devices
            for device in message["devices"]:
                self.course.forget(device)

    def _scaled(self, message: dict[str, Any]) -> Iterator[str]:
        """Later steps are longer or shorter, for the sake of versions not decided on before."""
        course, scale, at = self.course, message["scale"], message["at"]
        rate = float(course.rule[message["key"]])
        bounds = course.rule["adapt"]
        if not bounds["least"] / rate <= scale <= bounds["most"] / rate or scale == course.scale:
            yield f"scaled from {course.scale} to {scale}"
        if not course.scaled_at < at <= course.version:
            yield f"scaled for version {at}, behind version {course.scaled_at}"
        if message["rate"] != rate * scale:
            yield f"the rate is {message['rate']}, not {rate * scale}"
        course.scale, course.scaled_at = scale, at

    def _version(self, record: Written, made: bool) -> Iterator[str]:
        message, course = record.message, self.course
        if message["version"] != course.version:
            yield f"version {message['version']}, but the updates make version {course.version}"
        own = self._digest(course.model) if made else None
        if message.get("digest") != own:
            yield f"version {message['version']} is {message.get('digest')}, worked out as {own}"
        if made and self.finished:
            yield f"version {message['version']} was made behind: {self.finished}"
        self.finished = self.finished or message.get("finished")
        if made:
            self._made(record)

    def _update(self, record: Written) -> Iterator[str]:
        """An update that was used: was it made, was it this, does it weigh that?"""
        upload, course = record.message["upload"], self.course
        d = course.version - since(upload)
        if d < 0 or record.message["staleness"] != d:
            yield f"staleness {record.message['staleness']}, but it is {d} versions old"
        weight, said = course.weight(upload), record.message["weight"]
        if not math.isclose(weight, said, rel_tol=_WEIGHT):
            yield f"weight {said!r}, the rule gives {weight!r}"
        if digest_of(record.payload, upload["digest"]) != upload["digest"]:
            yield f"task {upload['task']}: not the bytes that its trainer announced"
        sent = decoded(upload.get("format", "f32"), record.payload, course.shape)
        if self.notes is not None:
            note = self.notes.get((upload["task"], upload["tau"], upload["base"]))
            if note is None:
                yield f"task {upload['task']}: no trainer made this update"
            else:
                yield from self._as_noted(note, upload, sent)
                if upload.get("format", "f32") == "f32":
                    sent = _made(note, course)
        course.take(upload, sent, said)

    def _as_noted(self, note: Note, upload: Mapping[str, Any], sent: Vector) -> Iterator[str]:
        """An update is what its trainer says of it, as far as its format keeps that."""
        said = {**upload, "samples": upload.get("claimed") or upload["samples"]}
        is_trusted = upload.get("handed") is None  # others' steps count as their task asked for
        for name in ("device", "samples", "lr", "seed", *(["steps"] if is_trusted else [])):
            if note[name] != said[name]:
                yield f"{name} {said[name]!r}, the trainer's was {note[name]!r}"
        yield from self._as_given(note, upload)
        made, shape = _made(note, self.course), self.course.shape
        name, split = upload.get("format", "f32"), self.course.shape.parameters
        if feeds_back(name):  # what earlier ones left unsent is in it: tests/chaos/unsent.py
            fitting = sent[split:].tobytes() == made[split:].tobytes()
        else:
            fitting = fits(name, sent, made, shape, at_random=self.at_random)
        if not fitting:
            yield f"task {upload['task']}: not the bytes that the trainer sent"

    def _as_given(self, note: Note, upload: Mapping[str, Any]) -> Iterator[str]:
        """A trainer began with a version as it was published: everyone with the same bits."""
        tau, data = upload["tau"], note["began"]
        version = self.models.get(tau, b"")[: len(data)]
        name, shape = self.formats.get(tau, "f32"), self.course.shape
        x, t = (np.frombuffer(part, np.float32) for part in (data, version))
        fitting = len(x) == len(t) and fits(name, x, t, shape, at_random=self.at_random)
        if not fitting or self.began.setdefault(tau, data) != data:
            yield f"the trainer began with another model than version {tau}"
        known = self.given.get(tau)
        if known is not None and known != upload["base"]:
            yield f"version {tau} was given as {known}, the trainer says {upload['base']}"

    @property
    def at_random(self) -> bool:
        """Whether values are rounded at random: where the rule takes models."""
        return self.course.name in _MODELS

    def _digest(self, model: Vector) -> str:
        return digest_of(model.tobytes(), self.like)

    def _made(self, record: Written) -> None:
        course = self.course
        self.formats[course.version] = self.format
        if given := record.message.get("given"):
            self.given[course.version] = given
        self.models[course.version] = course.model.tobytes()
        self.account.made[course.version] = self._digest(course.model)
        if course.name == "scaffold" and course.last:
            _, _, c = course.shape.split(course.model)
            mean = np.sum(list(course.last.values()), axis=0) / course.devices
            self.account.drift = max(self.account.drift, float(np.abs(c - mean).max()))


def _made(note: Note, course: Course) -> Vector:
    """The update of a device that has trained so."""
    shape = course.shape
    began, ended = (np.frombuffer(note[name], np.float32) for name in ("began", "ended"))
    new, buffers = ended[: shape.parameters], ended[shape.parameters :]
    if course.name not in _MODELS:
        new = new - began[: shape.parameters]
    if not shape.controls:
        return np.concatenate([new, buffers])
    control = np.frombuffer(note["control"], np.float32)
    known = np.frombuffer(note["known"], np.float32) if note["known"] else np.float32(0)
    return np.concatenate([new, buffers, control - known])
