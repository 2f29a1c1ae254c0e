"""Everything that ever changed in Redis, from its own append-only file.

Redis writes there what each command and script did, before anybody gets a reply: so it is a record
of a run that no service wrote, complete and in order, to which nothing can be added afterwards. A
life of Redis that began with what an earlier one had begins with that part of its file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

OUTCOMES = ("applied", "buffered", "refused", "given_up", "dead")
_ID = re.compile(rb"\d+-\d+")
_LATER = msgpack.packb("later")  # a field that only later releases know
_INBOX, _UPDATE, _UNSENT = "inbox:pool", "update:pool/", "workspace:pool/unsent."

Command = list[bytes]


@dataclass(frozen=True)
class Told:
    """A version, as it was told to everyone."""

    version: int
    digest: str
    epoch: int
    blob: str


@dataclass(frozen=True)
class Answer:
    """An update, as its pool trainer's answer was given, and what was kept for its device."""

    upload: dict[str, Any]
    data: bytes | None  # the update as it was sent
    before: bytes | None  # what earlier ones left unsent; None: nothing is known
    staged: bytes | None  # what this one did
    after: bytes | None


@dataclass
class Life:
    """What Redis did in one of its lives and in what it kept of those before, and where it stands.

    ``wrong`` are moments at which something did not hold that must hold at any.
    """

    fell_back: bool = False  # it began with an older state
    counts: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)  # one by one: what was not restored
    ended: list[dict[str, Any]] = field(default_factory=list)  # events that say how a task ended
    taken_back: list[dict[str, Any]] = field(
        default_factory=list
    )  # said so, until it was counted less
    strays: list[dict[str, Any]] = field(default_factory=list)
    opened: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    admitted: dict[str, set[str]] = field(default_factory=dict)  # task -> its attempts in the queue
    queue: dict[str, dict[str, Any]] = field(default_factory=dict)  # entry -> what waits there
    settled: dict[str, dict[str, Any]] = field(default_factory=dict)  # what waited, and is deleted
    told: list[Told] = field(default_factory=list)
    later: set[tuple[bytes, bytes]] = field(default_factory=set)  # entries of a later release
    holder: str = ""  # the updater's token
    wrong: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # of the pool
    _less: Counter[str] = field(default_factory=Counter)  # outcomes that a step counts less
    _sent: dict[str, bytes] = field(default_factory=dict)  # updates in one chunk, by key
    _unsent: dict[str, bytes] = field(default_factory=dict)  # what they left, by key

    def step(self, done: Sequence[Command]) -> None:
        """Takes in what was done at once."""
        issued, opened = self.counted["issued"], len(self.opened)
        self._less.clear()
        self._step_unsent(done)
        for command in done:
            if command[0].upper() == b"XADD" and _LATER in command[-1]:
                self.later.add((command[1], command[-3]))
            take = _TAKEN.get((command[0].upper(), _key(command)))
            if take is not None:
                take(self, command)
        known = sum(self.counts[outcome] for outcome in OUTCOMES) + len(self.open)
        if self.counts["issued"] != known:
            self.wrong.append(
                f"issued {self.counts['issued']}, but {known} ended or open, after "
                f"{b' '.join(done[-1])[:80]!r}"
            )
        elif self.counted["issued"] - issued != len(self.opened) - opened:
            self.wrong.append(
                f"{self.counted['issued'] - issued} counted as issued where "
                f"{len(self.opened) - opened} were opened, after {b' '.join(done[-1])[:80]!r}"
            )

    def _step_unsent(self, done: Sequence[Command]) -> None:
        """Follows what updates left unsent, and the answers that it came with."""
        upload = _answered(done)
        if upload is None:
            self._keep_unsent(done)
            return
        task, attempt = upload["task"], upload["attempt"]
        kept = f"{_UNSENT}{upload['device']}"
        data, before = self._sent.get(f"{_UPDATE}{task}.{attempt}"), self._unsent.get(kept)
        staged = self._unsent.get(f"{kept}.{attempt}")
        self._keep_unsent(done)
        self.answers.append(Answer(upload, data, before, staged, self._unsent.get(kept)))

    def _keep_unsent(self, done: Sequence[Command]) -> None:
        for command in done:
            what, key = command[0].upper(), _key(command)
            if what == b"SET" and key.startswith(_UNSENT):
                self._unsent[key] = command[2]
            elif what == b"HSET" and key.startswith(_UPDATE) and b"0" in command[2::2]:
                self._sent[key] = command[command.index(b"0", 2) + 1]
            elif what == b"RENAME" and key in self._unsent:
                self._unsent[_name(command[2])] = self._unsent.pop(key)
            elif what in (b"DEL", b"UNLINK"):
                for gone in map(_name, command[1:]):
                    self._unsent.pop(gone, None)
                    self._sent.pop(gone, None)

    def _on_counts(self, command: Command) -> None:
        if command[0].upper() == b"HINCRBY":
            name, by = command[2].decode(), int(command[3])
            self.counts[name] += by
            self.counted[name] += by
            if by < 0 and name in OUTCOMES:
                self._less[name] -= by
            return
        for field_, n in zip(command[2::2], command[3::2], strict=True):
            self.counts[field_.decode()] = int(n)

    def _on_open(self, command: Command) -> None:
        if command[0].upper() == b"HDEL":
            self.open -= {task.decode() for task in command[2:]}
            return
        tasks = {task.decode() for task in command[2::2]}
        self.open |= tasks
        self.opened |= tasks

    def _on_queue(self, command: Command) -> None:
        if command[0].upper() == b"XDEL":
            for deleted in command[2:]:
                if deleted.decode() in self.queue:
                    self.settled[deleted.decode()] = self.queue.pop(deleted.decode())
            return
        entry, message = _added(command)
        self.queue[entry] = message
        if message["k"] == "upload":
            self.admitted.setdefault(message["task"], set()).add(message["attempt"])

    def _on_events(self, command: Command) -> None:
        _, event = _added(command)
        if event.get("what") == "outcome":
            self._take_back(event["task"])
            self.ended.append(event)
        elif event.get("what") == "stray":
            self.strays.append(event)

    def _take_back(self, task: str) -> None:
        """A task ends otherwise, in a step that counts as much less as it was told to be before."""
        for before in self.ended if self._less else ():
            if before["task"] == task and self._less[before["outcome"]] > 0:
                self._less[before["outcome"]] -= 1
                self.ended.remove(before)
                self.taken_back.append(before)
                return

    def _on_models(self, command: Command) -> None:
        _, said = _added(command)
        newest = max((one.version for one in self.told), default=-1)
        if said["version"] < newest:
            self.wrong.append(f"version {said['version']} was published behind {newest}")
        self.told.append(Told(said["version"], said["digest"], said["epoch"], said["blob"]))
        if not self.holder.endswith(f":{said['blob'].rpartition('.')[2]}"):
            self.wrong.append(
                f"version {said['version']} was published by {said['blob']}, but {self.holder} "
                "was the updater's token"
            )

    def _on_tokens(self, command: Command) -> None:
        for role, token in zip(command[2::2], command[3::2], strict=True):
            if role == b"updater":
                self.holder = token.decode()


_TAKEN = {
    (b"HINCRBY", "counts"): Life._on_counts,
    (b"HSET", "counts"): Life._on_counts,
    (b"HSET", "open"): Life._on_open,
    (b"HDEL", "open"): Life._on_open,
    (b"XADD", "queue"): Life._on_queue,
    (b"XDEL", "queue"): Life._on_queue,
    (b"XADD", "events"): Life._on_events,
    (b"XADD", "models"): Life._on_models,
    (b"HSET", "tokens"): Life._on_tokens,
}


def _key(command: Command) -> str:
    """The run's key that a command is about, without what all of them begin with."""
    return _name(command[1]) if len(command) > 1 else ""


def _name(key: bytes) -> str:
    return key.rpartition(b"}:")[2].decode(errors="replace")


def _answered(done: Sequence[Command]) -> dict[str, Any] | None:
    """The update that a trainer of the pool announced, if that is what was done: not a forged one,
    which no task is done with."""
    if not any(command[0].upper() == b"XACK" for command in done):
        return None
    said = (_added(one)[1] for one in done if one[0].upper() == b"XADD" and _key(one) == _INBOX)
    return next((message for message in said if message["k"] == "upload"), None)


def _added(command: Command) -> tuple[str, dict[str, Any]]:
    """Id and message of an entry that was added; behind the key there may be options."""
    at = next(n for n in range(2, len(command)) if _ID.fullmatch(command[n]))
    return command[at].decode(), msgpack.unpackb(command[at + 2], use_list=False)


def commands(data: bytes) -> Iterator[tuple[int, Command]]:
    """The commands of an append-only file, each with the offset behind it; a torn end is left."""
    at = 0
    while at < len(data):
        if data[at : at + 1] == b"#":  # a remark, such as a time
            at = data.find(b"\n", at) + 1
            continue
        end = data.find(b"\r\n", at)
        if end < 0:
            return
        count, at, command = int(data[at + 1 : end]), end + 2, []
        for _ in range(count):
            end = data.find(b"\r\n", at)
            if end < 0:
                return
            size, at = int(data[at + 1 : end]), end + 2
            if at + size + 2 > len(data):
                return
            command.append(data[at : at + size])
            at += size + 2
        yield at, command


def steps(data: bytes) -> Iterator[tuple[int, list[Command]]]:
    """What was done at once, a command or a transaction, each with the offset behind it."""
    inside: list[Command] | None = None
    for end, command in commands(data):
        match command[0].upper():
            case b"MULTI":
                inside = []
            case b"EXEC" if inside is not None:
                yield end, inside
                inside = None
            case _ if inside is not None:
                inside.append(command)
            case _:
                yield end, [command]


def whole(data: bytes) -> int:
    """The bytes up to the end of the last whole step."""
    return max((end for end, _ in steps(data)), default=0)


def lived(file: Path, *, fell_back: bool = False) -> Life:
    """What an append-only file says."""
    life = Life(fell_back)
    for _, done in steps(file.read_bytes()):
        life.step(done)
    return life
