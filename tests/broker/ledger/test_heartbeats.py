"""A trainer that owns many devices sends their list only until it is on the register."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.trainer import Outbox
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.messages import Heartbeat, Presence, decode
from fedstream.trainer.service import _HEARTBEAT_S
from tests.support import Hand

MANY = tuple(range(2, 2500, 2))
SITE = "north"
SILENCE_S = CoordinatorSettings().trainer_silence_s


class Owner:
    """A trainer of a site, and the coordinator that hears it."""

    def __init__(self, hand: Hand, name: str = "edge") -> None:
        self.hand = hand
        self.name = name
        self.outbox = Outbox(hand.client, hand.keys, SITE)

    async def announces(self, owns: tuple[int, ...] = MANY, **more: Any) -> str:
        """What the trainer sends, 'list' or 'beat', and what comes of it."""
        assert await self.outbox.announce(self.name, owns, **more)
        [entry] = await self.hand.heard(SITE)
        said = decode(entry.data, Presence, Heartbeat)
        what = "list" if isinstance(said, Presence) else "beat"
        return f"{what} {await self.hand.hear(SITE, entry, rate=10**6)}"


@pytest.fixture
async def owner(hand: Hand) -> Owner:
    """It has sent its list."""
    await hand.create(devices=3000)
    owner = Owner(hand)
    assert await owner.announces() == "list heard"
    return owner


async def owned(hand: Hand) -> dict[str, list[int]]:
    """The devices of each trainer."""
    found: dict[str, list[int]] = {}
    for device, name in (await hand.ledger.owners()).items():
        found.setdefault(name, []).append(device)
    return {name: sorted(devices) for name, devices in found.items()}


async def test_list_is_sent_once(owner: Owner) -> None:
    for answers in range(3):
        assert await owner.announces(device=4, answers=answers) == "beat heard"
    assert await owned(owner.hand) == {"north/edge": [*MANY]}
    [about] = (await owner.hand.ledger.trainers()).values()
    assert (about["owns"], about["device"], about["answers"]) == ([*MANY], 4, 2)


async def test_list_over_the_limit_still_says_that_its_trainer_is_there(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Its devices stay as they were; who is not registered, or has left, does not come so."""
    await hand.create()
    await hand.announce("edge", 3, site=SITE)
    for score, is_heard in ((1.5, True), (0, False)):
        await client.call("ZADD", keys.alive, score, "north/edge")
        for name in ("edge", "new"):
            await Outbox(client, keys, SITE).announce(name, [3, 4])
        for entry in await hand.heard(SITE):
            assert await hand.hear(SITE, entry, rate=0) == "over"
        noted = float(await client.call("ZSCORE", keys.alive, "north/edge"))
        assert (noted > 1e9) is is_heard
    assert await client.call("ZSCORE", keys.alive, "north/new") is None
    assert await hand.ledger.owners() == {3: "north/edge"}


async def test_heartbeat_over_the_limit_still_says_that_its_trainer_is_there(
    owner: Owner, client: Client, keys: Keys
) -> None:
    for score, is_heard in ((1.5, True), (0, False)):
        await client.call("ZADD", keys.alive, score, "north/edge")
        assert await owner.outbox.announce("edge", MANY)
        [entry] = await owner.hand.heard(SITE)
        assert isinstance(decode(entry.data, Presence, Heartbeat), Heartbeat)
        assert await owner.hand.hear(SITE, entry, rate=0) == "over"
        noted = float(await client.call("ZSCORE", keys.alive, "north/edge"))
        assert (noted > 1e9) is is_heard


async def test_trainer_whose_heartbeats_nobody_reads_sends_its_list_in_time(
    owner: Owner, client: Client, keys: Keys
) -> None:
    """After a rollback the coordinator buries them, and strikes off who seems silent."""
    note = keys.owned("north/edge")
    for _ in range(2):
        left_ms = await client.call("PTTL", note)
        assert 2000 * _HEARTBEAT_S < left_ms + 100 <= 1000 * (SILENCE_S - 2 * _HEARTBEAT_S)
        await client.call("PEXPIRE", note, 900)
        assert await owner.announces() == "beat heard"  # and renews the note


async def test_list_is_sent_again_after_a_minute(owner: Owner, client: Client, keys: Keys) -> None:
    note = keys.owned("north/edge")
    till_ms, _, digest = (await client.call("GET", note)).partition(b" ")
    seconds, _ = await client.call("TIME")
    assert 50 < int(till_ms) / 1000 - int(seconds) <= 61
    for left_ms in (1500, -1):
        seconds, micros = await client.call("TIME")
        till = int(seconds) * 1000 + int(micros) // 1000 + left_ms
        await client.call("SET", note, b"%d %s" % (till, digest))
        assert await owner.announces() == "beat heard"
        assert await client.call("PTTL", note) <= max(0, left_ms)
    assert await owner.announces() == "list heard"


async def test_another_list_takes_the_place_of_the_first(owner: Owner) -> None:
    assert await owner.announces(MANY[1:]) == "list heard"
    assert await owner.announces(MANY[1:]) == "beat heard"
    assert await owned(owner.hand) == {"north/edge": [*MANY[1:]]}
    assert await owner.announces(MANY[:3]) == "list heard"
    assert await owner.announces(MANY[:3]) == "list heard"  # it is short
    assert await owned(owner.hand) == {"north/edge": [*MANY[:3]]}


@pytest.mark.parametrize("what", ["owned", "owners", "alive", "everything", "left"])
async def test_list_is_sent_again_when_the_register_forgot_it(
    owner: Owner, client: Client, keys: Keys, what: str
) -> None:
    assert await owner.announces(answers=9) == "beat heard"
    match what:
        case "owned":
            await client.call("DEL", keys.owned("north/edge"))
        case "everything":
            await owner.hand.ledger.purge()
            owner.hand.scheduler.number = 0
            await owner.hand.create(devices=3000)
        case "left":
            await owner.hand.ledger.leave(b"north/edge")
            assert await owned(owner.hand) == {}
        case _:
            await client.call("DEL", getattr(keys, what))
    said = [await owner.announces() for _ in range(3)]
    forgot = what in ("owners", "alive")  # and the trainer can't know
    assert said == [*["beat unknown"] * forgot, "list heard", *["beat heard"] * (2 - forgot)]
    assert await owned(owner.hand) == {"north/edge": [*MANY]}
    [about] = (await owner.hand.ledger.trainers()).values()
    assert about["answers"] == 0


async def test_good_bye_is_not_taken_back_by_a_late_heartbeat(owner: Owner) -> None:
    assert await owner.outbox.announce(owner.name, MANY)
    [late] = await owner.hand.heard(SITE)
    await owner.outbox.goodbye(owner.name)
    [said] = await owner.hand.heard(SITE)
    assert await owner.hand.hear(SITE, said, rate=10**6) == "leaves"
    assert await owner.hand.hear(SITE, late, rate=10**6) == "unknown"
    assert await owner.hand.ledger.left() == [b"north/edge"]


async def test_claim_on_anothers_device_is_repeated_until_it_is_granted(owner: Owner) -> None:
    other = Owner(owner.hand, "other")
    claims = (*range(2501, 2999), MANY[0])
    assert await other.announces(claims) == "list heard"
    assert await other.announces(claims) == "list heard"
    await owner.hand.ledger.leave(b"north/edge")
    assert await other.announces(claims) == "list heard"
    assert await owned(owner.hand) == {"north/other": sorted(claims)}
    assert await other.announces(claims) == "beat heard"


async def test_claim_that_is_never_granted_is_not_repeated(owner: Owner) -> None:
    beyond = (*MANY, 3000)
    assert await owner.announces(beyond) == "list heard"
    assert await owner.announces(beyond) == "beat heard"
    assert await owned(owner.hand) == {"north/edge": [*MANY]}


async def test_earlier_release_of_a_coordinator_gets_the_list_every_time(
    owner: Owner, client: Client, keys: Keys
) -> None:
    """It doesn't note a digest, nor does it read one."""
    for _ in range(2):
        await client.call("DEL", keys.owned("north/edge"))
        assert await owner.announces() == "list heard"


async def test_earlier_release_of_a_trainer_sends_its_list_every_time(
    owner: Owner, client: Client, keys: Keys
) -> None:
    for _ in range(2):
        await owner.outbox.say(Presence(trainer="edge", owns=MANY[1:]))
        [entry] = await owner.hand.heard(SITE)
        assert await owner.hand.hear(SITE, entry, rate=10**6) == "heard"
        assert not await client.call("EXISTS", keys.owned("north/edge"))
    assert await owned(owner.hand) == {"north/edge": [*MANY[1:]]}
    assert await owner.announces(MANY) == "list heard"  # it has been replaced


async def test_heartbeats_are_delivered_once_and_charged(owner: Owner) -> None:
    assert await owner.outbox.announce(owner.name, MANY)
    [entry] = await owner.hand.heard(SITE)
    said = Heartbeat.decode(entry.data)
    assert await owner.hand.ledger.beat(SITE, entry, said, rate=0) == "over"
    assert await owner.hand.ledger.beat(SITE, entry, said, rate=10**6) == "repeated"
    stray = (await owner.hand.ledger.look()).reasons("stray")
    assert stray == {"announcement over the limit": 1}
