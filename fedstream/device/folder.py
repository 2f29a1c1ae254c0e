"""A device's folder, with its number, model, unfinished work and error feedback.

    device.json   the device's number, and the run, gateway and key that it is for
    models/       the newest model that was downloaded, not compressed, by its digest
    unshared/     the run's frozen parameters, downloaded once, by their digest
    work          the workspace of a task whose training was interrupted
    update        an update on its way to the gateway, with its error feedback
    unsent        the error feedback of the last update that arrived
    local         the values of local tensors after that update
    policy        the digest of the privacy policy to which the device is bound

Files are replaced as a whole and begin with a checksum. A file damaged by a power cut counts as
missing, because its content can be obtained again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from fedstream.core.errors import BadMessage, ConfigError, FedstreamError
from fedstream.core.layout import Floats
from fedstream.protocol.messages import BadBody, UpdateReport
from fedstream.runtime.process import read_regular
from fedstream.trainer.workspace import Workspace

_IDENTITY, _WORK, _UPDATE, _UNSENT, _LOCAL = "device.json", "work", "update", "unsent", "local"
_POLICY = "policy"  # outlives all enrolments
_STATE = (_WORK, _UPDATE, _UNSENT, _LOCAL)
_CHECKSUM = 8  # bytes


@dataclass(frozen=True)
class Identity:
    """The device's identity from its enrolment."""

    device: int
    run: str
    url: str
    key: str  # its public key, PEM


@dataclass(frozen=True)
class FinishedUpdate:
    """A trained update, not delivered yet."""

    task: str
    attempt: str
    url: str
    report: UpdateReport
    data: npt.NDArray[np.uint8]
    unsent: Floats | None  # its error feedback; None: a format without feedback
    local: npt.NDArray[np.uint8] | None = None  # new values of local tensors; None: none to keep


class DeviceFolder:
    """A device's folder. Methods raise OSError if it can't be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = path / "models"
        self.unshared = path / "unshared"

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Make and lock the folder inside the block. Raises FedstreamError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.models.mkdir(exist_ok=True)
        self.unshared.mkdir(exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FedstreamError(
                    f"{self.path}: another process is this device: stop it, or give this one a key "
                    "and a folder of its own"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(handle)

    def identity(self) -> Identity | None:
        """The device's identity; None: not enrolled. Raises ConfigError."""
        file = self.path / _IDENTITY
        try:
            found = json.loads(read_regular(file))
            return Identity(int(found["device"]), *(str(found[k]) for k in ("run", "url", "key")))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: damaged: delete it, and enrol again") from error

    def enrolled(self, who: Identity) -> None:
        """Store a new identity, and delete all earlier state.

        Also if run and number are the same as before: a recreated run has them again.
        """
        self._forget()
        self._write(_IDENTITY, json.dumps(asdict(who)).encode())

    def pin(self, policy: str | None) -> None:
        """Bind the device to a policy for ever; ``policy``: its digest, None for no policy.

        Earlier state is deleted, such as an update that is not masked. Raises ConfigError if the
        device is bound to another policy.
        """
        file = self.path / _POLICY
        try:
            pinned = read_regular(file).decode(errors="replace")
        except FileNotFoundError:
            if policy is not None:
                self._forget()
                self._write(_POLICY, policy.encode())
            return
        if policy is None:
            raise ConfigError(
                f"{file}: this device takes part under policy {pinned} alone: start it with "
                "--policy and --policy-owner"
            )
        if policy != pinned:
            raise ConfigError(
                f"{file}: this device takes part under policy {pinned} alone, and --policy names "
                f"{policy}"
            )

    def _forget(self) -> None:
        for name in _STATE:
            (self.path / name).unlink(missing_ok=True)

    # interrupted training

    def work(self) -> Workspace | None:
        """The workspace of interrupted training; None if missing or damaged."""
        try:
            return Workspace.decode(read_regular(self.path / _WORK))
        except (FileNotFoundError, BadMessage):
            return None

    def keep_work(self, workspace: Workspace) -> None:
        """Keep training's state for the next process."""
        self._write(_WORK, workspace.encode())

    def drop_work(self) -> None:
        """Forget interrupted training."""
        (self.path / _WORK).unlink(missing_ok=True)

    # updates and error feedback

    def unsent(self, parameters: int) -> Floats | None:
        """The error feedback of the last update; None if missing or of another size."""
        data = self._sound(_UNSENT)
        if data is None or len(data) != 4 * parameters:
            return None
        unsent: Floats = np.frombuffer(data, "<f4")
        return unsent if np.isfinite(unsent).all() else None

    def local(self) -> bytes:
        """The values of local tensors; empty if missing or damaged."""
        return self._sound(_LOCAL) or b""

    def update(self) -> FinishedUpdate | None:
        """The undelivered update of an earlier process; None if missing or damaged."""
        data = self._sound(_UPDATE)
        if data is None:
            return None
        try:
            found: dict[str, Any] = msgpack.unpackb(data, max_bin_len=len(data))
            unsent, local = found["unsent"], found.get("local")
            return FinishedUpdate(
                found["task"],
                found["attempt"],
                found["url"],
                UpdateReport.decode(found["report"]),
                np.frombuffer(found["data"], np.uint8),
                None if unsent is None else np.frombuffer(unsent, "<f4"),
                None if local is None else np.frombuffer(local, np.uint8),
            )
        except (ValueError, KeyError, TypeError, msgpack.UnpackException, BadBody):
            return None  # of another release

    def keep_update(self, update: FinishedUpdate) -> None:
        """Keep a finished update until its receipt is there."""
        fields = {
            "task": update.task,
            "attempt": update.attempt,
            "url": update.url,
            "report": update.report.encode(),
            "data": update.data.data,
            "unsent": None if update.unsent is None else update.unsent.view(np.uint8).data,
            "local": None if update.local is None else update.local.data,
        }
        self._write_sound(_UPDATE, msgpack.packb(fields))

    def delivered(self, update: FinishedUpdate, *, known: bool, counts: bool) -> None:
        """Delete an update, and store its error feedback and local values.

        ``known``: whether the update's outcome is known; if not, all feedback is deleted.
        ``counts``: whether the update was admitted; if not, earlier feedback and values stay.
        """
        if not known:
            (self.path / _UNSENT).unlink(missing_ok=True)
        elif counts and update.unsent is not None:
            self._write_sound(_UNSENT, update.unsent.view(np.uint8).data)
        if counts and update.local is not None:
            self._write_sound(_LOCAL, update.local.data)
        (self.path / _UPDATE).unlink(missing_ok=True)

    def _sound(self, name: str) -> bytes | None:
        """A file's content after its checksum; None if missing or damaged."""
        try:
            data = read_regular(self.path / name)
        except FileNotFoundError:
            return None
        inside = data[_CHECKSUM:]
        return inside if xxhash.xxh3_64_digest(inside) == data[:_CHECKSUM] else None

    def _write_sound(self, name: str, data: bytes | memoryview) -> None:
        self._write(name, xxhash.xxh3_64_digest(data), data)

    def _write(self, name: str, *parts: bytes | memoryview) -> None:
        aside = self.path / f".{name}"
        with aside.open("wb") as file:
            file.writelines(parts)
        aside.replace(self.path / name)
