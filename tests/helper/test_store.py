"""The helper's file: for one process and one policy, written as a whole or not at all."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from fedstream.core.errors import ConfigError
from fedstream.helper.store import HelperStore, StoreFailed
from tests.helper.batches import Batches
from tests.private.enrolled import policy_of


def test_the_file_is_for_its_user_and_one_helper_alone(batches: Batches) -> None:
    """Two helpers on one file would each open what the other has opened."""
    assert stat.S_IMODE(batches.path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"helper\.store = .* database is locked"):
        HelperStore(batches.path, batches.policy)


def test_a_file_of_another_policy_is_refused(batches: Batches) -> None:
    batches.store.close()
    with pytest.raises(ConfigError, match="is of the policy"):
        HelperStore(batches.path, policy_of(sigma=0.5))
    batches.start()


def test_a_copied_file_is_refused(batches: Batches) -> None:
    """A backup that was put back would have forgotten what was opened since."""
    batches.store.close()
    backup = batches.path.with_name("backup.sqlite")
    backup.write_bytes(batches.path.read_bytes())
    backup.rename(batches.path)
    with pytest.raises(ConfigError, match="is a copy: it may not know all tasks"):
        HelperStore(batches.path, batches.policy)
    batches.path.unlink()
    batches.start()


def test_an_earlier_state_in_the_same_file_is_refused(batches: Batches) -> None:
    """As `cp backup.sqlite helper.sqlite` makes it, or a new file that got the old one's inode."""
    batches.helper.open(batches.intent(*map(batches.trained, range(3))))
    batches.store.close()
    backup = batches.path.read_bytes()
    batches.start()  # the newest state is no earlier one
    batches.helper.open(batches.intent(*map(batches.trained, range(3, 6))))
    batches.store.close()
    batches.path.write_bytes(backup)
    with pytest.raises(ConfigError, match="is a copy: it may not know all tasks"):
        HelperStore(batches.path, batches.policy)
    batches.path.write_bytes(b"")  # lost
    batches.start()


def test_a_helper_that_dies_before_it_counts_goes_on(batches: Batches) -> None:
    """The store is ahead of the count then, and the answer was not sent."""
    intent = batches.intent(*map(batches.trained, range(3)))
    count = batches.path.with_name(f"{batches.path.name}-count")
    before = count.read_bytes()
    batches.helper.open(intent)
    batches.store.close()
    assert count.read_bytes() != before
    count.write_bytes(before)
    batches.start()
    batches.helper.open(intent)
    assert count.read_bytes() != before
    batches.store.close()
    count.unlink()  # only a part of the folder was restored
    with pytest.raises(ConfigError, match="is a copy"):
        HelperStore(batches.path, batches.policy)
    batches.path.unlink()
    batches.start()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("not a database" * 100)
    for path in (file, tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match=r"helper\.store = "):
            HelperStore(path, policy_of())


def test_a_full_disk_opens_nothing_and_the_same_intent_later_does(batches: Batches) -> None:
    for number in range(2):
        updates = [batches.trained(n, f"{number}-{n}-{'x' * 180}") for n in range(10)]
        intent = batches.intent(*updates)
        if not number:
            batches.helper.open(intent)
    database = batches.store._database
    [pages] = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreFailed, match="full"):
        batches.helper.open(intent)
    assert database.execute("SELECT count(*) FROM opened").fetchone() == (10,)
    assert batches.store.spent(0) == (1, 1)
    database.execute("PRAGMA max_page_count=1000000")
    batches.helper.open(intent)
    assert batches.store.spent(0) == (2, 2)


def test_what_was_opened_is_on_disk_before_the_answer(batches: Batches) -> None:
    """As another process reads it after a power cut: from the file, not from our connection."""
    intent = batches.intent(*map(batches.trained, range(3)))
    batches.helper.open(intent)
    copy = batches.path.with_name("copy.sqlite")
    copy.write_bytes(batches.path.read_bytes())
    with sqlite3.connect(copy) as database:
        rows = database.execute("SELECT task, intent FROM opened ORDER BY place").fetchall()
    database.close()
    assert rows == [(f"task-{device}", intent.digest) for device in range(3)]
    assert batches.store._database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
