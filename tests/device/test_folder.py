"""What a device remembers is whole or missing, and never another device's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedstream.core.errors import ConfigError
from fedstream.device.folder import DeviceFolder, FinishedUpdate, Identity
from fedstream.protocol.messages import UpdateReport

ME = Identity(7, "demo", "https://gateway.example", "a key")
UNSENT = np.array([0.5, -1.0, 2.0], np.float32)
REPORT = UpdateReport(
    digest="1" * 64, samples=5, steps=2, lr=0.1, tau=3, base="2" * 64, layout="3" * 64
)
UPDATE = FinishedUpdate(
    "task-1",
    "0" * 12,
    "/v1/tasks/task-1/updates/000000000000",
    REPORT,
    np.arange(12, dtype=np.uint8),
    UNSENT,
)


@pytest.fixture
def folder(tmp_path: Path) -> DeviceFolder:
    folder = DeviceFolder(tmp_path / "state")
    folder.path.mkdir()
    folder.enrolled(ME)
    return folder


def test_everything_is_read_as_it_was_written(folder: DeviceFolder) -> None:
    assert folder.identity() == ME
    folder.keep_update(UPDATE)
    found = folder.update()
    assert found is not None
    assert (found.task, found.attempt, found.url) == (UPDATE.task, UPDATE.attempt, UPDATE.url)
    assert found.report == REPORT
    np.testing.assert_array_equal(found.data, UPDATE.data)
    np.testing.assert_array_equal(found.unsent, UNSENT)
    folder.delivered(found, known=True, counts=True)
    np.testing.assert_array_equal(folder.unsent(3), UNSENT)
    assert folder.update() is None


def test_update_without_feedback_leaves_none(folder: DeviceFolder) -> None:
    plain = replace(UPDATE, unsent=None)
    folder.keep_update(plain)
    found = folder.update()
    assert found is not None
    assert found.unsent is None
    folder.delivered(found, known=True, counts=True)
    assert folder.unsent(3) is None


@pytest.mark.parametrize("name", ["update", "unsent"])
def test_what_is_damaged_counts_as_missing(folder: DeviceFolder, name: str) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    folder.keep_update(UPDATE)
    data = bytearray((folder.path / name).read_bytes())
    for at in (0, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (folder.path / name).write_bytes(damaged)
        assert (folder.update() if name == "update" else folder.unsent(3)) is None
    (folder.path / name).write_bytes(data[:10])
    assert (folder.update() if name == "update" else folder.unsent(3)) is None


def test_feedback_of_another_model_is_not_used(folder: DeviceFolder) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    assert folder.unsent(4) is None


def test_another_devices_memory_is_deleted(folder: DeviceFolder) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    folder.enrolled(replace(ME, run="another"))
    assert folder.unsent(3) is None


def test_damaged_identity_says_what_to_do(folder: DeviceFolder) -> None:
    for text in ("", "[]", "{}", '{"device": "x", "run": "", "url": "", "key": ""}'):
        (folder.path / "device.json").write_text(text)
        with pytest.raises(ConfigError, match=r"device.json: damaged: delete it, and enrol again"):
            folder.identity()
