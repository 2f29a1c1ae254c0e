"""Two updaters alive, and a Redis that forgets the second one at every step of its take-over."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.core.errors import Fenced
from fedstream.journal import Claim, JournalError, JournalFull, newest_epoch, segments
from fedstream.journal import writer as writing
from fedstream.journal.rebuild import recovered
from fedstream.updater.service import Updater
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.journalled import backed_up, go_back, has_compared, records

STEPS = ("leads", "claimed", "listed", "read", "linking", "begun", "looking", "looked")


class Gate:
    """Where somebody waits until the test lets them go on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self._go_on = threading.Event()

    def open(self) -> None:
        """From now on nobody waits here."""
        self._go_on.set()

    def wait(self) -> None:
        """In a thread."""
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._go_on.wait(60)

    async def waited(self) -> None:
        """In the event loop, which goes on."""
        await asyncio.to_thread(self.wait)


def stops_at(step: str, updater: Updater, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The updater, which has not begun, will stop at a step of its take-over."""
    gate, recorder = Gate(), updater._recorder

    def behind(real: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*given: Any, **named: Any) -> Any:
            done = real(*given, **named)
            gate.wait()
            return done

        return stopped

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*given: Any, **named: Any) -> Any:
            gate.wait()
            return real(*given, **named)

        return stopped

    def around(name: str, *, first: bool) -> None:
        real = getattr(recorder, name)

        async def stopped(*given: Any, **named: Any) -> Any:
            if first:
                await gate.waited()
            done = await real(*given, **named)
            if not first:
                await gate.waited()
            return done

        monkeypatch.setattr(recorder, name, stopped)

    match step:
        case "leads":
            around("newest_epoch", first=True)
        case "claimed":
            around("claim", first=False)
        case "listed":
            monkeypatch.setattr("fedstream.updater.recovery.segments", behind(segments))
        case "read":
            monkeypatch.setattr("fedstream.updater.recovery.recovered", behind(recovered))
        case "linking":
            monkeypatch.setattr(writing, "_named", before(writing._named))
        case "begun":
            around("begin", first=False)
        case "looking":
            around("check_last", first=True)
        case "looked":
            around("check_last", first=False)
    return gate


class Watched:
    """Every version that was ever told, whatever Redis forgets."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.told: dict[int, set[str]] = {}

    async def look(self) -> None:
        """Takes in what is there; called before anything is forgotten."""
        for version in await self._hand.published():
            self.told.setdefault(version.version, set()).add(version.digest)


def cut_off(proxy: Proxy) -> None:
    """Nothing gets through any more."""
    proxy.reading.clear()
    proxy.cut()


@pytest.mark.parametrize(
    ("step", "forgets"),
    [
        *((step, "fallen-back") for step in STEPS),
        *((step, "emptied") for step in ("leads", "claimed", "begun")),
    ],
)
async def test_no_version_is_revoked_whatever_redis_forgets_during_a_takeover(
    make: Any,
    hand: Hand,
    client: Client,
    redis: RedisSettings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    forgets: str,
) -> None:
    watched = Watched(hand)
    async with Proxy(redis) as way, Proxy(redis) as other_way:
        first = make(name="first", redis=way.settings, lease_s=1.0)
        async with running(first, context(), may_fail=True) as leading:
            await hand.join()
            await hand.admitted(4.0)
            await hand.reaches(1)
            backup = await backed_up(client)
            await watched.look()

            # The first one sleeps, and the second takes over, as far as it gets.
            cut_off(way)
            await client.call("DEL", hand.keys.leader("updater"))
            second = make(name="second", redis=other_way.settings, lease_s=1.0)
            gate = stops_at(step, second, monkeypatch)
            async with running(second, context(), may_fail=True) as following:
                await gate.reached.wait()

                # Redis forgets that, and the first one wakes up.
                cut_off(other_way)
                await watched.look()
                if forgets == "emptied":
                    await client.call("FLUSHALL")
                else:
                    await go_back(client, backup)
                way.reading.set()
                if step == "leads":  # nobody has claimed anything: it goes on, rightfully
                    await hand.reaches(1)
                    if forgets == "emptied":
                        await hand.join()
                    await hand.admitted(8.0)
                    await hand.reaches(2)
                    assert not leading.done()
                else:
                    if forgets == "fallen-back":
                        await hand.admitted(8.0)
                    await wait_until(leading.done, what="it ends")
                    assert fenced(leading)
                await watched.look()

                # The second one finds its way.
                gate.open()
                other_way.reading.set()

                async def settled() -> bool:
                    return following.done() or (
                        second._recorder.head is not None and has_compared(second)
                    )

                await wait_until(settled, what="the take-over comes to an end")
                await watched.look()
    await client.call("DEL", hand.keys.leader("updater"))
    async with running(make(name="third"), context()):
        await hand.join()
        version = await hand.version()
        await hand.admitted(1.0)
        await wait_until(hand.queue_is_empty)
        assert await hand.version() > version
        await watched.look()
        await hand.balanced()
    journalled = {r.version: r.digest for r in records(folder) if r.digest}
    assert {n: digests for n, digests in watched.told.items() if n} == {
        n: {digest} for n, digest in journalled.items()
    }
    assert all(name.endswith(".journal") for name in listed(folder))


def listed(folder: Path) -> list[str]:
    """The names in a folder, less the index."""
    return sorted(path.name for path in folder.iterdir() if path.name != "ended.sqlite")


def fenced(work: asyncio.Task[None]) -> bool:
    """Whether it ended because it was fenced, and for nothing else."""
    error = work.exception()
    assert isinstance(error, BaseExceptionGroup)
    assert error.split(Fenced)[1] is None
    return True


async def test_crashed_processes_claim_is_superseded(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(), context()):
        await hand.join()
    Claim(folder, 7)  # and then its machine died
    async with running(make(name="next"), context()):
        await hand.admitted(4.0)
        await hand.reaches(1)
    assert newest_epoch(folder) == 8
    assert listed(folder) == ["00000001-000000.journal", "00000008-000000.journal"]


@pytest.mark.parametrize("forgets", ["who leads", "the newest version"])
async def test_superseded_updater_is_fenced_whatever_redis_forgets(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    """It looks for a successor before it leads anew, and before it publishes anew."""
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)
    async with running(make(lease_s=0.4), context(), may_fail=True) as leading:
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        Claim(folder, 7)  # of which Redis knows nothing
        keys = hand.keys
        if forgets == "who leads":
            lost: list[Command] = [
                ("HDEL", keys.tokens, "updater"),
                ("DEL", keys.leader("updater")),
            ]
        else:
            lost = [("HSET", keys.head, "version", 0)]
        await hand.client.pipeline([("MULTI",), *lost, ("EXEC",)])
        await wait_until(leading.done, what="it ends")
        error = leading.exception()
    assert isinstance(error, BaseExceptionGroup)
    assert error.subgroup(Fenced)
    assert await hand.version() == (1 if forgets == "who leads" else 0)


async def test_abandoned_takeover_leaves_no_claim(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(), context()):
        await hand.join()
    for name in listed(folder):
        (folder / name).unlink()
    refused = make(name="other")
    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.wait_for(refused.run(context()), 60)
    assert raised.group_contains(Exception, match="there is no journal in")
    assert not listed(folder)


def test_newest_claim_wins(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    mine = Claim(folder, 3)
    with pytest.raises(Fenced, match="another updater has claimed the journal"):
        Claim(folder, 3)
    mine.check()
    with pytest.raises(Fenced, match="for epoch 3"):
        Claim(folder, 2)  # it slept on its way: somebody was quicker
    assert [path.name for path in folder.iterdir()] == ["00000003.claim"]
    later = Claim(folder, 4)
    with pytest.raises(Fenced, match=r"another updater has taken over: .*00000004.claim"):
        mine.check()
    later.check()
    later.withdraw()
    mine.check()
    assert newest_epoch(folder) == 3
    assert newest_epoch(folder, besides=mine) == -1
    assert newest_epoch(tmp_path / "elsewhere") == -1


@pytest.mark.parametrize("ahead_s", [0.0, 2.0, 3600.0])
def test_claim_check_survives_coarse_timestamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Two changes may have the same time, and the file system's clock may be behind ours."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(ahead_s * 1e9))
    mine = Claim(tmp_path, 3)
    mine.check()
    about = tmp_path.stat()
    Claim(tmp_path, 4)
    os.utime(tmp_path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(Fenced):
        mine.check()


def test_unchanged_folder_is_not_listed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many segments, a listing takes as long as a record; so does one amid many changes."""
    now, listings = 1000.0, 0
    real = os.listdir

    def listdir(folder: Path) -> list[str]:
        nonlocal listings
        listings += 1
        return real(folder)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "listdir", listdir)
    mine = Claim(tmp_path, 3)
    checked = []
    for now in (1000.0, 1002.4, 1002.6, 2000.0):  # noqa: B007  (time.monotonic gives it)
        listings = 0
        mine.check()
        checked.append(listings)
    assert checked == [1, 1, 1, 0]


def test_claim_is_on_disk_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    Claim(tmp_path / "journal", 3)
    assert synced == [tmp_path.name, "00000003.claim", "journal"]


def test_claim_is_retried_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JournalFull, match="no space"):
            Claim(tmp_path, 3)
    assert not listed(tmp_path)
    Claim(tmp_path, 3).check()


async def test_deleted_segment_ends_its_writer(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(), context(), may_fail=True) as work:
        await hand.join()
        [segment] = segments(folder)
        segment.close()
        segment.path.unlink()
        await hand.admitted(4.0)
        await wait_until(work.done)
        error = work.exception()
        assert isinstance(error, BaseExceptionGroup)
        found = error.subgroup(JournalError)
        assert found is not None
        assert "was deleted while being written" in str(found.exceptions[0])
    assert await hand.version() == 0
