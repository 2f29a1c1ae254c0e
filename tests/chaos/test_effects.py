"""What an append-only file says, and what must not be in it."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from tests.chaos.effects import lived, whole

PREFIX = "fedstream:{chaos}:"


def packed(**message: object) -> bytes:
    """A message's bytes."""
    data: bytes = msgpack.packb(message)
    return data


def written(path: Path, *commands: tuple[object, ...]) -> Path:
    """A file with these commands."""
    said = b""
    for command in commands:
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
        said += b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
    path.write_bytes(said)
    return path


OPENED = (
    ("MULTI",),
    ("HSET", PREFIX + "open", "t", "x"),
    ("HINCRBY", PREFIX + "counts", "issued", 1),
    ("EXEC",),
)


def ended(outcome: str) -> tuple[tuple[object, ...], ...]:
    """A task's end, as the scripts do it."""
    return (
        ("MULTI",),
        ("HDEL", PREFIX + "open", "t"),
        ("HINCRBY", PREFIX + "counts", outcome, 1),
        (
            "XADD",
            PREFIX + "events",
            "MAXLEN",
            "=",
            "10000",
            "5-0",
            "m",
            packed(what="outcome", task="t", outcome=outcome),
        ),
        ("EXEC",),
    )


TOKEN = ("HSET", PREFIX + "tokens", "updater", "3:mine")


def version(number: int, nonce: str = "mine") -> tuple[object, ...]:
    """A version that is published by whoever has the nonce."""
    about = packed(k="version", version=number, digest="d", epoch=2, blob=f"{number}.2.{nonce}")
    return ("XADD", PREFIX + "models", "MAXLEN", "~", "10000", f"{number}-0", "m", about)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_task_from_beginning_to_end(file: Path) -> None:
    life = lived(written(file, ("SELECT", 0), *OPENED, *ended("applied")))
    assert life.wrong == []
    assert (life.opened, life.open) == ({"t"}, set())
    assert life.counted["applied"] == 1
    assert [event["outcome"] for event in life.ended] == ["applied"]


def test_revoked_outcome(file: Path) -> None:
    """The task is open once more, and ends otherwise, in one step."""
    less = ("HINCRBY", PREFIX + "counts", "given_up", -1)
    reopened = ("HSET", PREFIX + "open", "t", "")
    again = (("MULTI",), less, reopened, *ended("applied")[1:])
    life = lived(written(file, *OPENED, *ended("given_up"), *again))
    assert life.wrong == []
    assert [event["outcome"] for event in life.ended] == ["applied"]
    assert [event["outcome"] for event in life.taken_back] == ["given_up"]
    assert +life.counted == {"issued": 1, "applied": 1}
    uncounted = lived(written(file, *OPENED, *ended("given_up"), *ended("applied")))
    assert [event["outcome"] for event in uncounted.ended] == ["given_up", "applied"]


def test_sums_are_checked_after_every_step(file: Path) -> None:
    late = ("HINCRBY", PREFIX + "counts", "issued", 1)
    life = lived(written(file, ("HSET", PREFIX + "open", "t", "x"), late))
    assert len(life.wrong) == 2
    assert "issued 0, but 1" in life.wrong[0]
    assert "1 counted as issued where 0 were opened" in life.wrong[1]


def test_torn_end_and_half_a_transaction_are_ignored(file: Path) -> None:
    whole_file = written(file, *OPENED, *ended("applied")).read_bytes()
    for size in (len(whole_file) - 1, len(whole_file) - len("*1\r\n$4\r\nEXEC\r\n")):
        file.write_bytes(whole_file[:size])
        assert lived(file).open == {"t"}
        assert whole(whole_file[:size]) == len(written(file, *OPENED).read_bytes())


def test_only_the_updater_may_publish(file: Path) -> None:
    assert lived(written(file, TOKEN, version(1))).wrong == []
    other = lived(written(file, TOKEN, version(1, "else")))
    assert "3:mine was the updater's token" in other.wrong[0]


def test_versions_never_go_back(file: Path) -> None:
    """One that is published again because its model was gone is the newest still."""
    assert lived(written(file, TOKEN, version(1), version(2), version(2))).wrong == []
    life = lived(written(file, TOKEN, version(1), version(2), version(1)))
    assert life.wrong == ["version 1 was published behind 2"]


def test_what_an_update_left_unsent_is_followed(file: Path) -> None:
    kept, update = PREFIX + "workspace:pool/unsent.4", PREFIX + "update:pool/t.a"
    upload = packed(k="upload", task="t", attempt="a", device=4, format="int4")
    said = ("XADD", PREFIX + "inbox:pool", "5-0", "m", upload)
    told = (
        ("SET", kept, b"old", "PXAT", 9),
        ("SET", kept + ".a", b"new", "PXAT", 9),
        ("MULTI",),
        ("HSET", update, "size", 4, 0, b"data"),
        ("PEXPIREAT", update, 9),
        ("EXEC",),
    )
    ends = ("XACK", PREFIX + "tasks", "trainers", "3-0")
    replaced = (("UNLINK", kept), ("RENAME", kept + ".a", kept))
    [answer] = lived(written(file, *told, ("MULTI",), said, ends, *replaced, ("EXEC",))).answers
    assert (answer.data, answer.before, answer.staged, answer.after) == (
        b"data",
        b"old",
        b"new",
        b"new",
    )
    [answer] = lived(written(file, *told, ("MULTI",), said, ends, replaced[0], ("EXEC",))).answers
    assert (answer.staged, answer.after) == (b"new", None)
    assert lived(written(file, *told, said)).answers == [], "nobody's task: it is forged"
