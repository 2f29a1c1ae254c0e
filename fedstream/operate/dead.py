"""`fedstream dead`: inspects, retries and drops dead letters.

A dead letter's task has ended. A retry is a new task for the same device, with the same number of
steps; it counts as issued and gets its own outcome. Two letters may concern one task: the task's
entry crashed trainers, and an answer to it crashed coordinators. Such a task is retried only once.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.core.errors import BadMessage, FedstreamError
from fedstream.core.messages import (
    Assignment,
    CloseRound,
    Dead,
    DevicesEvaluated,
    Evaluation,
    GiveUp,
    Measured,
    Message,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Trigger,
    Upload,
    Withdraw,
    decode,
    task_id,
)
from fedstream.terminal import cell, clock, console, number, spaced, two_columns

_OF_EVALUATIONS = (Evaluation, Measured, DevicesEvaluated)
_KINDS = (
    Assignment,
    Trigger,
    Upload,
    GiveUp,
    CloseRound,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Withdraw,
    *_OF_EVALUATIONS,
)
_AT = "%Y-%m-%d %H:%M:%S"
_PAGE = 100  # letters per read: they may be long
_SHOWN = 200  # bytes shown of an undecodable entry


@dataclass(frozen=True)
class Letter:
    """An entry of the stream ``dead``."""

    id: str
    dead: Dead
    message: Message | None  # None: undecodable
    unreadable: str = ""  # why it is undecodable
    ended: str = ""  # outcome of its task, from OperatorLedger.ends; '' also if it has no task

    @property
    def task(self) -> str | None:
        """The letter's task."""
        return getattr(self.message, "task", None)

    @property
    def device(self) -> int | None:
        """The task's device."""
        return getattr(self.message, "device", None)


@dataclass(frozen=True)
class DeadLetters:
    """All dead letters, and the number lost because they were too many or too old."""

    letters: tuple[Letter, ...]  # the oldest first
    lost: int

    def find(self, wanted: Sequence[str]) -> list[Letter]:
        """Letters with these ids or task ids. Raises FedstreamError."""
        found: list[Letter] = []
        for name in wanted:
            those = [one for one in self.letters if name in (one.id, one.task)]
            if not those:
                raise FedstreamError(f"there is no dead letter {name!r}: see `fedstream dead list`")
            found += those
        return list({one.id: one for one in found}.values())


async def read(client: Client, keys: Keys) -> DeadLetters:
    """Read the dead letters of a run. Raises NoRun."""
    ledger = OperatorLedger(client, keys, "dead")
    view = await ledger.tally()
    rows: list[Any] = []
    while page := await client.call("XRANGE", keys.dead, _after(rows), "+", "COUNT", _PAGE):
        rows += page
    parsed = [_letter(id_.decode(), dict(zip(f[::2], f[1::2], strict=True))) for id_, f in rows]
    tasks = [letter.task for letter in parsed if letter.task is not None]
    ends = dict(zip(tasks, await ledger.ends(tasks), strict=True))
    letters = tuple(
        Letter(one.id, one.dead, one.message, one.unreadable, ends.get(one.task or "", ""))
        for one in parsed
    )
    return DeadLetters(letters, view.counts.get("dead_letters_lost", 0))


def _after(rows: list[Any]) -> str:
    return f"({rows[-1][0].decode()}" if rows else "-"


def _letter(id_: str, fields: dict[bytes, bytes]) -> Letter:
    data = fields.get(b"m", b"")
    try:
        dead = Dead.decode(data)
    except BadMessage as error:  # another release wrote it
        time_s = int(id_.partition("-")[0]) / 1000
        unknown = Dead(stream="?", entry="?", reason=f"{error}", time=time_s, data=data)
        return Letter(id_, unknown, None, f"the letter itself can't be read: {error}")
    try:
        return Letter(id_, dead, decode(dead.data, *_KINDS))
    except BadMessage as error:
        return Letter(id_, dead, None, str(error))


# retrying


def again(letter: Letter, now: float) -> Trigger:
    """Make the trigger that retries a letter. Raises FedstreamError if that's impossible."""
    message = letter.message
    if message is None:
        raise FedstreamError(f"it is unreadable ({letter.unreadable}), so nothing can be retried")
    if isinstance(message, GiveUp):
        raise FedstreamError("it reports a task that its device gave up: there is nothing to retry")
    if isinstance(message, Withdraw):
        raise FedstreamError(
            "it only gives up overdue tasks; the scheduler does that again by itself"
        )
    if isinstance(message, CloseRound | RoundEnd):
        raise FedstreamError("it only ends a round; the scheduler does that again by itself")
    if isinstance(message, _OF_EVALUATIONS):
        raise FedstreamError("it is of an evaluation on the devices; the next one asks them again")
    about: dict[str, Any] = {
        "task": task_id(int(now * 1000)),
        "device": letter.device,
        "why": f"retry of {letter.task}",
    }
    if isinstance(message, Assignment):
        if message.deadline is not None and now > message.deadline:
            raise FedstreamError("the deadline of the dead letter's round has passed")
        same = ("seed", "steps", "epochs", "seconds", "version", "deadline")
        return Trigger(**about, **{name: getattr(message, name) for name in same})
    if not isinstance(message, Upload) or message.steps < 1:
        raise FedstreamError("the letter does not contain a number of steps to train")
    seed = secrets.randbits(63) if message.seed is None else message.seed
    return Trigger(**about, seed=seed, steps=message.steps)


async def retry(client: Client, keys: Keys, letter: Letter) -> Trigger:
    """Retry a letter as a new task, and delete the letter. Raises FedstreamError."""
    trigger = again(letter, client.clock.now())
    before = letter.task or ""
    verdict, detail = await OperatorLedger(client, keys, "dead").retry(letter.id, before, trigger)
    if verdict != "sent":
        raise FedstreamError(_WHY_NOT[verdict].format(detail=spaced(detail), device=trigger.device))
    return trigger


_WHY_NOT = {
    "gone": "it no longer exists",
    "finished": "the run is finished",
    "open": "its task is still open",
    "retried": "its task was already retried as task {detail}, from another letter",
    "ended": "its task ended as {detail}: another answer to it was admitted",
    "forgotten": "it is no longer known how its task ended: another answer may have counted",
    "round": "the round that it belongs to is over",
    "busy": "device {device} has another task, {detail}: retry when that has ended",
    "held": "device {device}'s update is waiting in the batch: retry after the next version",
}


async def drop(client: Client, keys: Keys, letters: Sequence[Letter]) -> int:
    """Delete letters; returns how many existed."""
    if not letters:
        return 0
    return int(await client.call("XDEL", keys.dead, *(letter.id for letter in letters)))


# showing


def plain(letter: Letter) -> dict[str, Any]:
    """Letter as plain values, for JSON."""
    return {
        "id": letter.id,
        "time": letter.dead.time,
        "stream": letter.dead.stream,
        "entry": letter.dead.entry,
        "reason": letter.dead.reason,
        "deliveries": letter.dead.deliveries,
        "kind": letter.message.kind if letter.message else None,
        "task": letter.task,
        "device": letter.device,
        "outcome": letter.ended or None,
        "message": dict(letter.message.__dict__) if letter.message else None,
        "unreadable": letter.unreadable or None,
        "bytes": len(letter.dead.data),
        "data": letter.dead.data.hex() if letter.message is None else None,
    }


def show(found: DeadLetters) -> None:
    """Print all letters as a table."""
    console().print(page(found))


def show_each(letters: Sequence[Letter]) -> None:
    """Print some letters in full."""
    for letter in letters:
        console().print(details(letter))


def page(found: DeadLetters) -> RenderableType:
    """Table of all letters."""
    if not found.letters and not found.lost:
        return "no dead letters"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("letter", style="cyan", no_wrap=True)
    table.add_column("at", no_wrap=True)
    table.add_column("from")
    table.add_column("task", no_wrap=True)
    table.add_column("device", justify="right")
    table.add_column("ended as")
    table.add_column("tries", justify="right")
    table.add_column("reason", overflow="fold")
    for letter in found.letters:
        dead = letter.dead
        table.add_row(
            cell(letter.id),
            clock(dead.time, _AT),
            cell(dead.stream),
            cell(letter.task or "-"),
            "-" if letter.device is None else number(letter.device),
            cell(spaced(letter.ended) or "-"),
            number(dead.deliveries),
            cell(dead.reason),
        )
    kept = "1,000 are kept, 100 per site, for coordinator.letter_days"
    lost = [f"{found.lost} older ones were deleted: {kept}"] if found.lost else []
    return Group(table, *lost)


def details(letter: Letter) -> RenderableType:
    """Full contents of one letter."""
    dead, message = letter.dead, letter.message
    rows: list[tuple[str, object]] = [
        ("letter", f"{letter.id}, at {clock(dead.time, _AT)}"),
        ("from", f"{dead.stream}, entry {dead.entry}"),
        ("reason", dead.reason),
        ("deliveries", dead.deliveries),
    ]
    if message is None:
        sample = dead.data[:_SHOWN]
        more = f" ... ({len(dead.data)} bytes)" if len(dead.data) > _SHOWN else ""
        rows += [("unreadable", letter.unreadable), ("bytes", f"{sample!r}{more}")]
    else:
        rows += [
            ("ended as", spaced(letter.ended) or "unknown"),
            ("message", message.kind),
            *((f"  {k}", v) for k, v in message.__dict__.items() if v is not None),
        ]
    return two_columns(rows)
