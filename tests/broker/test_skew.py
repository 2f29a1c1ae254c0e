"""Services one release apart understand each other: in messages, in scripts, in the records.

The bytes in ``tests/data/messages`` are what a release wrote. They are never changed; a kind, or a
schema, that comes new gets files of its own: ``python -m tests.broker.test_skew`` writes those that
are missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core import messages
from fedstream.core.errors import BrokerError
from fedstream.core.messages import (
    ArrivedDevices,
    Assignment,
    CloseRound,
    Contribution,
    Dead,
    DevicesEvaluated,
    Evaluation,
    Event,
    GiveUp,
    HandOver,
    Heartbeat,
    Measured,
    Message,
    Presence,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Trigger,
    Upload,
    Version,
    Withdraw,
    decode,
)
from fedstream.core.records import Run
from tests.releases import earlier, later
from tests.support import Hand

FOLDER = Path(__file__).parents[1] / "data" / "messages"
ID = "019aa6d1-0000-7000-8000-000000000001"
OTHER = "019aa6d1-0000-7000-8000-000000000002"
DIGEST = "99aa06d3014798d86001c324468d497f"

LEAST = {  # only what has no default
    "task": Assignment(task=ID, device=3, seed=7),
    "trigger": Trigger(task=ID, device=3, seed=7),
    "close_round": CloseRound(version=4, tasks=(), why="round over"),
    "withdraw": Withdraw(tasks=(), why="timed out"),
    "upload": Upload(
        task=ID,
        attempt="a1",
        device=3,
        trainer="t",
        tau=4,
        base=DIGEST,
        layout=DIGEST,
        digest=DIGEST,
        size=16,
        samples=100,
        steps=5,
        lr=0.25,
    ),
    "give_up": GiveUp(task=ID, attempt="a1", device=3, trainer="t", reason="dropped out"),
    "presence": Presence(trainer="t"),
    "heartbeat": Heartbeat(trainer="t", owns=DIGEST),
    "seating": ArrivedDevices(gateway="gw-0", devices=(3,)),
    "hand_over": HandOver(gateway="gw-0", stream="tasks", entries=("1-1",)),
    "evaluation": Evaluation(
        task=ID, device=3, version=4, deadline=1e9, digest=DIGEST, blob="4.1.ab", size=16
    ),
    "measured": Measured(task=ID, attempt="a1", device=3, trainer="t", version=4, base=DIGEST),
    "devices_evaluated": DevicesEvaluated(
        evaluation=ID,
        version=4,
        base=DIGEST,
        devices=3,
        outcomes={"no answer in time": 3},
    ),
    "round_end": RoundEnd(version=4),
    "set_quarantine": SetQuarantine(devices=(3,)),
    "step_proposed": StepProposed(at=100, scale=0.5, metric="loss"),
    "version": Version(version=0, time=1.5, epoch=1, digest=DIGEST, blob="0.1.ab", size=16),
    "event": Event(what="trainer", service="t", time=1.5),
    "dead": Dead(stream="tasks", entry="1-1", reason="not msgpack", time=1.5),
}
MOST = {  # everything there is
    "task": Assignment(
        task=ID, device=3, seed=7, steps=5, epochs=2, seconds=1.5, version=4, deadline=1e9
    ),
    "trigger": Trigger(
        task=ID,
        device=3,
        seed=7,
        steps=5,
        epochs=2,
        seconds=1.5,
        version=4,
        deadline=1e9,
        why="round",
        origin="owner",
    ),
    "close_round": CloseRound(version=4, tasks=(ID, OTHER), why="round over"),
    "withdraw": Withdraw(tasks=(ID, OTHER), why="deadline passed"),
    "upload": LEAST["upload"].model_copy(
        update={
            "loss": 0.5,
            "seconds": 2.5,
            "seed": 7,
            "sends": "delta",
            "site": "north",
            "handed": 3,
        }
    ),
    "seating": LEAST["seating"],
    "hand_over": LEAST["hand_over"],
    "give_up": LEAST["give_up"],
    "presence": Presence(
        trainer="t", owns=(3, 4), leaves=True, host="h", pid=12, device=3, answers=9
    ),
    "heartbeat": Heartbeat(trainer="t", owns=DIGEST, device=3, answers=9),
    "evaluation": Evaluation(
        task=ID,
        device=3,
        version=4,
        deadline=1e9,
        digest=DIGEST,
        blob="4.1.ab",
        size=16,
        chunks=2,
        format="int8+zstd",
        given=DIGEST,
    ),
    "measured": Measured(
        task=ID,
        attempt="a1",
        device=3,
        trainer="t",
        version=4,
        base=DIGEST,
        samples=10,
        sums={"accuracy": (7.0, 10.0)},
        reason="no test data",
        seconds=1.5,
        site="north",
        trusted=True,
    ),
    "devices_evaluated": DevicesEvaluated(
        evaluation=ID,
        version=4,
        base=DIGEST,
        devices=3,
        outcomes={"measured": 2, "no answer in time": 1},
        sums={"accuracy": (7.0, 10.0)},
        metrics={"devices_accuracy": 0.7},
    ),
    "round_end": RoundEnd(version=4, why="round over"),
    "set_quarantine": SetQuarantine(devices=(3, 4), release=True, why="it poisons"),
    "step_proposed": StepProposed(
        at=100, scale=0.5, metric="loss", scores=((1.0, 0.75), (0.5, 0.5), (2.0, 1.5))
    ),
    "version": Version(
        version=5,
        time=1.5,
        epoch=1,
        parent=4,
        digest=DIGEST,
        blob="5.1.ab",
        size=16,
        updates=(
            Contribution(
                task=ID, device=3, tau=4, staleness=1, weight=0.25, samples=100, steps=5, loss=0.5
            ),
            Contribution(
                task=OTHER, device=4, tau=5, staleness=0, weight=0.5, samples=100, steps=5
            ),
        ),
    ),
    "event": Event(
        what="outcome",
        service="u",
        time=1.5,
        task=ID,
        device=3,
        outcome="applied",
        reason="r",
        version=5,
        staleness=1,
        weight=0.25,
        metrics={"accuracy": 0.5},
        text="words",
        site="north",
    ),
    "dead": Dead(
        stream="tasks", entry="1-1", reason="not msgpack", time=1.5, deliveries=3, data=b"\xc1\x00"
    ),
}
MORE = {  # with the fields that came since
    "upload": MOST["upload"].model_copy(update={"chunks": 2}),
    "presence": MOST["presence"].model_copy(update={"digest": DIGEST}),
    "version": MOST["version"].model_copy(update={"chunks": 2}),
}
FORMATS = {  # with wire formats
    "upload": MORE["upload"].model_copy(update={"format": "topk:0.1+zstd"}),
    "version": MORE["version"].model_copy(update={"format": "int8+zstd", "given": DIGEST}),
}
GATEWAYS = {  # by a gateway
    "presence": MORE["presence"].model_copy(update={"concurrent": True}),
}
FAILING = {  # by a trainer that fails
    "give_up": MOST["give_up"].model_copy(update={"failing": 4}),
    "heartbeat": MOST["heartbeat"].model_copy(update={"failing": 4}),
    "presence": GATEWAYS["presence"].model_copy(update={"failing": 4}),
}
BOUNDED = {  # counted as less than its device claims
    "upload": FORMATS["upload"].model_copy(update={"claimed": 9_000_000}),
}
DROPPED = {  # a round whose answers are not used
    "close_round": MOST["close_round"].model_copy(update={"drops": (3, 4)}),
    "round_end": MOST["round_end"].model_copy(update={"drops": (3, 4)}),
}
PRIVATE = {  # of a private run
    "upload": BOUNDED["upload"].model_copy(update={"format": "mask32", "sealed": b"sealed"}),
}
GOLDEN = {
    f"{kind}-{what}-{messages.SCHEMA}": message
    for what, some in (
        ("least", LEAST),
        ("most", MOST),
        ("more", MORE),
        ("formats", FORMATS),
        ("gateways", GATEWAYS),
        ("failing", FAILING),
        ("bounded", BOUNDED),
        ("dropped", DROPPED),
        ("private", PRIVATE),
    )
    for kind, message in some.items()
}


def golden(name: str) -> bytes:
    """What a release wrote."""
    return (FOLDER / f"{name}.msgpack").read_bytes()


def kinds() -> set[type[Message]]:
    found: set[type[Message]] = set()
    waiting: list[type[Message]] = [Message]
    while waiting:
        for one in waiting.pop().__subclasses__():
            found.add(one)
            waiting.append(one)
    return found


def test_every_kind_has_recorded_bytes() -> None:
    ours = {one.kind for one in kinds() if one.__module__ == messages.__name__}
    assert ours == set(LEAST) == set(MOST)
    assert {path.stem for path in FOLDER.iterdir()} >= set(GOLDEN)


@pytest.mark.parametrize("kind", MOST)
def test_the_fullest_message_has_every_field(kind: str) -> None:
    fullest = (MOST | MORE | FORMATS | GATEWAYS | FAILING | BOUNDED | DROPPED | PRIVATE)[kind]

    def empty(message: BaseModel) -> list[str]:
        return [name for name, value in message if value is None]

    assert empty(fullest) == []
    fields = type(fullest).model_fields
    assert [name for name in fields if name not in fullest.model_fields_set] == []


@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_messages_are_read(name: str) -> None:
    message = GOLDEN[name]
    assert decode(golden(name), type(message)) == message


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_of_a_later_release_are_read(name: str) -> None:
    message = GOLDEN[name]
    assert decode(later(golden(name)), type(message)) == message


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_with_fewer_fields_are_read(name: str) -> None:
    message = GOLDEN[name]
    assert decode(earlier(golden(name)), type(message)) == message


@pytest.mark.parametrize("kind", LEAST)
def test_fields_missing_in_older_messages_have_defaults(kind: str) -> None:
    fields = type(LEAST[kind]).model_fields
    required = {name for name, field in fields.items() if field.is_required()}
    assert set(msgpack.unpackb(earlier(LEAST[kind].encode()))) == {"v", "k"} | required


@pytest.mark.parametrize("name", GOLDEN)
def test_current_messages_have_all_fields_older_readers_need(name: str) -> None:
    """The same fields with the same values; what came since may be there besides."""
    before = msgpack.unpackb(golden(name))
    now = msgpack.unpackb(GOLDEN[name].encode())

    def contains(now: Any, before: Any) -> bool:
        if isinstance(before, dict):
            return isinstance(now, dict) and all(
                key in now and contains(now[key], value) for key, value in before.items()
            )
        if isinstance(before, list):
            return len(now) == len(before) and all(map(contains, now, before))
        return type(now) is type(before) and bool(now == before)

    assert contains(now, before)


# scripts, which pick fields out of messages


def task_of(name: str, **changes: Any) -> tuple[str, bytes]:
    """A trigger or a task of a later release: its id and its bytes."""
    fields = msgpack.unpackb(later(golden(name))) | changes
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return str(fields["task"]), packed


async def test_scripts_read_tasks_opened_by_a_later_scheduler(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    task, data = task_of("trigger-most-1", device=3)
    await client.call("HSET", keys.open, task, data)
    await client.call("HINCRBY", keys.counts, "issued", 1)
    assert await hand.take_up(hand.trigger(device=3, origin="ann")) == ["busy"]
    [opened] = (await hand.ledger.look()).open
    assert (opened.task, opened.device) == (task, 3)
    await hand.balanced()


async def test_scripts_read_tasks_sent_by_a_later_coordinator(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """To a device's owner, and given up when the owner goes, or when nobody serves the device."""
    await hand.create()
    one, task = task_of("task-most-1", device=3)
    two, other = task_of("task-most-1", device=5, task=OTHER)
    for name, data in ((one, task), (two, other)):
        await client.call("HSET", keys.open, name, data)
        await client.call("HINCRBY", keys.counts, "issued", 1)
        await client.call("XADD", keys.tasks, "*", "m", data)
    await hand.announce("owner", 3)
    assert await client.call("XLEN", keys.tasks_of("owner")) == 1
    await hand.announce("owner", 3, 4)
    assert await hand.ledger.settle_unserved(0) == 1
    assert await hand.ledger.leave(b"owner") == 1
    reasons = (await hand.ledger.look()).reasons("given_up")
    assert reasons == {"nobody serves this device": 1, "owner gone": 1}
    await hand.balanced()


async def test_upload_of_a_later_trainer_is_admitted(hand: Hand, client: Client) -> None:
    """What goes on to the updater is what this coordinator understood of it."""
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger)
    await hand.inbox.ensure()
    await client.call("XADD", hand.keys.inbox("pool"), "*", "m", later(upload.encode()))
    [entry] = await hand.inbox.read()
    answer = Upload.decode(entry.data)
    assert await hand.ledger.admit(entry, answer, size_limit=1 << 20) == ("admitted", "")
    assert [message for _, message in await hand.queue()] == [upload]


async def test_records_of_a_later_updater_are_read(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    for key in (keys.run, keys.head, keys.counts):
        await client.call("HSET", key, "later", 1)
    view = await hand.ledger.look()
    assert (view.run, view.head.version) == (hand.run(), 0)


async def test_previous_releases_run_is_refused_in_one_line(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Its services and ours would not see each other's streams."""
    await hand.create()
    await client.call("HDEL", keys.run, "keys")
    for read in (hand.ledger.run, hand.ledger.look):
        with pytest.raises(BrokerError, match="made by another release of fedstream") as raised:
            await read()
        assert not raised.value.retriable
        assert "\n" not in str(raised.value)


def test_earlier_releases_join_no_private_run(hand: Hand) -> None:
    """Their trainers and gateways would take its tasks, and send updates that are not masked."""
    plain, private = hand.run(), replace(hand.run(), policy="{}")
    for run, keys in ((plain, b"2"), (private, b"3")):
        record = run.record()
        assert record[record.index("keys") + 1] == keys, "earlier releases accept 2 alone"
        sent = tuple(one if isinstance(one, bytes) else one.encode() for one in record)
        assert Run.parsed(sent) == run


if __name__ == "__main__":
    for name, message in GOLDEN.items():
        path = FOLDER / f"{name}.msgpack"
        if not path.exists():
            path.write_bytes(message.encode())
