"""`fedstream devices`: quarantine, release, and what is known of each device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedstream.core.messages import Event, SetQuarantine
from fedstream.core.records import NO_QUARANTINES, Commit, Quarantines
from fedstream.history.display import quarantined
from fedstream.operate import devices
from tests.fedstream.operate.conftest import Command
from tests.support import Hand, wait_until


@asynccontextmanager
async def obeying(hand: Hand) -> AsyncIterator[None]:
    """Somebody does the updater's part."""

    async def obey() -> None:
        now = NO_QUARANTINES
        while True:
            for entry, wanted in await hand.queue():
                assert isinstance(wanted, SetQuarantine)
                if changed := now.changed(wanted):
                    now = (
                        now.released(changed)
                        if wanted.release
                        else now.quarantined(changed, wanted.why, 1.5, 0)
                    )
                await commit(hand, now, entry)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(obey())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def commit(hand: Hand, quarantines: Quarantines, *entries: str) -> None:
    """The updater has taken these entries."""
    change = Commit(held=(), mean_staleness=0.0, quarantines=quarantines, entries=entries)
    assert (await hand.ledger.commit(hand.updater.token, change)).what == "done"


async def test_commands_say_what_they_changed(hand: Hand, command: Command) -> None:
    await hand.create()
    async with obeying(hand):
        said = [
            await command("devices", *words)
            for words in (
                ("quarantine", "3", "7", "--reason", "[red]poison"),
                ("quarantine", "7", "8"),
                ("release", "7", "1"),
                ("release", "3", "8"),
            )
        ]
    assert said == [
        (0, "in quarantine: devices 3, 7\n", ""),
        (0, "in quarantine: device 8\nalready in quarantine: device 7\n", ""),
        (0, "released from quarantine: device 7\nnot in quarantine: device 1\n", ""),
        (0, "released from quarantine: devices 3, 8\n", ""),
    ]


async def test_command_waits_in_the_queue_for_an_updater(hand: Hand, command: Command) -> None:
    await hand.create()
    code, out, err = await command("devices", "quarantine", "3", "--wait", "0")
    assert (code, out) == (1, "")
    assert "not taken yet; entries waiting for the updater: 1" in err
    await hand.updater.release()
    code, _, err = await command("devices", "release", "3", "--wait", "0")
    assert code == 1
    assert "no updater is running: the command waits in the queue until one does" in err
    assert len(await hand.queue()) == 2


async def test_command_that_was_lost_says_so(hand: Hand, command: Command) -> None:
    await hand.create()
    asked = asyncio.create_task(command("devices", "quarantine", "3"))
    [(entry, _)] = await wait_until(hand.queue)
    await commit(hand, NO_QUARANTINES, entry)
    code, _, err = await asked
    assert code == 1
    assert "no effect" in err


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("3", "10"), 1, "device 10 is not in this run"),
        (("3", "--reason", "x" * 101), 2, "--reason: 101 characters; at most 100 are kept"),
        (tuple(map(str, range(1001))), 2, "1001 devices: give 1 to 1000 in one command"),
    ],
)
async def test_bad_commands_are_refused(
    hand: Hand, command: Command, words: tuple[str, ...], code: int, why: str
) -> None:
    await hand.create()
    assert await command("devices", "quarantine", *words) == (code, "", f"fedstream: {why}\n")
    assert not await hand.queue()


async def test_unknown_run_is_reported(hand: Hand, command: Command) -> None:
    code, _, err = await command("devices", "quarantine", "3")
    assert code == 1
    assert "there is no run" in err


async def test_list_and_status_show_quarantines(hand: Hand, command: Command) -> None:
    await hand.create()
    update = await hand.admitted()
    await hand.commit(None, update)
    assert "quarantined" not in (await command("status"))[1]
    await commit(hand, NO_QUARANTINES.quarantined([3, 7], "[red]poison", 1.5, 0))
    code, out, _ = await command("devices", "list")
    assert code == 0
    assert out.count("[red]poison") == 2
    shown = json.loads((await command("devices", "list", "--json"))[1])
    assert [one["device"] for one in shown["devices"]] == [3, 7, update.device]
    assert shown["devices"][0]["quarantine"] == {"why": "[red]poison", "since": 1.5, "version": 0}
    assert (shown["devices"][2]["quarantine"], shown["devices"][2]["refused"]) == (None, 1)
    barred = json.loads((await command("devices", "list", "--quarantined", "--json"))[1])
    assert [one["device"] for one in barred["devices"]] == [3, 7]
    assert "quarantined  2: 3, 7" in (await command("status"))[1]
    assert json.loads((await command("status", "--json"))[1])["quarantined"] == [3, 7]
    assert "2: 3, 7" in (await command("top", "--once"))[1]


def test_devices_are_listed_by_what_the_events_say() -> None:
    """The newest event first; given up tasks are no sign of life."""

    def ended(device: int, outcome: Any, at: float) -> Event:
        return Event(what="outcome", service="u", time=at, device=device, outcome=outcome)

    events = [
        ended(2, "given_up", 9.0),
        ended(2, "applied", 8.0),
        ended(1, "refused", 7.0),
        ended(2, "buffered", 6.0),
        ended(1, "refused", 5.0),
        ended(4, "dead", 4.0),
        Event(what="suspect", service="u", time=3.5, device=7),
        Event(what="trainer", service="t", time=3.0, device=6),
    ]
    found = devices.listed(NO_QUARANTINES.quarantined([2, 5], "", 1.5, 0), events)
    assert [(one.device, one.used, one.outcomes["refused"], one.seen) for one in found.found] == [
        (2, 2, 0, 8.0),
        (5, 0, 0, None),
        (1, 0, 2, 7.0),
        (7, 0, 0, None),
        (4, 0, 0, None),
    ]
    assert [one.device for one in found.found if one.suspected] == [7]
    assert found.since == 3.0


def test_many_devices_fit_in_a_line() -> None:
    assert quarantined(range(3)) == "3: 0, 1, 2"
    assert quarantined(range(25)).endswith("18, 19 and 5 more")
