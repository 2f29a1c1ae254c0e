"""What a gateway does in Redis: it enrols whom an operator invited, exactly once each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.ledger.gateway import Fate, GatewayLedger
from fedstream.broker.ledger.trainer import Outbox
from fedstream.core.digest import digest_of
from fedstream.core.errors import BrokerError
from fedstream.core.messages import GiveUp
from tests.broker.guarded import KEYS, Guarded, is_denied, needs_7
from tests.support import EveryRole, Hand

SITE = "gateway"
FIRST, SECOND = digest_of(b"first invite"), digest_of(b"second invite")


@pytest.fixture
async def gateway(hand: Hand) -> GatewayLedger:
    """The gateway of a run of ten devices."""
    await hand.create()
    return GatewayLedger(hand.client, hand.keys, "gateway-0", SITE)


async def invited(hand: Hand, device: int = 3, digest: str = FIRST, seconds: float = 60) -> None:
    verdict, _ = await hand.ledger.invite(SITE, {device: digest}, seconds=seconds)
    assert verdict == "invited"


async def enrol(
    gateway: GatewayLedger, nonce: str, *, device: int = 3, invite: str = FIRST, key: str = "key"
) -> str:
    return await gateway.enrol(device, invite, key, nonce, nonce_s=60)


# enrolment


async def test_an_invite_enrols_its_device_once(hand: Hand, gateway: GatewayLedger) -> None:
    """A request whose reply was lost is repeated, and changes nothing."""
    await invited(hand)
    assert await gateway.registration(3) == (None, False)
    assert await enrol(gateway, "n1") == "enrolled"
    registration, revoked = await gateway.registration(3)
    assert registration
    assert (registration.key, registration.invite, revoked) == ("key", FIRST, False)
    assert await enrol(gateway, "n2") == "again"
    assert await gateway.registration(3) == (registration, False)
    assert await enrol(gateway, "n3", key="another key") == "used"
    assert await gateway.registration(3) == (registration, False)


async def test_invites_are_for_one_device(hand: Hand, gateway: GatewayLedger) -> None:
    await invited(hand)
    assert await enrol(gateway, "n1", device=4) == "unknown"
    assert await enrol(gateway, "n1", invite=SECOND) == "unknown"
    assert await gateway.registration(4) == (None, False)


async def test_invites_expire(hand: Hand, gateway: GatewayLedger) -> None:
    await invited(hand, seconds=0)
    assert await enrol(gateway, "n") == "expired"
    assert await gateway.registration(3) == (None, False)


async def test_a_newer_invite_takes_the_place_of_an_older_one(
    hand: Hand, gateway: GatewayLedger
) -> None:
    await invited(hand)
    await invited(hand, digest=SECOND)
    assert await enrol(gateway, "n1") == "unknown"
    assert await enrol(gateway, "n1", invite=SECOND) == "enrolled"


async def test_a_device_that_lost_its_key_is_invited_again(
    hand: Hand, gateway: GatewayLedger
) -> None:
    """Its old key ends, and replicas notice. So does its old invite."""
    await invited(hand)
    await enrol(gateway, "n1")
    before = (await gateway.state())[0]
    await invited(hand, digest=SECOND)
    registration, _ = await gateway.registration(3)
    assert registration
    assert registration.key == "key"
    assert await enrol(gateway, "n2", invite=SECOND, key="new key") == "enrolled"
    registration, _ = await gateway.registration(3)
    assert registration
    assert registration.key == "new key"
    assert (await gateway.state())[0] != before
    assert await enrol(gateway, "n3") == "unknown"


async def test_a_new_device_changes_nothing_for_those_who_remember_others(
    hand: Hand, gateway: GatewayLedger
) -> None:
    """With each that came, all would be asked for anew."""
    await invited(hand)
    before = await gateway.state()
    assert await enrol(gateway, "n1") == "enrolled"
    assert await gateway.state() == before


async def test_a_copy_of_an_enrolment_is_recognised(hand: Hand, gateway: GatewayLedger) -> None:
    await invited(hand)
    assert await enrol(gateway, "n") == "enrolled"
    assert await enrol(gateway, "n") == "replayed"
    await invited(hand, device=4, digest=SECOND)
    assert await enrol(gateway, "n", device=4, invite=SECOND) == "replayed"
    assert await gateway.registration(4) == (None, False)


async def test_who_has_no_invite_leaves_nothing_in_redis(
    hand: Hand, gateway: GatewayLedger
) -> None:
    await invited(hand)
    before = await hand.client.call("KEYS", hand.keys.prefix + "*")
    for n in range(5):
        assert await enrol(gateway, f"n{n}", invite=SECOND) == "unknown"
    assert sorted(await hand.client.call("KEYS", hand.keys.prefix + "*")) == sorted(before)


# access


async def test_a_revoked_device_stays_revoked_until_it_is_admitted(
    hand: Hand, gateway: GatewayLedger
) -> None:
    """Its invites end too, whichever comes first."""
    await invited(hand)
    await enrol(gateway, "n1")
    await invited(hand, digest=SECOND)
    before = (await gateway.state())[0]
    assert await hand.ledger.set_access(SITE, [3, 4], admit=False) == ("set", [3, 4])
    assert await hand.ledger.set_access(SITE, [3, 5], admit=False) == ("set", [5])
    registration, revoked = await gateway.registration(3)
    assert registration
    assert revoked
    assert (await gateway.state())[0] != before
    assert await enrol(gateway, "n2") == "revoked"
    assert await enrol(gateway, "n3", invite=SECOND) == "revoked"
    assert await hand.ledger.invite(SITE, {2: "ab", 3: "ab"}, seconds=60) == ("revoked", "3")

    changed = (await gateway.state())[0]
    assert await hand.ledger.set_access(SITE, [3], admit=True) == ("set", [3])
    assert await hand.ledger.set_access(SITE, [3], admit=True) == ("set", [])
    assert await gateway.registration(3) == (registration, False)
    assert (await gateway.state())[0] != changed
    assert await enrol(gateway, "n4", invite=SECOND) == "unknown", "it was withdrawn"


async def test_the_operator_sees_who_is_who(hand: Hand, gateway: GatewayLedger) -> None:
    await invited(hand, device=1)
    await invited(hand, device=3, digest=SECOND)
    await enrol(gateway, "n", invite=SECOND)
    await hand.ledger.set_access(SITE, [4], admit=False)
    enrolled, invites, revoked = await hand.ledger.access(SITE)
    assert {device: one.key for device, one in enrolled.items()} == {3: "key"}
    now = (await hand.client.call("TIME"))[0]
    assert {device: round(till - int(now), -1) for device, till in invites.items()} == {1: 60}
    assert {device: round(at - int(now), -1) for device, at in revoked.items()} == {4: 0}
    assert await hand.ledger.access("another") == ({}, {}, {})


async def test_a_long_list_is_read_in_parts(hand: Hand, gateway: GatewayLedger) -> None:
    await hand.ledger.purge()
    await hand.create(devices=5000)
    verdict, _ = await hand.ledger.invite(SITE, dict.fromkeys(range(5000), FIRST), seconds=60)
    assert verdict == "invited"
    _, invites, _ = await hand.ledger.access(SITE)
    assert sorted(invites) == list(range(5000))


async def test_devices_of_no_run_or_not_in_it_are_refused(hand: Hand) -> None:
    ledger = hand.ledger
    assert await ledger.invite(SITE, {3: FIRST}, seconds=60) == ("none", "")
    assert await ledger.set_access(SITE, [3], admit=False) == ("none", [])
    await hand.create()
    assert await ledger.invite(SITE, {9: FIRST, 10: FIRST}, seconds=60) == ("unknown", "10")
    assert await ledger.set_access(SITE, [10], admit=False) == ("unknown", [10])
    assert await ledger.access(SITE) == ({}, {}, {}), "all or none"
    await ledger.finish("enough")
    assert await ledger.invite(SITE, {3: FIRST}, seconds=60) == ("finished", "")
    assert await ledger.set_access(SITE, [3], admit=False) == ("set", [3])


async def test_foreign_fields_are_no_devices(hand: Hand, gateway: GatewayLedger) -> None:
    await invited(hand, 4)
    assert await hand.ledger.set_access(SITE, [3], admit=False) == ("set", [3])
    of_a_site = hand.keys.enrolled(SITE), hand.keys.invites(SITE), hand.keys.revoked(SITE)
    for key in of_a_site:
        for field in (b"x", b"-1", b"\xff", b"05", b""):
            await hand.client.call("HSET", key, field, "foreign")
    assert await gateway.revoked() == {3}
    enrolled, invites, revoked = await hand.ledger.access(SITE)
    assert ({*enrolled}, {*invites}, {*revoked}) == (set(), {4}, {3})


# nonces and the secret


async def test_a_nonce_is_taken_once_by_all_replicas(hand: Hand, gateway: GatewayLedger) -> None:
    replica = GatewayLedger(hand.client, hand.keys, "gateway-1", SITE)
    taken = await asyncio.gather(
        *(one.take_nonce("n", seconds=60) for one in (gateway, replica) for _ in range(10))
    )
    assert sorted(taken) == [False] * 19 + [True]
    assert 0 < await hand.client.call("PTTL", hand.keys.nonce(SITE, "n")) <= 60_000
    other = GatewayLedger(hand.client, hand.keys, "gateway-0", "another")
    assert await other.take_nonce("n", seconds=60)


async def test_replicas_agree_on_a_secret(hand: Hand, gateway: GatewayLedger) -> None:
    found = await asyncio.gather(*(gateway.secret(b"fresh %d" % n) for n in range(10)))
    assert len(set(found)) == 1
    assert found[0].startswith(b"fresh ")


# outcomes


async def test_a_gateway_learns_what_became_of_its_tasks(
    hand: Hand, gateway: GatewayLedger
) -> None:
    await hand.create()
    upload = await hand.admitted()
    given_up, waiting = await hand.open(2)
    tired = GiveUp(
        task=given_up.task, attempt="g1", device=given_up.device, trainer="t", reason="dropped out"
    )
    await hand.admit(tired)
    tasks = [upload.task, given_up.task, waiting.task, "unheard of"]
    first, second, *rest = await gateway.fates(tasks)
    assert first == Fate(admitted=upload.attempt)
    assert (second.outcome, second.reason) == ("given_up", "dropped out")
    assert rest == [Fate(), Fate()]
    assert [await gateway.is_open(task) for task in tasks] == [True, False, True, False]
    await hand.commit(1, upload)
    [after] = await gateway.fates([upload.task])
    assert after == Fate(None, upload.attempt, "applied")
    assert await gateway.fates([]) == []


# under its Redis user


@pytest.fixture
async def admin(there: Guarded) -> AsyncIterator[Hand]:
    """A run, played by who may do anything."""
    async with there.client("admin") as client:
        hand = Hand(client, KEYS, EveryRole(client, KEYS, "test"))
        await hand.create()
        await client.call("ACL", "LOG", "RESET")
        yield hand
        await hand.ledger.purge()


@needs_7
@pytest.mark.process
@pytest.mark.parametrize(("user", "site"), [("gateway", "gateway"), ("gateway-clinics", "clinics")])
async def test_a_gateways_user_may_do_all_that_its_ledger_does(
    there: Guarded, admin: Hand, user: str, site: str
) -> None:
    """And what a site's trainer does: announce devices, take a task, answer it."""
    async with there.client(user) as client, there.client("operator") as operator:
        gateway = GatewayLedger(client, KEYS, "gateway-0", site)
        desk = EveryRole(operator, KEYS, "operator")
        assert (await gateway.run()).devices == 10
        assert await desk.invite(site, {3: FIRST}, seconds=60)
        assert await enrol(gateway, "n") == "enrolled"
        assert (await gateway.registration(3))[0]
        assert await gateway.take_nonce("m", seconds=60)
        assert await gateway.secret(b"secret") == b"secret"
        assert await desk.set_access(site, [3], admit=False) == ("set", [3])
        assert (await gateway.state())[0]
        assert (await gateway.registration(3))[1]
        assert (await desk.access(site))[2].keys() == {3}

        assert await admin.announce("gateway-0", 3, site=site) == ["heard"]
        [trigger] = await admin.open(device=3)
        stream = KEYS.tasks_of(f"{site}/gateway-0")
        await client.call("XGROUP", "CREATE", stream, TRAINERS, "0", "MKSTREAM")
        reply = await client.call(
            "XREADGROUP", "GROUP", TRAINERS, "gateway-0", "STREAMS", stream, ">"
        )
        assert reply
        assert await Outbox(client, KEYS, site).announce("gateway-0", (3,))
        assert await gateway.fates([trigger.task]) == [Fate()]
        assert await gateway.revoked() == {3}
        assert await gateway.is_open(trigger.task)
        assert await admin.client.call("ACL", "LOG") == []


def _all_of(key: str) -> list[tuple[str | int, ...]]:
    return [
        ("GET", key),
        ("HGET", key, "3"),
        ("HGETALL", key),
        ("HEXISTS", key, "3"),
        ("SET", key, "x"),
        ("SET", key, "x", "NX", "PX", 1),
        ("HSET", key, "3", "x"),
        ("HDEL", key, "3"),
        ("DEL", key),
        ("UNLINK", key),
        ("PEXPIRE", key, 1),
    ]


def forbidden(site: str, other: str) -> list[tuple[str | int, ...]]:
    """What the gateway of a site might try."""
    theirs = [
        KEYS.enrolled(other),
        KEYS.invites(other),
        KEYS.revoked(other),
        KEYS.secret(other),
        KEYS.nonce(other, "n"),
        KEYS.enrolments(other),
    ]
    own = KEYS.revoked(site)
    return [
        *(command for key in theirs for command in _all_of(key)),
        ("HDEL", own, "3"),
        ("HSET", own, "3", "x"),
        ("SET", own, "x"),
        ("UNLINK", own),
        ("HGETALL", KEYS.enrolled(site)),  # one device at a time is all it needs
        *(("UNLINK", key) for key in (KEYS.enrolled(site), KEYS.secret(site))),
        ("XADD", KEYS.inbox(other), "*", "m", "x"),
        ("XADD", KEYS.inbox("pool"), "*", "m", "x"),
        ("HSET", KEYS.update(f"{other}/t.a"), "0", "x"),
        ("GET", KEYS.workspace(other, "t")),
        ("HGET", KEYS.control(other, 4), "0"),
        ("XREADGROUP", "GROUP", TRAINERS, "x", "STREAMS", KEYS.tasks_of(f"{other}/g"), ">"),
        ("HSET", KEYS.admitted, "t", "a"),
        ("HGETALL", KEYS.open),
        ("HGETALL", KEYS.owners),
        ("ZADD", KEYS.ended, 0, "t|a|applied|"),
        ("ZREM", KEYS.ended, "x"),
        ("HSET", KEYS.counts, "applied", 9),
        ("XADD", KEYS.queue, "*", "m", "x"),
        ("HSET", KEYS.head, "version", 9),
        ("HSET", KEYS.run, "state", "finished"),
        ("HSET", KEYS.model("1.1"), "0", "x"),
        ("HGET", KEYS.update(f"{site}/t.a"), "0"),
        ("EVAL", "return 1", 0),
        ("SCRIPT", "LOAD", "return 1"),
        ("KEYS", "*"),
        ("SCAN", 0),
    ]


@needs_7
@pytest.mark.process
@pytest.mark.parametrize(
    ("user", "site", "other"),
    [("gateway", "gateway", "clinics"), ("gateway-clinics", "clinics", "gateway")],
)
async def test_redis_denies_a_gateway_what_it_does_not_need(
    there: Guarded, user: str, site: str, other: str
) -> None:
    """Another site's state, and of its own what an operator decides."""
    async with there.client(user) as client:
        left = [one for one in forbidden(site, other) if not await is_denied(client, one)]
    assert left == []


@needs_7
@pytest.mark.process
async def test_a_gateway_cannot_enrol_at_another(there: Guarded, admin: Hand) -> None:
    """By the script either, and nobody else's user can enrol at all."""
    await admin.ledger.invite("clinics", {3: FIRST}, seconds=60)
    for user in ("gateway", "trainer", "trainer-north", "coordinator", "evaluator"):
        async with there.client(user) as client:
            with pytest.raises(BrokerError, match="refuses"):
                await enrol(GatewayLedger(client, KEYS, "x", "clinics"), "n")
    assert (await admin.ledger.access("clinics"))[0] == {}


def test_sites_of_gateways_have_keys_of_their_own() -> None:
    """No site's name can make its keys another's: names have no colon."""
    one, other = Keys("demo"), "a"
    keys = {
        name(site)
        for site in (SITE, other)
        for name in (one.enrolled, one.invites, one.revoked, one.enrolments, one.secret)
    }
    assert len(keys) == 10
