"""An updater whose journal is on a full disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.layout import PAGE
from tests.journal.test_recorder import Disk, tasks
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import records


async def test_updater_on_a_full_disk_makes_each_version_once(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is cut short where the disk is full, and goes on when there is room."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    async with running(make(), context()):
        await hand.join()
    uploads = [await hand.admitted(float(n)) for n in range(4)]
    updater = make()
    append = updater._recorder.append
    asked: list[int] = []

    async def meets_a_full_disk(batch: Any) -> list[int]:
        if not asked:
            disk.room = 3 * PAGE  # a small record is two pages
        asked.append(len(batch))
        if len(asked) == 3:
            disk.room = None
        return list(await append(batch))

    monkeypatch.setattr(updater._recorder, "append", meets_a_full_disk)
    async with running(updater, context()):
        await hand.reaches(4)
        await wait_until(hand.queue_is_empty)
    assert asked[:3] == [4, 3, 3]  # one was written, none, and then the rest
    assert tasks(folder) == [upload.task for upload in uploads]
    digests = {r.version: r.digest for r in records(folder) if r.digest}
    assert {v.version: v.digest for v in await hand.published() if v.version} == digests
    await hand.balanced()
