"""Sites that do not trust each other: what one can do to another and to the run, namely nothing.

Under the users of `fedstream acl`, on a real Redis: each attack as it would be made.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker import rights, scripts
from fedstream.broker.cleanup import cap_workspaces, expire_forgotten, expire_unowned, some_keys
from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, TRAINERS
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry, Group
from fedstream.core.errors import BrokerError, NoScript
from fedstream.core.layout import Model
from fedstream.core.messages import (
    Assignment,
    Dead,
    Event,
    GiveUp,
    Presence,
    Trigger,
    Upload,
    Version,
)
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.updater.intake import Intake
from fedstream.updater.state import Ends
from tests.broker.guarded import KEYS, Guarded, is_denied, needs_7
from tests.broker.pipeline import finished, pipeline
from tests.support import SIZE_LIMIT, EveryRole, Hand, wait_until

pytestmark = [pytest.mark.process, needs_7]

NORTH, SOUTH = "trainer-north", "trainer-south"
OWN, THEIRS = KEYS.inbox("north"), KEYS.inbox("south")


@pytest.fixture
async def hand(there: Guarded) -> AsyncIterator[Hand]:
    """A run in which north/edge owns device 3 and south/edge device 4, played by an admin."""
    async with there.client("admin") as admin:
        hand = Hand(admin, KEYS, EveryRole(admin, KEYS, "test"))
        await hand.create()
        for site, device in (("north", 3), ("south", 4)):
            assert await hand.announce("edge", device, site=site) == ["heard"]
        yield hand
        await hand.ledger.purge()


async def given(hand: Hand, site: str, device: int) -> tuple[Entry, Assignment]:
    """A site's trainer has taken the task of its device."""
    await hand.open(device=device)
    group = Group(hand.client, KEYS.tasks_of(f"{site}/edge"), TRAINERS, "edge")
    await group.ensure()
    [entry] = await group.read(block_ms=0)
    return entry, Assignment.decode(entry.data)


# a run of sites


async def test_run_of_sites_finishes_with_nothing_denied(tmp_path: Path, there: Guarded) -> None:
    """With controls, which each site reads as copies of its own; tau counts for neither."""
    sets = (
        "run.versions=8",
        "strategy.name=scaffold",
        "strategy.buffer_size=3",
        "solver.kind=scaffold",
        'coordinator.sites=["pool", "north:0-2", "south:3-5"]',
    )
    async with there.client("admin") as admin:
        await admin.call("ACL", "LOG", "RESET")
        async with pipeline(KEYS, there.settings, tmp_path, *sets) as services:
            for site, owns in (("north", [0, 1, 2]), ("south", [3, 4, 5])):
                about = (f"trainer.site={site}", f"trainer.owns={owns}")
                await services.start("trainer", f"edge-{site}", *about, user=f"trainer-{site}")
            async with there.client("operator") as operator:
                view = await finished(operator, KEYS)
            rows = await admin.call("XRANGE", KEYS.models, "-", "+")
            made = [one for _, fields in rows for one in Version.decode(fields[1]).updates]
            assert {one.device for one in made} == set(range(6))
            names = {name.decode() for name in await admin.call("KEYS", KEYS.prefix + "*")}
            assert {KEYS.control("north", 0), KEYS.control("south", 3)} <= names
            assert not names & {KEYS.control("north", 3), KEYS.control("south", 0)}
            assert view.reasons("refused") == {}
        denied = await admin.call("ACL", "LOG")
        await EveryRole(admin, KEYS, "test").purge()
    assert denied == []


async def test_error_feedback_needs_nothing_that_redis_denies(
    tmp_path: Path, there: Guarded
) -> None:
    """A trainer of the pool keeps it in Redis; the site's, which own devices, do not."""
    sets = (
        "run.versions=8",
        "strategy.name=fedbuff",
        "strategy.buffer_size=3",
        "wire.update=int4",
        'coordinator.sites=["pool", "north:0-2"]',
    )
    async with there.client("admin") as admin:
        await admin.call("ACL", "LOG", "RESET")
        async with pipeline(KEYS, there.settings, tmp_path, *sets) as services:
            about = ("trainer.site=north", "trainer.owns=[0, 1, 2]")
            await services.start("trainer", "edge-north", *about, user="trainer-north")
            await services.start("trainer", "replica", user="trainer")
            async with there.client("operator") as operator:
                view = await finished(operator, KEYS)
            assert view.reasons("refused") == {}
            names = await admin.call("KEYS", KEYS.workspace("*", "*"))
            kept = {name.decode().rpartition(":")[2].partition(".")[0] for name in names}
        denied = await admin.call("ACL", "LOG")
        await EveryRole(admin, KEYS, "test").purge()
    assert denied == []
    assert kept == {"pool/unsent"}


# what Redis itself denies

FORBIDDEN: list[tuple[str | int, ...]] = [
    # another site's update, workspace, control, tasks and words
    ("HGET", KEYS.update("south/t.a"), "0"),
    ("HMGET", KEYS.update("south/t.a"), "0", "size"),
    ("HGETALL", KEYS.update("south/t.a")),
    ("HSET", KEYS.update("south/t.a"), "0", "x"),
    ("PEXPIRE", KEYS.update("south/t.a"), 1),
    ("HSET", KEYS.update("pool/t.a"), "0", "x"),
    ("HEXISTS", KEYS.update("south/t.a"), "size"),
    ("GET", KEYS.workspace("south", "t")),
    ("SET", KEYS.workspace("south", "t"), "x"),
    ("UNLINK", KEYS.workspace("south", "t")),
    ("HGET", KEYS.control("south", 4), "0"),
    ("HGET", KEYS.device(3), "0"),
    *(
        command
        for tasks in (KEYS.tasks, KEYS.tasks_of("south/edge"), KEYS.tasks_of("owner-0"))
        for command in (
            ("XREADGROUP", "GROUP", TRAINERS, "x", "STREAMS", tasks, ">"),
            ("XCLAIM", tasks, TRAINERS, "x", 0, "1-1"),
            ("XPENDING", tasks, TRAINERS),
            ("XRANGE", tasks, "-", "+"),
            ("XACK", tasks, TRAINERS, "1-1"),
            ("XDEL", tasks, "1-1"),
            ("XADD", tasks, "*", "m", "x"),
            ("XGROUP", "CREATE", tasks, "g", "0", "MKSTREAM"),
        )
    ),
    ("XADD", THEIRS, "*", "m", "x"),
    ("XADD", KEYS.inbox("pool"), "*", "m", "x"),
    # its own update and inbox: it can write them, and that is all
    ("HGET", KEYS.update("north/t.a"), "0"),
    ("HMGET", KEYS.update("north/t.a"), "0", "size"),
    ("UNLINK", KEYS.update("north/t.a")),
    ("SET", KEYS.update("north/t.a"), "x"),
    # what was admitted of it: no more than of others
    *(
        (name, KEYS.queued("north/t.a"), *more)
        for name, *more in (
            ("HSET", "0", "x"),
            ("HGET", "0"),
            ("HEXISTS", "0"),
            ("PEXPIRE", 1),
            ("UNLINK",),
        )
    ),
    ("RENAME", KEYS.update("north/t.a"), KEYS.queued("north/t.a")),
    *((name, OWN) for name in ("DEL", "UNLINK", "GET", "TYPE")),
    ("XREADGROUP", "GROUP", COORDINATORS, "x", "STREAMS", OWN, ">"),
    ("XCLAIM", OWN, COORDINATORS, "x", 0, "1-1"),
    ("XPENDING", OWN, COORDINATORS),
    ("XAUTOCLAIM", OWN, COORDINATORS, "x", 0, "0"),
    ("XRANGE", OWN, "-", "+"),
    ("XREAD", "STREAMS", OWN, "0"),
    ("XACK", OWN, COORDINATORS, "1-1"),
    ("XDEL", OWN, "1-1"),
    ("XTRIM", OWN, "MAXLEN", 0),
    ("XSETID", OWN, "9-9"),
    ("SET", OWN, "x"),
    ("XGROUP", "DESTROY", OWN, COORDINATORS),
    ("RENAME", OWN, KEYS.update("north/t.a")),
    ("XINFO", "STREAM", OWN),
    # what is the services' own
    *(
        (name, key, *more)
        for key in (
            KEYS.events,
            KEYS.triggers,
            KEYS.queue,
            KEYS.dead,
            KEYS.models,
            KEYS.alive,
            KEYS.trainers,
            KEYS.owners,
            KEYS.rates,
            KEYS.open,
            KEYS.admitted,
            KEYS.ended,
            KEYS.counts,
            KEYS.run,
            KEYS.head,
            KEYS.sites,
            KEYS.pool,
            KEYS.tokens,
            KEYS.tasks_of("evil"),
        )
        for name, *more in (
            ("SET", "x"),
            ("DEL",),
            ("XADD", "18446744073709551615-18446744073709551615", "m", "x"),
            ("HSET", 99999, "ghost"),
            ("ZADD", 1, "ghost"),
            ("SADD", "ghost"),
        )
    ),
    ("HGETALL", KEYS.open),
    ("HGETALL", KEYS.owners),
    ("HGETALL", KEYS.trainers),
    ("XREAD", "STREAMS", KEYS.events, "0"),
    ("XRANGE", KEYS.models, "-", "+"),
    ("XRANGE", KEYS.queue, "-", "+"),
    # scripts of its own, and what would keep Redis from others
    ("EVAL", "return 1", 0),
    ("EVAL_RO", "return 1", 0),
    ("SCRIPT", "LOAD", "return 1"),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("FUNCTION", "LOAD", "#!lua name=a\n"),
    ("FCALL", "f", 0),
    ("CLIENT", "KILL", "ID", 1),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("FLUSHALL",),
    ("SUBSCRIBE", "x"),
    ("ACL", "LIST"),
    ("SLOWLOG", "GET"),
]


async def test_redis_denies_a_site_what_belongs_to_others(there: Guarded) -> None:
    async with there.client(NORTH) as north:
        assert [command for command in FORBIDDEN if not await is_denied(north, command)] == []


async def test_sites_can_run_only_trainers_scripts_on_their_own_keys(
    there: Guarded, hand: Hand
) -> None:
    """All are loaded: a service's would do its work for whoever may send its commands."""
    names = {path.name.removesuffix(".lua") for path in scripts._LUA.iterdir()} - {"prelude"}
    keys = {**KEYS.__dict__, "leader": KEYS.leader("updater"), "blob": KEYS.model("1.1")}
    theirs = {"stream": KEYS.tasks_of("south/edge"), "tasks": KEYS.tasks_of("south/edge")}
    rest = {
        "mend": [KEYS.alive, KEYS.quarantine(KEYS.alive)],
        "measure": [KEYS.tasks_of("south/edge")],
        "trim_registers": [KEYS.enrolled("gateway")],
    }
    async with there.client(NORTH) as north:
        for name in sorted(names - {"may"}):
            script = Script(name)
            named = keys | theirs | {key: KEYS.update("south/t.a") for key in script.keys}
            named |= {key: value for key, value in (keys | theirs).items() if key in script.keys}
            command = script.command(named, *["x"] * 6, rest=rest.get(name, []))
            assert await is_denied(north, command), name


async def test_site_waits_until_a_service_has_loaded_the_scripts(
    there: Guarded, hand: Hand
) -> None:
    entry, _ = await given(hand, "north", 3)
    own = KEYS.tasks_of("north/edge")
    await hand.client.call("SCRIPT", "FLUSH")
    await hand.client.call("ACL", "LOG", "RESET")
    north = Client(there.settings(NORTH), loads_scripts=False)
    edge = Group(north, own, TRAINERS, "edge")
    with pytest.raises(NoScript, match="a coordinator loads them") as missing:
        await edge.renew(entry)
    assert missing.value.retriable
    await hand.ledger.look()  # whatever script a service needs first, it loads them all
    assert await edge.renew(entry)
    assert not await edge.release_others(entry)
    assert await edge.release_others(Entry("0-0", b""))
    assert await hand.client.call("ACL", "LOG") == []
    await north.close()


async def test_orphaned_task_streams_expire(there: Guarded, hand: Hand) -> None:
    """A site may make any number of them, under its own name alone."""
    ghosts = [KEYS.tasks_of(f"north/ghost-{n}") for n in range(3)]
    async with there.client("coordinator") as coordinator, there.client(NORTH) as north:
        await north.pipeline(
            [
                ("XGROUP", "CREATE", stream, TRAINERS, "0", "MKSTREAM")
                for stream in (*ghosts, KEYS.tasks_of("north/edge"), KEYS.tasks_of("north/mute"))
            ]
        )
        other = ("XGROUP", "CREATE", KEYS.tasks_of("south/x"), TRAINERS, "0", "MKSTREAM")
        assert await is_denied(north, other)
        _, some = await some_keys(coordinator, KEYS, b"0")
        found = await expire_unowned(coordinator, KEYS, some, {"north/mute"})
        assert sorted(found) == ghosts
        assert await expire_unowned(coordinator, KEYS, some, {"north/mute"}) == []
        lives = await hand.client.pipeline([("PTTL", stream) for stream in ghosts])
        assert all(0 < ms <= 600_000 for ms in lives)
        await hand.announce("ghost-0", 5, site="north")  # it was there, and not heard yet
        lives = await hand.client.pipeline([("PTTL", stream) for stream in ghosts])
        assert [ms == -1 for ms in lives] == [True, False, False]
        assert await expire_unowned(coordinator, KEYS, some, ()) == [KEYS.tasks_of("north/mute")]


# what admission does not take


def uploaded(task: Assignment | Trigger, site: str, **changes: Any) -> Upload:
    """An answer without an update."""
    about: dict[str, Any] = {
        "task": task.task,
        "attempt": "a1",
        "device": task.device,
        "trainer": "edge",
        "tau": 0,
        "base": "b",
        "layout": "l",
        "digest": "d",
        "size": 16,
        "samples": 1,
        "steps": 1,
        "lr": 0.1,
        "site": site,
    }
    return Upload(**about | changes)


async def test_site_cannot_answer_another_sites_task(there: Guarded, hand: Hand) -> None:
    _, task = await given(hand, "south", 4)
    verdict = [("stray", "another site's task")]
    # whatever it says of itself: who says it is the inbox that it came through
    for liar in (uploaded(task, "south"), uploaded(task, "north")):
        assert await hand.admit(liar, site="north", trusted=False) == verdict
    tired = GiveUp(task=task.task, attempt="a1", device=4, trainer="edge", reason="dropped out")
    assert await hand.admit(tired, site="north", trusted=False) == verdict
    assert await hand.admit(tired) == verdict  # nor does the pool
    assert [trigger.task for trigger in (await hand.ledger.look()).open] == [task.task]
    honest = await hand.trained(task, site="south")
    assert await hand.admit(honest, site="south", trusted=False) == [("admitted", "")]
    [(_, queued)] = await hand.queue()
    assert isinstance(queued, Upload)
    assert (queued.site, queued.trainer, queued.handed) == ("south", "south/t", 0)
    assert queued.blob == f"south/{task.task}.a1"
    await hand.balanced()


async def test_unassigned_task_may_be_answered_by_the_pool(hand: Hand) -> None:
    """It still waits for a coordinator: the pool's word is enough, another site's is not."""
    [trigger] = await hand.request(device=4)
    early = uploaded(trigger, "south")
    stray = [("stray", "another site's task")]
    assert await hand.admit(early, site="south", trusted=False) == stray
    assert await hand.admit(await hand.trained(trigger)) == [("admitted", "")]
    await hand.balanced()


async def test_site_cannot_bury_another_sites_task(hand: Hand) -> None:
    _, task = await given(hand, "south", 4)
    for site, ended in (("north", 0), ("south", 1)):
        dead = Dead(stream="tasks", entry="1-1", reason="junk", time=1.0, data=task.encode())
        await hand.client.call("XADD", KEYS.inbox(site), "*", "m", dead.encode())
        [entry] = await hand.heard(site)
        assert await hand.ledger.bury(
            KEYS.inbox(site), COORDINATORS, entry, "junk", task=task, found=dead, site=site
        )
        assert (await hand.ledger.look()).outcomes["dead"] == ended
    await hand.balanced()


async def test_error_event_names_the_tasks_site(hand: Hand) -> None:
    """An observer must know: a site's failures are not the operator's."""
    whose = {4: "south", 3: "north", 5: "pool"}
    for device in whose:
        await hand.open(device=device)
    for task in (await hand.ledger.look()).open:
        site = whose[task.device]
        answer = await hand.trained(task, site=site)
        if site == "north":  # admitted; the updater looks at the bytes
            assert await hand.admit(answer, site=site, trusted=False) == [("admitted", "")]
            assert await hand.commit(None, answer) == "done"
        else:
            other = answer.model_copy(update={"layout": "another"})
            refused = [("refused", "layout")]
            assert await hand.admit(other, site=site, trusted=site == "pool") == refused
    rows = await hand.client.call("XRANGE", KEYS.events, "-", "+")
    events = [Event.decode(fields[1]) for _, fields in rows]
    told = {one.device: one.site for one in events if one.outcome == "refused"}
    assert told == whose


async def makes(hand: Hand, version: int) -> None:
    """The pool makes a version."""
    [trigger] = await hand.open(device=0)
    upload = await hand.trained(trigger)
    assert await hand.admit(upload) == [("admitted", "")]
    assert await hand.commit(version, upload) == "done"


async def test_untrusted_devices_staleness_counts_from_the_task(hand: Hand) -> None:
    """It says that it began with the newest version, whose digest everybody can read."""
    await hand.create(max_staleness=1)
    _, first = await given(hand, "south", 4)
    for number in (1, 2):
        await makes(hand, number)
    lie = await hand.trained(first, site="south")  # of the newest version
    assert lie.tau == 2
    assert await hand.admit(lie, site="south", trusted=False) == [("refused", "too stale")]
    _, second = await given(hand, "south", 4)
    late = await hand.trained(second, site="south", tau=1, base=await hand.ledger.digest(1))
    assert await hand.admit(late, site="south", trusted=False) == [("refused", "unknown base")]
    _, third = await given(hand, "south", 4)
    await makes(hand, 3)
    fresh = await hand.trained(third, site="south")
    assert await hand.admit(fresh, site="south", trusted=False) == [("admitted", "")]
    [(_, queued)] = await hand.queue()
    assert isinstance(queued, Upload)
    assert (queued.tau, queued.handed, queued.since) == (3, 2, 2)
    assert Upload.decode(queued.encode()) == queued


async def test_handing_out_preserves_the_largest_numbers(hand: Hand) -> None:
    """Lua would round them."""
    [trigger] = await hand.open(device=4, seed=2**63 - 1, deadline=1e9 + 0.1, why="x" * 70_000)
    [opened] = (await hand.ledger.look()).open
    assert opened == trigger
    data = await hand.client.call("HGET", KEYS.open, trigger.task)
    assert data.startswith(b"\xde")  # a longer map


async def test_site_can_neither_change_nor_delete_admitted_updates(
    there: Guarded, hand: Hand, tmp_path: Path
) -> None:
    """Under the name that it wrote it by stands nothing any more that anybody reads."""
    _, task = await given(hand, "north", 3)
    [entry] = await hand.said(honest := await hand.trained(task, 2.0, site="north"), site="north")
    written = KEYS.update(honest.blob)
    async with (
        there.client("coordinator") as coordinator,
        there.client("updater") as updater,
        there.client(NORTH) as north,
    ):
        verdict = await EveryRole(coordinator, KEYS, "c").admit(
            entry, honest, size_limit=SIZE_LIMIT, site="north", trusted=False
        )
        assert verdict == ("admitted", "")
        assert await north.call("PEXPIRE", written, 1) == 0
        await north.call("HSET", written, 0, b"x" * (8 << 20), "size", 1)
        [(id_, queued)] = await hand.queue()
        assert isinstance(queued, Upload)
        entry, ends = Entry(id_, queued.encode()), Ends(EndedTasks(tmp_path))
        model = await Intake(updater, KEYS).fetched(entry, queued, hand.layout, ends)
        assert isinstance(model, Model)
        assert model.floats.tolist() == [2.0] * 4
    assert await hand.commit(1, honest) == "done"
    assert not await hand.client.call("EXISTS", KEYS.queued(honest.blob))
    await hand.balanced()


async def test_coordinator_expires_keys_a_site_left_permanent(there: Guarded, hand: Hand) -> None:
    blob, left = KEYS.update("north/junk"), KEYS.workspace("north", "t")
    async with there.client("coordinator") as coordinator, there.client(NORTH) as north:
        await north.pipeline([("HSET", blob, "0", "x"), ("SET", left, "x")])
        cursor, some = await some_keys(coordinator, KEYS, b"0")
        while cursor != b"0":
            cursor, more = await some_keys(coordinator, KEYS, cursor)
            some += more
        found = await expire_forgotten(coordinator, KEYS, some)
        assert sorted(found) == [blob, left]
        assert await is_denied(coordinator, ("GET", left))  # it sees that it is there, no more
        assert await is_denied(coordinator, ("UNLINK", left))
    for key in (blob, left):
        assert 0 < await hand.client.call("PTTL", key) <= 600_000


async def test_each_site_has_its_own_workspace_budget(there: Guarded, hand: Hand) -> None:
    """A coordinator counts them and lets go what is too much; it can't read one."""
    async with (
        there.client("coordinator") as coordinator,
        there.client(NORTH) as north,
        there.client(SOUTH) as south,
        there.client("trainer") as pool,
    ):
        names = [KEYS.workspace("north", str(n)) for n in range(5)]
        kept = [KEYS.workspace("south", "t"), *(KEYS.workspace("pool", str(n)) for n in range(5))]
        for client, key in ((south, kept[0]), *((pool, key) for key in kept[1:])):
            await client.call("SET", key, bytes(1000), "PX", 60_000)
        for key in names:
            await north.call("SET", key, bytes(1000), "PX", 60_000)
        some = [name.encode() for name in (*names, *kept)]
        held: dict[str, int] = {}
        found = [
            await cap_workspaces(coordinator, KEYS, part, held, 2500)
            for part in (some[:2], some[2:])
        ]
        assert (found, held) == ([set(), {"north"}], {"north": 2000, "south": 1000})

        async def gone() -> bool:
            return not await hand.client.call("EXISTS", *names[2:])

        await wait_until(gone)
        assert await hand.client.call("EXISTS", *names[:2], *kept) == 8


# an inbox that somebody fills with what nobody wants


async def test_unread_inbox_stops_taking_announcements(hand: Hand) -> None:
    outbox = Outbox(hand.client, KEYS, "north")
    add = ("XADD", OWN, "*", "m", "x")
    await hand.client.pipeline([add] * 10_001)
    assert not await outbox.announce("edge", (3,))
    assert await hand.client.call("XLEN", OWN) == 10_001


async def test_endless_strays_are_counted_but_not_all_reported(hand: Hand) -> None:
    told: list[int] = []

    async def in_one_second() -> bool:
        """By Redis's clock; the site was told of as often as it may be."""
        second = (await hand.client.call("TIME"))[0]
        await hand.client.call("HSET", KEYS.rates, "", second, "told north", 100)
        before = len(await hand.events("stray"))
        stray = uploaded(hand.trigger(), "north")
        assert await hand.admit(stray, site="north") == [("stray", "unknown task")]
        told[:] = [len(await hand.events("stray")) - before]
        return bool((await hand.client.call("TIME"))[0] == second)

    await wait_until(in_one_second)
    assert told == [0]
    assert (await hand.ledger.look()).reasons("stray")["unknown task"] >= 1


async def test_site_claiming_all_devices_does_not_flood_events(hand: Hand) -> None:
    seconds = int((await hand.client.call("TIME"))[0])
    before = len(await hand.events("trainer"))
    assert await hand.announce("greedy", *range(100, 3000), site="north") == ["heard"]
    seconds = int((await hand.client.call("TIME"))[0]) - seconds + 1
    assert 0 < len(await hand.events("trainer")) - before <= 100 * seconds


async def test_site_with_many_names_does_not_flood_the_register(hand: Hand) -> None:
    verdicts = [await hand.announce(f"t{n}", 5 + n, site="north", most=2) for n in range(3)]
    assert verdicts == [["heard"], ["over"], ["over"]]  # edge is there already
    assert await hand.announce("more", 7, site="south", most=2) == ["heard"]
    assert await hand.announce("t0", 5, site="north", most=2) == ["heard"]  # who is there stays


async def test_site_gets_only_devices_it_may_own(hand: Hand) -> None:
    await hand.outbox.announce("t")  # of the pool
    outbox = Outbox(hand.client, KEYS, "north")
    await outbox.announce("new", (8, 9))
    [entry] = await hand.heard("north")
    said = Presence.decode(entry.data)
    assert await hand.ledger.hear("north", entry, said, denied=(8,), most=9, rate=1000) == "heard"
    assert {device for device, who in (await hand.ledger.owners()).items() if "new" in who} == {9}
    told = [event.text for event in await hand.events("trainer") if event.device == 8]
    assert told == ["north/new does not get device 8: site north may not own it"]


# what a site leaves behind

WRITES: dict[str, tuple[str | int, ...]] = {  # by command: what is left without an expiry
    "set": ("SET", "K", "x"),
    "hset": ("HSET", "K", "x", "x"),
    "xadd": ("XADD", "K", "*", "m", "x"),
    "xgroup|create": ("XGROUP", "CREATE", "K", "g", "0", "MKSTREAM"),
}
UNTRUSTED = (
    ("trainer", "north"),
    ("trainer", "south"),
    ("gateway", "gateway"),
    ("gateway", "clinics"),
)


def written_by(role: str, site: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each way in which a site's user can make a key, and that key."""
    for one in rights.rights_of(role, site):
        for name in (*one.both, *one.writes):
            for command in set(rights.commands(one)) & WRITES.keys():
                key = KEYS.prefix + name.replace("*", f"left-{command}")
                yield tuple(key if part == "K" else part for part in WRITES[command]), key


async def test_whatever_a_site_leaves_ends_or_is_bounded(tmp_path: Path, there: Guarded) -> None:
    """By a coordinator's sweeps, for every key and write command that the site's rights name.

    What stays without an expiry is an inbox, which is read, and a gateway's registers.
    """
    moved, clinics = (
        KEYS.moves("clinics"),
        [
            KEYS.enrolled("clinics"),
            KEYS.invites("clinics"),
            KEYS.secret("clinics"),
            KEYS.enrolments("clinics"),
        ],
    )
    sets = ('coordinator.sites=["pool", "north", "south", "gateway", "clinics"]',)
    async with there.client("admin") as admin, pipeline(KEYS, there.settings, tmp_path, *sets):
        await wait_until(partial(admin.call, "EXISTS", KEYS.run))
        left = set[str]()
        for role, site in UNTRUSTED:
            async with there.client(rights.user_of(site, role)) as user:
                for command, key in written_by(role, site):
                    if key not in left:
                        await user.call(*command)
                    left.add(key)
        assert {KEYS.nonce("clinics", "left-set"), KEYS.update("north/left-hset")} <= left
        stays = {KEYS.inbox(site) for _, site in UNTRUSTED} | {
            key for key in left if re.search(":gateway:[^:]*:[a-z]*$", key)
        }
        await admin.call("DEL", *clinics, moved)
        async with there.client("gateway-clinics") as gateway:
            await gateway.call("SET", KEYS.upload_note("clinics", "x" * 5000), "x")
            for key in clinics[:2]:
                await gateway.call("HSET", key, 0, "x" * 2048, "1", "x" * 2049, 10**9, "y", "01", 1)
            for key in clinics[2:]:
                await gateway.call("SET", key, "x" * 2049)
            for _ in range(3):
                adding = [("XADD", moved, "*", "m", "x")] * 10_000
                await gateway.pipeline(adding)

        async def is_ended() -> bool:
            lives = await admin.pipeline([("PTTL", key) for key in sorted(left - stays)])
            return all(ms != -1 for ms in lives)

        async def is_bounded() -> bool:
            fields = await admin.pipeline([("HKEYS", key) for key in clinics[:2]])
            there_are = await admin.call("EXISTS", *clinics[2:])
            long = await admin.call("KEYS", KEYS.prefix + "gateway:clinics:upload:xx*")
            moves = await admin.call("XLEN", moved)
            return fields == [[b"0"]] * 2 and not there_are and not long and moves <= 20_000

        await wait_until(is_ended)
        await wait_until(is_bounded)


def test_no_role_leaves_its_runs_database() -> None:
    """A user's keys are the same in all databases, and clean-up looks in one."""
    for role, site in [*((role, None) for role in rights.ROLES), *UNTRUSTED]:
        allowed = {
            command for one in rights.rights_of(role, site) for command in rights.commands(one)
        }
        assert not allowed & {"select", "move", "swapdb", "flushall", "flushdb", "migrate"}, role
        if site is not None:
            assert not allowed & {"copy", "restore", "eval", "script|load"}, role


@pytest.mark.parametrize("user", [NORTH, "gateway", "coordinator"])
async def test_redis_keeps_users_in_one_database(user: str, there: Guarded) -> None:
    site = user.partition("-")[2] or user
    own = KEYS.update(f"{site}/x") if user != "coordinator" else KEYS.triggers
    async with there.client(user) as client:
        for command in (
            ("SELECT", 1),
            ("MOVE", own, 1),
            ("SWAPDB", 0, 1),
            ("FLUSHALL",),
            ("FLUSHDB",),
            ("MIGRATE", "127.0.0.1", there.port, own, 1, 10),
            ("RESTORE", own, 0, "x"),
        ):
            with pytest.raises(BrokerError, match="refuses"):
                await client.call(*command)
    other = there.settings(user).model_copy(update={"url": f"redis://127.0.0.1:{there.port}/1"})
    client = Client(other, "elsewhere")
    try:
        with pytest.raises(BrokerError, match="refuses"):
            await client.call("PING")
    finally:
        await client.close()
