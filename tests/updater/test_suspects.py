"""Devices whose updates stand out: observers are told, and if asked, they are quarantined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.messages import Event
from fedstream.journal import QuarantineSet, Taken
from fedstream.journal.replay import Replayer
from fedstream.strategies import AflGuardSettings, FedBuffSettings
from fedstream.updater.state import Change
from fedstream.updater.suspects import Suspicions
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import fails, reasons, records
from tests.updater.states import applied, state_of

MEDIAN = FedBuffSettings(buffer_size=3, aggregate="median")


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def answer(hand: Hand, device: int, value: float) -> None:
    [trigger] = await hand.open(device=device)
    assert await hand.admit(await hand.trained(trigger, value, sends="delta")) == [("admitted", "")]


async def suspects(hand: Hand) -> list[tuple[int | None, int | None]]:
    """The devices that observers were told of, with the version."""
    entries = await hand.client.call("XRANGE", hand.keys.events, "-", "+")
    events = [Event.decode(fields[1]) for _, fields in entries]
    return [(one.device, one.version) for one in events if one.what == "suspect"]


def replays(folder: Path) -> None:
    """The journal gives the same bits once more; raises Diverged otherwise."""
    with Replayer(folder) as replayer:
        for _ in replayer:
            pass


async def test_third_time_in_a_row_leads_to_quarantine(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(MEDIAN, quarantine_after=3), context()):
        await hand.join()
        for version in (1, 2, 3):
            for device, value in ((1, 1.0), (2, 1.1), (9, -5.0)):
                await answer(hand, device, value)
            await hand.reaches(version)

        async def is_barred() -> bool:
            head = await hand.ledger.head()
            return head is not None and sorted(head.quarantines.by_device) == [9]

        await wait_until(is_barred)
        await answer(hand, 9, -5.0)
        await wait_until(hand.queue_is_empty)
        await hand.balanced()
    assert await suspects(hand) == [(9, 1), (9, 2), (9, 3)]
    assert await reasons(hand, "refused", {"device quarantined": 1})
    replays(folder)


async def test_root_update_survives_a_restart_and_judges_others(
    make: Any, hand: Hand, folder: Path
) -> None:
    rule = AflGuardSettings(root=(4,))
    async with running(make(rule), context()):
        await hand.join()
        await answer(hand, 2, 1.0)
        await wait_until(hand.queue_is_empty)
        await answer(hand, 4, 1.0)
        await wait_until(hand.queue_is_empty)
    async with running(make(rule, name="updater-1"), context()):
        await answer(hand, 9, -1.0)
        await answer(hand, 2, 1.0)
        await hand.reaches(1)
        await wait_until(hand.queue_is_empty)
        await hand.balanced()
    assert await reasons(hand, "refused", {"no root update yet": 1, "far from the root": 1})
    assert await suspects(hand) == [(9, 0)]
    found = [(one.upload.device, one.outcome) for one in records(folder) if isinstance(one, Taken)]
    assert found == [(2, "refused"), (4, "buffered"), (9, "refused"), (2, "applied")]
    replays(folder)


# counting


def change(*suspects: int, updates: tuple[int, ...] = ()) -> Change:
    """A change that names devices; ``updates``: the devices in the version that it makes."""
    made = applied("a", 6)
    assert made.version is not None
    [one] = made.version.updates
    there = tuple(one.model_copy(update={"device": device}) for device in updates)
    version = made.version.model_copy(update={"updates": there}) if updates else None
    return replace(made, version=version, suspects=suspects)


def test_a_version_without_suspicion_begins_the_count_anew() -> None:
    suspicions, state = Suspicions(2), state_of(5)
    assert suspicions.after(change(3, updates=(1, 3)), state) is None
    assert suspicions.after(change(updates=(1, 3)), state) is None
    assert suspicions.after(change(3, updates=(1, 3)), state) is None
    assert suspicions.after(change(updates=(1, 2)), state) is None  # none of device 3
    asked = suspicions.after(change(3, 4, updates=(3, 4)), state)
    assert asked is not None
    assert asked.devices == (3,)


def test_a_refused_or_clipped_update_counts_before_its_version_is_made() -> None:
    """The version that it is in does not excuse it."""
    suspicions, state = Suspicions(2), state_of(5)
    assert suspicions.after(change(3), state) is None
    assert suspicions.after(change(updates=(1, 3)), state) is None
    assert suspicions.after(change(3), state) is not None


def test_devices_in_quarantine_are_not_asked_for_again() -> None:
    suspicions, state = Suspicions(1), state_of(5)
    barred = state.quarantines.quarantined((3,), "", 0.0, 5)
    assert suspicions.after(change(3), replace(state, quarantines=barred)) is None


def test_a_release_begins_the_count_anew() -> None:
    suspicions, state = Suspicions(2), state_of(5)
    assert suspicions.after(change(3), state) is None
    record = QuarantineSet(entry="1-0", devices=(3,), release=True, version=5, time=1, received=1)
    suspicions.after(replace(change(), record=record), state)
    assert suspicions.after(change(3), state) is None
    assert suspicions.after(change(3), state) is not None


def test_nothing_is_counted_unless_asked() -> None:
    suspicions = Suspicions(0)
    assert suspicions.after(change(3), state_of(5)) is None
    assert not suspicions.counts


async def test_a_run_cannot_change_what_is_made_of_its_updates(make: Any, hand: Hand) -> None:
    """The updates that the median needs were not kept."""
    async with running(make(FedBuffSettings(buffer_size=3)), context()):
        await hand.join()
        await answer(hand, 1, 1.0)
        await wait_until(hand.queue_is_empty)
    updater = make(MEDIAN, name="updater-1", lease_s=1.0)
    await fails(updater, ConfigError, r"\(no vectors, not update 1 and update 2 and update 3\)")
