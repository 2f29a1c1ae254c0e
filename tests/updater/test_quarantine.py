"""A device is put into quarantine while the run goes on, whatever crashes and whatever is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.streams import Look
from fedstream.core.messages import SetQuarantine, Upload
from fedstream.core.records import Quarantines
from fedstream.journal import QUARANTINES, JournalError, QuarantineSet, Segment, Taken, segments
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.strategies import AcedSettings, FedBuffSettings
from fedstream.updater.commit import Commits
from fedstream.updater.state import RunState
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import backed_up, fails, go_back, held, makes, reasons, records


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def bar(hand: Hand, *devices: int, release: bool = False, why: str = "poison") -> None:
    """The operator's command."""
    wanted = SetQuarantine(devices=devices, release=release, why=why)
    verdict, _ = await hand.ledger.set_quarantine(wanted)
    assert verdict == "queued"


async def barred(hand: Hand) -> Quarantines:
    """Who is in quarantine, as Redis has it."""
    head = await hand.ledger.head()
    assert head is not None
    return head.quarantines


async def is_barred(hand: Hand, *devices: int) -> bool:
    return sorted((await barred(hand)).by_device) == sorted(devices)


async def by(hand: Hand, device: int, value: float = 8.0) -> Upload:
    """A device answers a task."""
    [trigger] = await hand.open(device=device)
    upload = await hand.trained(trigger, value)
    assert await hand.admit(upload) == [("admitted", "")]
    return upload


async def test_caches_of_a_device_go_with_it(make: Any, hand: Hand, folder: Path) -> None:
    """ACED: 8, (8 + 2) / 2, then 2 alone, also behind a restart."""
    rule = AcedSettings(server_lr=1.0)

    async def answers(device: int, delta: float, version: int) -> None:
        [trigger] = await hand.open(device=device)
        upload = await hand.trained(trigger, delta, sends="delta", steps=1, lr=1.0)
        assert await hand.admit(upload) == [("admitted", "")]
        await hand.reaches(version)

    async with running(make(rule), context()):
        await hand.join()
        await answers(3, 8.0, 1)
        await answers(4, 2.0, 2)
        await bar(hand, 3)
        await answers(4, 2.0, 3)
        await wait_until(hand.queue_is_empty)
    async with running(make(rule, name="updater-1"), context()):
        await answers(4, 2.0, 4)
        await wait_until(hand.queue_is_empty)
    with Replayer(folder) as replayer:
        found = [float(one.model.parameters[0]) for one in replayer if one.message.digest]
    first = found[0] - 8.0
    assert [x - first for x in found] == pytest.approx([8.0, 13.0, 15.0, 17.0])


async def test_device_is_refused_until_it_is_released(make: Any, hand: Hand, folder: Path) -> None:
    """In order with the updates: what came before counts, what comes after is refused."""
    async with running(make(), context()):
        await hand.join()
        await by(hand, 3)
        await bar(hand, 3, 5)
        await by(hand, 3)
        await by(hand, 4)
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
        [group] = (await barred(hand)).groups
        assert (group.devices, group.why, group.version) == ((3, 5), "poison", 1)
        await bar(hand, 3, release=True, why="fixed")
        await by(hand, 3)
        await hand.reaches(3)
        await wait_until(hand.queue_is_empty)
        assert await is_barred(hand, 5)
        await hand.balanced()
    assert await reasons(hand, "refused", {"device quarantined": 1})
    told = [
        (one.devices, one.release, one.version)
        if isinstance(one, QuarantineSet)
        else (one.upload.device, one.outcome, one.version)
        for one in records(folder)
        if isinstance(one, QuarantineSet | Taken)
    ]
    assert told == [
        (3, "applied", 1),
        ((3, 5), False, 1),
        (3, "refused", 1),
        (4, "applied", 2),
        ((3,), True, 2),
        (3, "applied", 3),
    ]


async def test_repeated_commands_change_nothing(make: Any, hand: Hand, folder: Path) -> None:
    """The first reason and time stay, and only what changed something is journalled."""
    async with running(make(), context()):
        await hand.join()
        await bar(hand, 3)
        await bar(hand, 3, 4, why="again")
        await bar(hand, 6, release=True)
        await wait_until(hand.queue_is_empty)
    assert [(one.devices, one.why) for one in (await barred(hand)).groups] == [
        ((3,), "poison"),
        ((4,), "again"),
    ]
    assert len(records(folder)) == 2


async def test_buffered_updates_stay(make: Any, hand: Hand) -> None:
    async with running(make(FedBuffSettings(buffer_size=2)), context()):
        await hand.join()
        [trigger] = await hand.open(device=3)
        assert await hand.admit(await hand.trained(trigger, 4.0, sends="delta"))
        await wait_until(lambda: held(hand, 1))
        await bar(hand, 3)
        await hand.admitted(8.0, sends="delta")
        await hand.reaches(1)
        [*_, version] = await hand.published()
        assert 3 in [update.device for update in version.updates]


async def test_only_a_journal_with_quarantines_needs_to_know_of_them(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that knows none reads the others, and says what it lacks of these."""
    await makes(hand, make(), 4.0)
    needs = [segment.head.needs for segment in segments(folder)]
    async with running(make(), context()):
        await bar(hand, 3)
        await wait_until(hand.queue_is_empty)
        await bar(hand, 3, release=True)
        await wait_until(hand.queue_is_empty)
    async with running(make(), context()):
        await wait_until(lambda: len(segments_of(folder)) == 4)
    later = [segment.head.needs for segment in segments(folder)]
    assert needs == [()]
    assert later == [(), (), (QUARANTINES,), (QUARANTINES,)]
    monkeypatch.setattr("fedstream.journal.segment.KNOWN", frozenset())
    Segment(segments_of(folder)[1]).close()
    with pytest.raises(JournalError, match="needs 'quarantines', which this release does not know"):
        Segment(segments_of(folder)[2])


def segments_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


@pytest.mark.parametrize("moment", ["journalled", "committed"])
async def test_crash_neither_loses_nor_doubles_a_quarantine(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its updater dies once it is in the journal, before Redis is told, or just after."""
    real = Commits.settle

    async def dies(commits: Commits, state: RunState, look: Look | None = None) -> Any:
        barring = isinstance(commits.pending[0].change.record, QuarantineSet)
        if barring and moment == "journalled":
            raise RuntimeError("it dies")
        done = await real(commits, state, look)
        if barring:
            raise RuntimeError("it dies")
        return done

    monkeypatch.setattr(Commits, "settle", dies)
    async with running(make(), context(), may_fail=True) as updater:
        await hand.join()
        await bar(hand, 3)
        await wait_until(updater.done)
    assert await is_barred(hand, *([] if moment == "journalled" else [3]))
    monkeypatch.setattr(Commits, "settle", real)
    async with running(make(lease_s=0.4), context()):
        await by(hand, 3)
        await wait_until(lambda: reasons(hand, "refused", {"device quarantined": 1}))
        await wait_until(hand.queue_is_empty)
        assert await is_barred(hand, 3)
        await hand.balanced()
    assert [type(one) for one in records(folder)] == [QuarantineSet, Taken]


async def test_emptied_redis_gets_the_quarantine_again(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    async with running(make(lease_s=0.4), context()):
        await hand.join()
        await bar(hand, 3)
        await wait_until(hand.queue_is_empty)
        before = await barred(hand)
        await client.call("FLUSHALL")
        await hand.join()
        assert await barred(hand) == before
        await by(hand, 3)
        await wait_until(lambda: reasons(hand, "refused", {"device quarantined": 1}))
    chain = segments(folder)
    found = recovered(chain[-1])
    assert found.quarantines == before
    for segment in chain:
        segment.close()


@pytest.mark.parametrize("alive", [True, False])
async def test_redis_that_fell_back_gets_the_quarantine_again(
    make: Any, hand: Hand, client: Client, alive: bool
) -> None:
    """No version went with it; the next commit notices, or the next updater."""
    async with running(make(), context()):
        await makes_one(hand)
        backup = await backed_up(client)
        await bar(hand, 3)
        await wait_until(lambda: is_barred(hand, 3))
        await wait_until(hand.queue_is_empty)
        if alive:
            await go_back(client, backup)
            await wait_until(lambda: is_barred(hand, 3))
    if not alive:
        await go_back(client, backup)
        async with running(make(lease_s=0.4), context()):
            await wait_until(lambda: is_barred(hand, 3))


async def makes_one(hand: Hand) -> None:
    await hand.join()
    await hand.admitted(4.0)
    await hand.reaches(1)
    await wait_until(hand.queue_is_empty)


async def test_adopting_redis_keeps_the_later_quarantines(
    make: Any, hand: Hand, folder: Path
) -> None:
    """The journal lost its end, where 3 was released and 4 was put into quarantine."""
    aside = folder.with_name("aside")
    async with running(make(), context()):
        await makes_one(hand)
        await bar(hand, 3)
        await wait_until(hand.queue_is_empty)
        shutil.copytree(folder, aside)
        await bar(hand, 4)
        await bar(hand, 3, release=True)
        await hand.admitted(4.0)
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    shutil.rmtree(folder)
    shutil.move(aside, folder)
    await fails(make(), JournalError, "--adopt")
    before = len(segments_of(folder))
    async with running(make(adopt=True, lease_s=0.4), context()):
        await wait_until(lambda: len(segments_of(folder)) == before + 2)  # recovered and adopted
        await by(hand, 3)
        await hand.reaches(3)
        await by(hand, 4)
        await wait_until(lambda: reasons(hand, "refused", {"device quarantined": 1}))


@pytest.mark.parametrize("settings", [{"sync": "never"}, {"adopt": True}])
async def test_quarantine_that_only_redis_still_knows_goes_on(
    make: Any, hand: Hand, folder: Path, settings: dict[str, Any]
) -> None:
    """The machine crashed before its record was on disk, and no version went with it."""
    aside = folder.with_name("aside")
    async with running(make(), context()):
        await makes_one(hand)
        shutil.copytree(folder, aside)
        await bar(hand, 3)
        await wait_until(hand.queue_is_empty)
    shutil.rmtree(folder)
    shutil.move(aside, folder)
    async with running(make(lease_s=0.4, **settings), context()):
        await by(hand, 3)
        await wait_until(lambda: reasons(hand, "refused", {"device quarantined": 1}))
        await bar(hand, 4)
        await wait_until(lambda: is_barred(hand, 3, 4))
    chain = segments(folder)
    assert sorted(recovered(chain[-1]).quarantines.by_device) == [3, 4]
    for segment in chain:
        segment.close()
