"""Each service under a user of its own: what it needs works to the end of a run, the rest does not.

The runs are small but whole: every service in this process, on a real Redis whose users are those
of `fedstream acl`. Redis logs what it denied, so that a refusal that a service survives is found.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fedstream.broker import rights, scripts
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.scripts import Script
from fedstream.cli.app import main
from fedstream.core.errors import BrokerError, ConfigError
from fedstream.core.messages import POOL, Dead, Heartbeat, Presence, decode
from fedstream.history import status
from fedstream.operate import acl, presence
from tests.broker.guarded import (
    GATEWAYS,
    KEYS,
    OF_GATEWAYS,
    OF_SITES,
    PASSWORDS,
    RUN,
    SITES,
    Guarded,
    guarded,
    needs_7,
)
from tests.broker.pipeline import Lines, Pipeline, finished, lines, pipeline, reached
from tests.support import EveryRole, Hand, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path) as server:
        yield server


@asynccontextmanager
async def under_users(fresh: Guarded, folder: Path, *sets: str) -> AsyncIterator[Pipeline]:
    """Each service as its own user; at the end nothing was denied to anyone."""
    async with pipeline(KEYS, fresh.settings, folder, *sets) as services:
        yield services
    async with fresh.client("admin") as admin:
        assert await admin.call("ACL", "LOG") == []


@needs_7
async def test_single_update_run_with_a_workspace_reaches_its_target(
    fresh: Guarded, tmp_path: Path
) -> None:
    """One trainer is stopped in the middle of a task and saves it, another one ends it."""
    sets = (
        "run.versions=100000",
        "run.stop.target=0.9",
        "evaluator.every=1",
        "evaluator.on_devices.fraction=1.0",
        "run.dry_step=false",
    )
    async with under_users(fresh, tmp_path, *sets) as services:
        lines.gate.clear()
        await services.start("trainer", "trainer-1")
        await wait_until(lines.held.is_set)
        stopping = asyncio.create_task(services.stop("trainer-1"))
        await asyncio.sleep(0)
        lines.gate.set()
        await stopping
        async with fresh.client("admin") as admin:
            assert await admin.call("KEYS", KEYS.workspace("pool", "*"))
            await admin.call("XADD", KEYS.tasks, "*", "m", "junk")
        await services.start("trainer", "trainer-2")
        await services.start("trainer", "trainer-3")
        async with fresh.client("operator") as operator:
            view = await finished(operator, KEYS)
            assert "accuracy" in (view.run.why or "")

            async def measured() -> bool:  # the last version, by all devices
                counts = (await EveryRole(operator, KEYS, "o").tally()).counts
                return counts.get("evaluated:measured", 0) >= Lines.devices

            await wait_until(measured)

            async def left() -> bool:  # the coordinator has struck off who said good-bye
                return sorted(await EveryRole(operator, KEYS, "o").trainers()) == [
                    "trainer-2",
                    "trainer-3",
                ]

            await wait_until(left)
            [row] = await operator.call("XRANGE", KEYS.dead, "-", "+")
            letter = Dead.decode(row[1][1])
            assert (letter.stream, letter.data) == ("tasks", b"junk")


@needs_7
async def test_run_in_rounds_survives_an_emptied_redis(fresh: Guarded, tmp_path: Path) -> None:
    """Rounds that time out because a device drops out; a new updater; an emptied Redis."""
    sets = (
        "run.versions=12",
        "strategy.name=fedavg",
        "strategy.clients_per_round=3",
        "scheduler.policy={kind='rounds', k=3, timeout_s=1.0}",
        "devices.dropout=0.2",
        "devices.latency={kind='fixed', mean_s=0.05}",
    )
    async with under_users(fresh, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        async with fresh.client("operator") as operator, fresh.client("admin") as admin:
            await reached(operator, KEYS, 2)
            await services.stop("updater")
            await admin.call("SCRIPT", "FLUSH")
            await services.start("updater", "updater-2")
            await reached(operator, KEYS, 4)
            await admin.call("FLUSHALL")
            assert (await finished(operator, KEYS)).head.version == 12


@needs_7
async def test_anarchic_owners_with_scaffold_controls(fresh: Guarded, tmp_path: Path) -> None:
    """SCAFFOLD's c_i as blobs, owners' streams, and triggers of the devices' own."""
    sets = (
        "run.versions=10",
        "strategy.name=scaffold",
        "strategy.buffer_size=3",
        "solver.kind=scaffold",
        "scheduler.policy.kind=none",
        "trainer.anarchic.rate=20",
    )
    async with under_users(fresh, tmp_path, *sets) as services:
        await services.start("trainer", "owner-1", "trainer.owns=[0, 1, 2]")
        await services.start("trainer", "owner-2", "trainer.owns=[3, 4, 5]")
        async with fresh.client("operator") as operator, fresh.client("admin") as admin:
            view = await finished(operator, KEYS)
            assert (view.head.version, view.owned) == (10, tuple(range(6)))
            assert await admin.call("EXISTS", KEYS.device(0))
        await services.stop_all()
        async with fresh.client("operator") as operator:
            assert (await status.read(operator, KEYS))["state"] == "finished"
            await presence.purge(operator, KEYS, force=True)
            assert await operator.call("SCAN", 0, "COUNT", 1000) == [b"0", []]


# what is refused


FORBIDDEN: dict[str, list[tuple[str | int, ...]]] = {
    "trainer": [
        *(("HSET", key, "a", 1) for key in (KEYS.head, KEYS.run, KEYS.lineage, KEYS.tokens)),
        *(("HSET", key, "a", 1) for key in (KEYS.open, KEYS.admitted, KEYS.counts)),
        *(("HSET", key, "a", 1) for key in (KEYS.evaluation, KEYS.evaluations, KEYS.measured)),
        ("HSET", KEYS.model("1.1"), "0", "x"),
        ("HSET", KEYS.device(1), "0", "x"),
        ("UNLINK", KEYS.model("1.1")),
        ("ZADD", KEYS.kept, 1, "x"),
        ("XADD", KEYS.queue, "*", "m", "x"),
        ("XADD", KEYS.models, "*", "m", "x"),
        ("XADD", KEYS.dead, "*", "m", "x"),
        ("XREAD", "STREAMS", KEYS.inbox("pool"), "0"),
        ("SET", KEYS.leader("updater"), "me"),
        ("SET", KEYS.leader("scheduler"), "me"),
        ("SET", KEYS.sealing, "mine"),
    ],
    "scheduler": [
        ("HSET", KEYS.model("1.1"), "0", "x"),
        ("HGET", KEYS.model("1.1"), "0"),
        ("XADD", KEYS.queue, "*", "m", "x"),
        ("XADD", KEYS.models, "*", "m", "x"),
        ("XREAD", "STREAMS", KEYS.tasks, "0"),
        ("HSET", KEYS.head, "a", 1),
        ("SET", KEYS.leader("updater"), "me"),
        ("HSET", KEYS.run, "state", "finished"),
        ("HSET", KEYS.device(1), "0", "x"),
        ("XADD", KEYS.inbox("pool"), "*", "m", "x"),
    ],
    "coordinator": [
        ("HSET", KEYS.model("1.1"), "0", "x"),
        ("HSET", KEYS.head, "a", 1),
        ("HSET", KEYS.lineage, "1", "x"),
        ("HSET", KEYS.tokens, "updater", "x"),
        ("ZADD", KEYS.kept, 1, "x"),
        ("XADD", KEYS.models, "*", "m", "x"),
        ("XREAD", "STREAMS", KEYS.queue, "0"),
        ("HSET", KEYS.device(1), "0", "x"),
    ],
    "evaluator": [
        ("HSET", KEYS.model("1.1"), "0", "x"),
        ("HSET", KEYS.head, "a", 1),
        ("XREAD", "STREAMS", KEYS.queue, "0"),  # it ends evaluations there
        ("XREAD", "STREAMS", KEYS.tasks, "0"),
        ("XREAD", "STREAMS", KEYS.inbox("pool"), "0"),
        ("HGET", KEYS.update("a.b"), "0"),
        ("HSET", KEYS.queued("a.b"), "0", "x"),
        ("HSET", KEYS.open, "a", "x"),
    ],
    "updater": [
        ("XADD", KEYS.tasks, "*", "m", "x"),
        ("XADD", KEYS.inbox("pool"), "*", "m", "x"),
        ("SET", KEYS.leader("scheduler"), "me"),
        ("HSET", KEYS.trainers, "a", "x"),
    ],
    "operator": [("SHUTDOWN",), ("FLUSHALL",), ("CONFIG", "SET", "maxmemory", 1)],
}


@needs_7
@pytest.mark.parametrize("role", FORBIDDEN)
async def test_each_role_is_denied_what_it_must_not_do(role: str, there: Guarded) -> None:
    async with there.client(role) as client:
        for command in [
            *FORBIDDEN[role],
            ("HGETALL", Keys("another").run),
            ("ACL", "SETUSER", role, "~*"),
            ("KEYS", "*"),
        ]:
            with pytest.raises(BrokerError, match="refuses"):
                await client.call(*command)


@needs_7
async def test_operator_sees_everything_redis_denied(there: Guarded) -> None:
    async with there.client("operator") as operator:
        await operator.call("ACL", "LOG", "RESET")
        async with there.client("trainer") as trainer:
            with pytest.raises(BrokerError, match="refuses"):
                await trainer.call("HSET", KEYS.head, "a", 1)
            with pytest.raises(BrokerError, match="refuses"):
                await trainer.call("ACL", "LOG")
        newest, *_ = await operator.call("ACL", "LOG")
        assert b"trainer" in newest
        assert b"acl|log" in newest


@needs_7
@pytest.mark.parametrize("role", ["trainer", "scheduler", "evaluator"])
async def test_scripts_cannot_bypass_rights(role: str, there: Guarded) -> None:
    """Neither one of the role's own making, nor one of ours that is another's."""
    own = f"return redis.call('XADD', '{KEYS.queue}', '*', 'm', 'x')"
    async with there.client(role) as client:
        with pytest.raises(BrokerError, match="refuses"):
            await client.call("EVAL", own, 0)
        with pytest.raises(BrokerError, match="refuses"):
            await Script("retire")(client, KEYS.__dict__, "1:x", "1.1", rest=[KEYS.model("1.1")])


@needs_7
async def test_rights_of_the_previous_release_still_work_for_devices(there: Guarded) -> None:
    """Theirs have no RENAME: what takes its place is denied, and is no loss."""
    token, digest, c_1 = "1:x", "digest", KEYS.device(1)
    async with there.client("admin") as admin, there.client("updater") as updater:
        await admin.call("HSET", KEYS.tokens, "updater", token)
        await admin.call("HSET", c_1, "0", "before")
        await admin.call("HSET", KEYS.staged(1, digest), "0", "behind", "size", 6)
        await admin.call("ACL", "SETUSER", "updater", "-rename")
        try:
            with pytest.raises(BrokerError, match="refuses"):
                await EveryRole(updater, KEYS, "updater-1").hand_out(token, 1, digest, 6)
            assert await admin.call("HGET", c_1, "0") == b"before"
            await admin.call("ACL", "SETUSER", "updater", "+rename")
            done = await EveryRole(updater, KEYS, "updater-1").hand_out(token, 1, digest, 6)
            assert (done, await admin.call("HGET", c_1, "0")) == ("done", b"behind")
        finally:
            await admin.call("ACL", "SETUSER", "updater", "+rename")
            await admin.call("DEL", KEYS.tokens, c_1, KEYS.staged(1, digest))


@needs_7
async def test_trainer_may_read_whether_its_list_is_on_the_register(there: Guarded) -> None:
    """And with that sends heartbeats; of another site's trainers it learns nothing."""
    async with (
        there.client("admin") as admin,
        there.client("coordinator") as coordinator,
        there.client("trainer") as trainer,
    ):
        hand = Hand(coordinator, KEYS, EveryRole(coordinator, KEYS, "coordinator-1"))
        before = set(await admin.call("KEYS", KEYS.prefix + "*"))
        outbox, owns, said = Outbox(trainer, KEYS, POOL), tuple(range(150)), []
        try:
            await hand.ledger.prepare([POOL])
            for _ in range(2):
                assert await outbox.announce("t", owns)
                [entry] = await hand.heard()
                kind = decode(entry.data, Presence, Heartbeat).kind
                said.append((kind, await hand.hear(POOL, entry)))
            assert said == [("presence", "heard"), ("heartbeat", "heard")]
            with pytest.raises(BrokerError, match="refuses"):
                await trainer.call("GET", KEYS.owned("north/t"))
            with pytest.raises(BrokerError, match="refuses"):
                await trainer.call("SET", KEYS.owned("t"), "x")
        finally:
            await admin.call("DEL", *set(await admin.call("KEYS", KEYS.prefix + "*")) - before)


@needs_7
@pytest.mark.parametrize("user", ["trainer", "trainer-north", "gateway", "gateway-clinics"])
async def test_helpers_key_is_read_by_all_that_seal_and_replaced_by_none(
    user: str, there: Guarded
) -> None:
    async with there.client("updater") as updater, there.client(user) as client:
        try:
            await updater.call("SET", KEYS.sealing, "the helper's")
            assert await client.call("GET", KEYS.sealing) == b"the helper's"
            with pytest.raises(BrokerError, match="refuses"):
                await client.call("SET", KEYS.sealing, "mine")
        finally:
            await updater.call("UNLINK", KEYS.sealing)


@needs_7
async def test_probe_may_only_ping(there: Guarded) -> None:
    async with there.client("health") as client:  # any password will do
        assert await client.call("PING") == b"PONG"
        with pytest.raises(BrokerError, match="refuses"):
            await client.call("GET", KEYS.run)
    nobody = Client(RedisSettings(url=f"redis://127.0.0.1:{there.port}/0"))
    with pytest.raises(BrokerError, match="refuses: Authentication required"):
        await nobody.call("PING")
    await nobody.close()


def test_every_script_belongs_to_a_role_with_its_commands() -> None:
    every = [part for one in rights.RIGHTS.values() for part in (one, *one.apart)]
    named = {script.name for one in every for script in one.scripts}
    named |= {
        "renew",
        "renew_all",
        "release",
        "enrol",
        "put_part",
    }  # trainers' and gateways', whose commands are listed
    there = {path.name.removesuffix(".lua") for path in scripts._LUA.iterdir()} - {"prelude"}
    assert named == there
    allowed = rights.commands(rights.RIGHTS["coordinator"])
    assert {"hdel", "zadd", "xadd", "copy"} <= set(allowed)  # by the prelude


# the file


def test_acl_file_has_a_user_per_role_and_no_passwords(tmp_path: Path) -> None:
    text = acl.file_of(RUN, PASSWORDS)
    users = [line.split()[1] for line in text.splitlines()]
    assert users == ["default", *rights.ROLES, "health"]
    assert "default off" in text
    assert "of-" not in text
    assert "fedstream:{guarded}:" in text
    out = tmp_path / "users.acl"
    acl.write(out, text)
    acl.write(out, text)  # once more, over what is there
    assert out.read_text() == text
    assert out.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["users.acl"]


def test_only_a_run_with_trackers_needs_their_user() -> None:
    given = {name: value for name, value in PASSWORDS.items() if not name.endswith("SINKS")}
    assert "user sinks" in acl.file_of(RUN, PASSWORDS)
    assert "user sinks" not in acl.file_of(RUN, given)


def test_sentinels_and_replicas_with_passwords_get_users() -> None:
    more = {"FEDSTREAM_PASSWORD_SENTINEL": "s", "FEDSTREAM_PASSWORD_REPLICA": "r"}
    users = [line.split()[1] for line in acl.file_of(RUN, PASSWORDS | more).splitlines()]
    assert users == ["default", *rights.ROLES, "replica", "sentinel", "health"]


@pytest.mark.parametrize("left", [("TRAINER",), ("TRAINER", "UPDATER")])
def test_a_missing_password_is_named(left: Sequence[str]) -> None:
    given = {k: v for k, v in PASSWORDS.items() if not k.endswith(tuple(left))}
    with pytest.raises(ConfigError) as raised:
        acl.file_of(RUN, given | {"FEDSTREAM_PASSWORD_TRAINER": ""})
    assert all(f"FEDSTREAM_PASSWORD_{role}" in str(raised.value) for role in left)
    assert "\n" not in str(raised.value)


def test_each_site_gets_its_own_user() -> None:
    lines = acl.file_of(RUN, PASSWORDS | OF_SITES, SITES).splitlines()
    users = {line.split()[1]: line for line in lines}
    assert list(users)[-3:] == ["trainer-north", "trainer-south", "health"]
    assert "inbox:north" in users["trainer-north"]
    assert "south" not in users["trainer-north"]
    assert (
        users["trainer-north"].replace("north", "south").split()[4:]
        == (users["trainer-south"].split()[4:])
    )
    for name, line in users.items():
        assert ("+eval " in line, "+script|load" in line) == (
            False,
            name in rights.ROLES and name not in ("trainer", "gateway", "sinks"),
        )


def test_each_gateway_gets_its_own_user() -> None:
    """The one of the site 'gateway' is the role's; a trainer's site has no part in it."""
    text = acl.file_of(RUN, PASSWORDS | OF_GATEWAYS, gateways=GATEWAYS)
    users = {line.split()[1]: line for line in text.splitlines()}
    assert "gateway:gateway:devices" in users["gateway"]
    assert "gateway:clinics:devices" in users["gateway-clinics"]
    assert users["gateway"].split()[4:] == [
        word.replace("clinics", "gateway") for word in users["gateway-clinics"].split()[4:]
    ]
    others = {name for name, line in users.items() if "gateway:" in line and "gateway" not in name}
    assert others == {"coordinator"}  # which expires and bounds what gateways leave


def test_a_gateway_among_the_sites_needs_its_password() -> None:
    given = {name: value for name, value in PASSWORDS.items() if not name.endswith("GATEWAY")}
    assert "user gateway" not in acl.file_of(RUN, given)
    with pytest.raises(ConfigError, match="FEDSTREAM_PASSWORD_GATEWAY: not set"):
        acl.file_of(RUN, given, gateways=["gateway"])
    with pytest.raises(ConfigError, match="FEDSTREAM_PASSWORD_SITE_CLINICS: not set"):
        acl.file_of(RUN, PASSWORDS, gateways=["clinics"])


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        (["pool"], "the pool's trainers are the user trainer"),
        (["a b"], "--site: 'a b' is not a valid name"),
        (["west"], "FEDSTREAM_PASSWORD_SITE_WEST: not set in the environment"),
        (
            ["a-b", "a.b"],
            "its password would be read from FEDSTREAM_PASSWORD_SITE_A_B, which is a-b's",
        ),
    ],
)
def test_ambiguous_site_is_named(sites: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        acl.file_of(RUN, PASSWORDS, sites)
    assert "\n" not in str(raised.value)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `fedstream acl` in this process: exit code, stdout and stderr."""

    def run(*arguments: object, **environ: str) -> tuple[int, str, str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(["acl", *map(str, arguments)])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_passwords_may_be_files_of_one_or_two_lines(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """As Secrets are mounted: files in a folder, or in one below it."""
    config, folder, out = tmp_path / "run.toml", tmp_path / "passwords", tmp_path / "users.acl"
    config.write_text('[coordinator]\nsites = ["pool", "north"]\n')
    (folder / "site").mkdir(parents=True)
    for role in rights.ROLES:
        (folder / role).write_text(f"of-{role}")
    (folder / "trainer").write_text("new\r\nold\n")
    reload = tmp_path / "reload"
    asked = ("--config", config, "--out", out, "--passwords", folder, "--reload", reload)
    code, _, error = command(*asked)
    assert code == 2
    assert f"{folder / 'trainer-north'}: not there, or empty" in error
    (folder / "site" / "trainer-north").write_text("of-north")
    assert command(*asked)[0] == 0
    users = {line.split()[1]: line.split() for line in out.read_text().splitlines()}

    def hashes(*passwords: str) -> list[str]:
        return [f"#{hashlib.sha256(one.encode()).hexdigest()}" for one in passwords]

    assert users["trainer"][3:5] == hashes("new", "old")
    assert users["trainer-north"][3:4] == hashes("of-north")
    made = reload.read_text()
    assert len(made) == 64
    assert users["reload"][3:] == [*hashes(made), "resetkeys", "-@all", "+acl|load", "+config|set"]


def test_acl_defaults_to_the_configured_sites(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[coordinator]\nsites = ["pool", "north:0-4", "south"]\n')
    environ = PASSWORDS | OF_SITES
    _, lines, _ = command("--config", config, **environ)
    users = [line.split()[1] for line in lines.splitlines()]
    assert users[-3:-1] == ["trainer-north", "trainer-south"]
    _, lines, _ = command("--config", config, "--site", "north", **environ)
    assert "trainer-south" not in lines


@pytest.mark.parametrize(
    ("out", "environ", "says"),
    [
        ("users.acl", {}, "not set in the environment"),
        ("no/users.acl", PASSWORDS, "No such file or directory"),
        ("file/users.acl", PASSWORDS, "Not a directory"),
    ],
)
def test_acl_error_exits_with_2_and_one_line(
    command: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    out: str,
    environ: dict[str, str],
    says: str,
) -> None:
    (tmp_path / "file").touch()
    code, _, error = command("--run", RUN, "--out", tmp_path / out, **environ)
    assert (code, len(error.splitlines())) == (2, 1)
    assert says in error


def test_acl_is_for_database_0_alone(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Users have the same rights in every database, and begin in 0."""
    config = tmp_path / "run.toml"
    config.write_text('[redis]\nurl = "redis://127.0.0.1:6379/1"\n')
    code, lines, error = command("--config", config, **PASSWORDS)
    assert (code, lines, len(error.splitlines())) == (2, "", 1)
    assert "must be in database 0" in error
