"""An inbox takes entries of any size; a coordinator takes in a few MB of them at once, and no more.

Redis can't hold a site to a size, so these are real entries, by a real user, for a real process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, Keys
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.streams import PARTS, Group
from fedstream.coordinator.entries import LARGEST
from tests.broker.guarded import KEYS, Guarded, guarded, needs_7
from tests.support import EveryRole, Hand, context, running, wait_until

LARGE = 30 << 20
MOST = 24 << 20  # that a coordinator may grow: a read of 4 MiB, and what is made of it


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("large")) as server:
        yield server


@pytest.fixture
async def run(there: Guarded) -> AsyncIterator[Hand]:
    """A run in which north/edge owns device 3 and south/edge devices 4 to 6."""
    async with there.client("admin") as admin:
        hand = Hand(admin, KEYS, EveryRole(admin, KEYS, "test"))
        await hand.create()
        assert await hand.announce("edge", 3, site="north") == ["heard"]
        assert await hand.announce("edge", 4, 5, 6, site="south") == ["heard"]
        yield hand
        await hand.ledger.purge()


@contextmanager
def process(there: Guarded, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator as its own user."""
    sets = (
        f"run.name={KEYS.name}",
        'coordinator.sites=["pool", "north", "south"]',
        "coordinator.trainer_silence_s=600.0",
        "http.port=0",
        "http.health_port=0",
    )
    settings = there.settings("coordinator")
    assert settings.password
    user = {
        "FEDSTREAM_REDIS__URL": settings.url,
        "FEDSTREAM_REDIS__USERNAME": "coordinator",
        "FEDSTREAM_REDIS__PASSWORD": settings.password.get_secret_value(),
    }
    arguments = [part for one in sets for part in ("--set", one)]
    with log.open("ab") as out:
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "fedstream", "coordinator", *arguments],
            env=os.environ | user,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield coordinator
    finally:
        coordinator.kill()
        coordinator.wait()


def most_memory(pid: int) -> int:
    """What a process ever had in memory, in bytes."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


async def answers(run: Hand, site: str, *devices: int) -> list[bytes]:
    """Honest answers of a site's devices, each to a task of its own."""
    triggers = [(await run.request(device=device))[0] for device in devices]
    assert await run.dispatch() == ["sent"] * len(devices)
    return [(await run.trained(one, site=site)).encode() for one in triggers]


async def add(client: Client, site: str, *fields: bytes | memoryview) -> None:
    await client.call("XADD", KEYS.inbox(site), "*", *fields)


async def strays(run: Hand) -> dict[str, int]:
    return (await run.ledger.look()).reasons("stray")


@pytest.mark.process
@needs_7
@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory")
async def test_huge_entries_use_no_memory_and_delay_no_answers(
    there: Guarded, run: Hand, tmp_path: Path
) -> None:
    """They lie between honest answers, of the same site and of another, when it reads."""
    own, others = await answers(run, "north", 3), await answers(run, "south", 4, 5, 6)
    log = tmp_path / "log"
    with process(there, log) as coordinator:
        async with there.client("trainer-north") as north, there.client("trainer-south") as south:
            await add(south, "south", b"m", others[0])

            async def admitted() -> int:
                return (await run.ledger.look()).admitted

            await wait_until(admitted, what="the first answer is admitted")
            before = most_memory(coordinator.pid)
            os.kill(coordinator.pid, signal.SIGSTOP)
            large = memoryview(bytes(LARGE))
            part = memoryview(bytes(1 << 20))
            for _ in range(5):
                await add(north, "north", b"m", large)
            await add(north, "north", b"m", own[0])
            await add(north, "north", *(p for n in range(30) for p in (b"%d" % n, part)))
            await add(north, "north", b"m", own[0], b"more", part)  # an answer, and more than that
            for said in others[1:]:
                await add(south, "south", b"m", said)
            os.kill(coordinator.pid, signal.SIGCONT)

            async def done() -> bool:
                return (await admitted(), await run.client.call("XLEN", KEYS.inbox("north"))) == (
                    4,
                    0,
                )

            await wait_until(done)
        grown = most_memory(coordinator.pid) - before
    assert grown < MOST, f"{grown >> 20} MiB"
    assert await strays(run) == {"message too long": 7}
    assert (await run.ledger.look()).dead == 0
    assert log.read_text().count("retrying") == 0  # nothing was waited for
    await run.balanced()


async def test_huge_entries_claimed_from_another_coordinator_are_not_loaded(
    make: Any, hand: Hand, keys: Keys
) -> None:
    """However often: what is not even looked at can't have crashed anybody."""
    await hand.create()
    inbox = keys.inbox("pool")
    for _ in range(3):
        await hand.client.call("XADD", inbox, "*", "m", memoryview(bytes(LARGEST + 1)))
    gone = Group(hand.client, inbox, COORDINATORS, "gone")
    await gone.ensure()
    assert len(await gone.read(count=9, block_ms=0)) == 3
    for _ in range(4):
        await gone.claim(idle_ms=0, most=9, own=True)
    made = make(redeliver_s=0.01, attempts=2)
    async with running(made, context()):

        async def empty() -> bool:
            return bool(await hand.client.call("XLEN", inbox) == 0)

        await wait_until(empty)
    assert (await strays(hand), (await hand.ledger.look()).dead) == ({"message too long": 3}, 0)


async def test_busy_sites_are_all_heard(make: Any, hand: Hand, keys: Keys) -> None:
    """Entries that are just not too long: more of them than one read may bring."""
    await hand.create()
    for site in ("pool", "north"):
        outbox = Outbox(hand.client, keys, site)
        for _ in range(40):
            await hand.client.call("XADD", keys.inbox(site), "*", "m", bytes(LARGEST - 1))
        await outbox.announce("last", (3,) if site == "north" else ())
    made = make(sites=("pool", "north"))
    async with running(made, context()):

        async def heard() -> bool:
            return set(await hand.ledger.trainers()) == {"last", "north/last"}

        await wait_until(heard)
    view = await hand.ledger.look()
    assert view.dead + view.reasons("stray").get("letter over the limit", 0) == 80


async def test_entries_behind_much_poison_are_found_at_once(
    make: Any, hand: Hand, keys: Keys
) -> None:
    """Also where no more than that is looked at together, and nothing of it is taken."""
    await hand.create()
    inbox = keys.inbox("pool")
    crashed = Group(hand.client, inbox, COORDINATORS, "coordinator-0")
    await crashed.ensure()
    for _ in range(PARTS + 1):
        await hand.client.call("XADD", inbox, "*", "m", memoryview(bytes(LARGEST - 1)))
    assert len(await crashed.read(count=99, block_ms=0)) == PARTS + 1
    await crashed.claim(idle_ms=0, most=9, own=True, count=99)
    await Outbox(hand.client, keys, "pool").announce("last")
    assert len(await crashed.read(count=99, block_ms=0)) == 1
    made = make(redeliver_s=3600.0, attempts=2)
    async with running(made, context()):

        async def heard() -> bool:
            return list(await hand.ledger.trainers()) == ["last"]

        await wait_until(heard)
    view = await hand.ledger.look()
    assert view.dead + view.reasons("stray").get("letter over the limit", 0) == PARTS + 1
