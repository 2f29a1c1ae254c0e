"""The helper's memory in one SQLite file: its epochs' keys, and every task that it has opened.

The file must never be restored from a backup: a helper that forgot what it has opened would open a
task in a second batch, and the difference of the two sums can be one device's update. So a copied
file is refused, and so is one with fewer openings than the count in a second file, FILE-count. A
helper that lost the file begins a new epoch; tasks that were sealed to an older one are never
opened.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.helper.opening import NotOpened
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import EpochSecret, Intent

Noise: TypeAlias = NDArray[np.int64]

_TABLES = """
CREATE TABLE IF NOT EXISTS policy (digest TEXT, inode INTEGER, name TEXT);
CREATE TABLE IF NOT EXISTS epochs (
    number INTEGER PRIMARY KEY, epoch TEXT UNIQUE, began REAL, private BLOB, noise BLOB);
CREATE TABLE IF NOT EXISTS opened (
    run TEXT, task TEXT, device INTEGER, weight INTEGER, place INTEGER, intent TEXT,
    PRIMARY KEY (run, task)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_intent ON opened (intent);
CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY, run TEXT, intent TEXT, epoch TEXT, noise BLOB);
CREATE TABLE IF NOT EXISTS spent (device INTEGER PRIMARY KEY, squares INTEGER, batches INTEGER);
"""
# Without a gap: what is left of a run are its last turns.
_FORGET_TURNS = """
DELETE FROM turns WHERE EXISTS (
    SELECT 1 FROM turns AS later WHERE later.run = turns.run AND later.number >= turns.number
    AND later.epoch NOT IN (SELECT epoch FROM epochs))
"""
_NOISE_TYPE = "<i4"  # a policy's sums with noise fit 32 bits


class StoreFailed(FedstreamError):
    """The store could not be written now: nothing was opened."""

    retriable = True


class HelperStore:
    """Keys and opened tasks. Use it from one thread at a time."""

    def __init__(self, path: Path, policy: PrivacyPolicy) -> None:
        """Open or create the file for this process alone. Raises ConfigError."""
        self._policy = policy
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            inode = path.stat().st_ino
            self._database = sqlite3.connect(
                path, timeout=0.2, isolation_level=None, check_same_thread=False
            )
            # Deleted keys stay neither in the file nor in its journal.
            for pragma in ("secure_delete=ON", "journal_mode=TRUNCATE", "synchronous=FULL"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.executescript(f"BEGIN EXCLUSIVE;{_TABLES}COMMIT;")
            row = self._database.execute("SELECT digest, inode, name FROM policy").fetchone()
            [updates] = self._database.execute("SELECT sum(batches) FROM spent").fetchone()
            self._updates = updates or 0  # that were opened
            self._count = _Count(path.with_name(f"{path.name}-count"))
            if row is None:
                row = (policy.digest, inode, os.urandom(16).hex())
                self._count.write(row[2], 0)
                self._database.execute("INSERT INTO policy VALUES (?, ?, ?)", row)
            self._name: str = row[2]
        except (OSError, sqlite3.Error, StoreFailed) as error:
            raise ConfigError(
                f"helper.store = {str(path)!r}: {error}: it must be a writable file, which no "
                "other helper uses"
            ) from error
        wrong = None
        if row[0] != policy.digest:
            wrong = (
                f"is of the policy {row[0]}, ours is {policy.digest}: it counts what devices have "
                "spent under one policy; name another file"
            )
        elif row[1] != inode or not self._count.allows(self._name, self._updates):
            wrong = (
                "is a copy: it may not know all tasks that were opened, and would open them "
                "again; name an empty file, and the tasks under way end as `helper lost`"
            )
        if wrong is not None:
            self.close()
            raise ConfigError(f"helper.store = {str(path)!r} {wrong}")

    def close(self) -> None:
        """Close the files."""
        self._database.close()
        self._count.close()

    def began(self) -> float:
        """When the newest epoch began, in seconds since 1970."""
        [found] = self._database.execute("SELECT max(began) FROM epochs").fetchone()
        return float(found)

    def epochs(self) -> dict[str, EpochSecret]:
        """The secrets by epoch, oldest first."""
        rows = self._database.execute("SELECT epoch, private, noise FROM epochs ORDER BY number")
        return {epoch: EpochSecret(epoch, private, noise) for epoch, private, noise in rows}

    def rotate(self, now: float, *, every_s: float, keep_s: float) -> bool:
        """Begin an epoch if the newest is older than ``every_s``, and delete keys of old ones.

        An epoch's key is deleted ``keep_s`` after its successor began. Returns whether anything
        changed. Raises StoreFailed.
        """
        database = self._database
        with _written(database):
            [newest] = database.execute("SELECT max(began) FROM epochs").fetchone()
            ended = database.execute(
                "DELETE FROM epochs WHERE EXISTS (SELECT 1 FROM epochs AS later "
                "WHERE later.number > epochs.number AND later.began < ?)",
                (now - keep_s,),
            )
            database.execute(_FORGET_TURNS)
            if newest is not None and newest > now - every_s:
                return bool(ended.rowcount)
            new = EpochSecret.new(self._policy.kem)
            database.execute(
                "INSERT INTO epochs (epoch, began, private, noise) VALUES (?, ?, ?, ?)",
                (new.epoch, now, new.private, new.noise),
            )
        return True

    def take(self, intent: Intent) -> None:
        """Record durably that the intent is opened; do nothing if it was.

        Raises NotOpened, StoreFailed.
        """
        digest = intent.digest
        if not self._is_opened(digest):
            with _written(self._database):
                self._record(intent, digest)
            self._updates += len(intent.updates)
        self._count.write(self._name, self._updates)

    def take_in_turn(self, intent: Intent, epoch: str, drawn: Callable[[], Noise]) -> Noise:
        """Do as :meth:`take`, and return the batch's noise, correlated with the run's before it.

        The noise is kept while the run's next batches take it back, and while there is the key of
        ``epoch``. Raises NotOpened, StoreFailed.
        """
        digest = intent.digest
        if self._is_opened(digest):
            self._count.write(self._name, self._updates)
            return self._noise_again(digest)
        with _written(self._database):
            self._record(intent, digest)
            self._refuse_too_soon(intent)
            found = self._policy.correlation.noise(drawn(), self._kept_noise(intent.run))
            self._database.execute(
                "INSERT INTO turns (run, intent, epoch, noise) VALUES (?, ?, ?, ?)",
                (intent.run, digest, epoch, found.astype(_NOISE_TYPE).tobytes()),
            )
            self._database.execute(
                "DELETE FROM turns WHERE run = ?1 AND number NOT IN "
                "(SELECT number FROM turns WHERE run = ?1 ORDER BY number DESC LIMIT ?2)",
                (intent.run, self._policy.bands - 1),
            )
        self._updates += len(intent.updates)
        self._count.write(self._name, self._updates)
        return found

    def _noise_again(self, digest: str) -> Noise:
        asked = self._database.execute("SELECT noise FROM turns WHERE intent = ?", (digest,))
        if (row := asked.fetchone()) is None:
            raise NotOpened(
                "helper lost", "the batch was opened long ago: its noise is no longer kept"
            )
        return _noise_in(row[0])

    def _kept_noise(self, run: str) -> Iterator[Noise]:
        """The noise that a run's next batch takes back, newest first."""
        asked = self._database.execute(
            "SELECT noise FROM turns WHERE run = ? ORDER BY number DESC", (run,)
        )
        for [noise] in asked:
            yield _noise_in(noise)

    def _refuse_too_soon(self, intent: Intent) -> None:
        asked = self._database.execute(
            "SELECT device FROM opened JOIN turns USING (intent) WHERE turns.run = ?",
            (intent.run,),
        )
        recent = {device for [device] in asked}
        for update in intent.updates:
            if update.device in recent:
                raise NotOpened(
                    "too soon",
                    f"device {update.device} is in one of the run's last {self._policy.bands - 1} "
                    "batches: it must sit so many out",
                    device=update.device,
                )

    def _record(self, intent: Intent, digest: str) -> None:
        for update in intent.updates:
            self._refuse_overlap(intent.run, update.task)
        batch = list(zip(intent.updates, intent.weights, strict=True))
        self._spend((update.device, weight) for update, weight in batch)
        self._database.executemany(
            "INSERT INTO opened VALUES (?, ?, ?, ?, ?, ?)",
            [
                (intent.run, update.task, update.device, weight, place, digest)
                for place, (update, weight) in enumerate(batch)
            ],
        )

    def _is_opened(self, digest: str) -> bool:
        asked = self._database.execute("SELECT 1 FROM opened WHERE intent = ? LIMIT 1", (digest,))
        return asked.fetchone() is not None

    def _refuse_overlap(self, run: str, task: str) -> None:
        asked = self._database.execute(
            "SELECT intent FROM opened WHERE run = ? AND task = ?", (run, task)
        )
        if (row := asked.fetchone()) is None:
            return
        logged = self._database.execute(
            "SELECT task, weight FROM opened WHERE intent = ? ORDER BY place", (row[0],)
        ).fetchall()
        raise NotOpened(
            "overlap",
            f"task {task} was opened in another batch: ask for that one, whose tasks and weights "
            "are in this answer",
            task=task,
            intent=row[0],
            tasks=[name for name, _ in logged],
            weights=[weight for _, weight in logged],
        )

    def _spend(self, batch: Iterable[tuple[int, int]]) -> None:
        for device, weight in batch:
            squares, _ = self.spent(device)
            if squares + weight**2 > self._policy.allowance:
                raise NotOpened(
                    "participation",
                    f"device {device} has spent {squares} of its {self._policy.allowance}: a "
                    f"batch at weight {weight} would exceed the policy's participations",
                    device=device,
                )
            self._database.execute(
                "INSERT INTO spent VALUES (?, ?, 1) ON CONFLICT (device) DO UPDATE "
                "SET squares = squares + excluded.squares, batches = batches + 1",
                (device, weight**2),
            )

    def spent(self, device: int) -> tuple[int, int]:
        """A device's squared weights, added up, and its batches."""
        asked = self._database.execute(
            "SELECT squares, batches FROM spent WHERE device = ?", (device,)
        )
        return asked.fetchone() or (0, 0)


class _Count:
    """A file with a store's name and the number of updates that it has opened.

    It is written after the store and before the answer. So a store that has opened fewer updates is
    an earlier one, and an answer that was lost with the process is not missed.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._content = os.pread(self._file, 100, 0)

    def allows(self, name: str, updates: int) -> bool:
        """Whether a store of this name has opened as many updates as counted, or more."""
        known, _, count = self._content.decode(errors="replace").partition(" ")
        return known == name and count.strip().isdecimal() and int(count) <= updates

    def write(self, name: str, updates: int) -> None:
        """Write the count durably, unless it is there. Raises StoreFailed."""
        content = f"{name} {updates:020}\n".encode()
        if content == self._content:
            return
        try:
            os.pwrite(self._file, content, 0)
            os.fdatasync(self._file)
        except OSError as error:
            raise StoreFailed(f"helper.store: its count: {error}: mend the disk") from error
        self._content = content

    def close(self) -> None:
        os.close(self._file)


def _noise_in(data: bytes) -> Noise:
    return np.frombuffer(data, _NOISE_TYPE).astype(np.int64)


@contextmanager
def _written(database: sqlite3.Connection) -> Iterator[None]:
    """A block that is written durably as a whole, or not at all. Raises StoreFailed."""
    try:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreFailed(f"helper.store: {error}: make room or mend the disk") from error
    finally:
        if database.in_transaction:  # an error of SQLite may have ended it already
            database.execute("ROLLBACK")
