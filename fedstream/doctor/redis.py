"""`fedstream doctor`'s judgement of Redis: INFO, the clock, rights, and a run's record.

All functions are pure, except for :func:`allowed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgpack

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import BrokerError
from fedstream.broker.keys import POOL, Keys
from fedstream.broker.layout import Layout
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.ledger.operator import MAY
from fedstream.broker.records import Run
from fedstream.broker.rights import ROLES, commands
from fedstream.broker.rights import rights_of as parts
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import BUDGET_SHARE, vectors
from fedstream.coordinator.scheduling import Anarchic, Poisson, Policy, room_beside
from fedstream.doctor.findings import (
    Finding,
    counted,
    not_checked,
    ok,
    problem,
    size,
    warning,
)

Info = Mapping[str, str]

OLDEST, NEWEST = (6, 2), 8  # Redis versions that fedstream is made for
_SKEW_S = 1.0  # warn if clocks differ by more
_SLOW = 0.1  # warn if a round trip takes more than this share of redis.timeout_s
_FULL = 0.9  # warn if more than this share of maxmemory is used
_LEAST_MODELS = 3  # the newest, an update to it, and the version made of both


def parsed(reply: bytes) -> Info:
    """Fields of INFO's reply."""
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def version(info: Info) -> Finding:
    """Check that fedstream supports this version of the server."""
    about = "redis version"
    if "valkey_version" in info:
        return ok(about, f"Valkey {info['valkey_version']}")
    said = info["redis_version"]
    numbers = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    if numbers < OLDEST:
        return problem(about, f"Redis {said}", "install 6.2 or later")
    if numbers[0] > NEWEST:
        return warning(about, f"Redis {said}", f"fedstream supports 6.2 to {NEWEST}")
    return ok(about, f"Redis {said}")


def part(info: Info, *, cluster: bool, sentinel: bool) -> Iterator[Finding]:
    """Check the node's role: a master, a replica, a sentinel, or one of a cluster."""
    about = "redis node"
    if info.get("redis_mode") == "sentinel":
        yield problem(
            about, "is a sentinel", "put it in redis.sentinel.nodes, and a Redis in redis.url"
        )
        return
    clustered = info.get("cluster_enabled") == "1"
    if info.get("role") == "slave":
        yield problem(
            about,
            f"is a replica of {info.get('master_host')}:{info.get('master_port')}, which takes no "
            "writes",
            "set redis.url to the master, or redis.sentinel.nodes to the sentinels",
        )
        return
    replicas = int(info.get("connected_slaves", 0))
    if clustered != cluster:
        yield problem(
            about,
            "is part of a cluster" if clustered else "is not part of a cluster",
            f"set redis.cluster = {'true' if clustered else 'false'}",
        )
    elif sentinel and not replicas:
        yield warning(
            about, "is a master without a replica", "add one: the sentinels have none to promote"
        )
    else:
        kind = "a master of a cluster" if clustered else "a master"
        yield ok(about, f"is {kind}, {counted(replicas, 'replica')}")


def persistence(info: Info, save: str | None) -> Iterator[Finding]:
    """Check what Redis writes to disk. ``save``: its setting; None if it may not be read."""
    about = "redis persistence"
    if info.get("loading") == "1":
        yield problem(about, "is loading its data from disk", "wait until it has finished")
    failed = [
        name
        for name in ("aof_last_write_status", "rdb_last_bgsave_status")
        if info.get(name, "ok") != "ok"
    ]
    for name in failed:
        yield problem(
            about,
            f"{name} is {info[name]!r}: Redis may refuse all writes until it succeeds",
            "free space on Redis's disk, or turn off persistence",
        )
    appends = info.get("aof_enabled") == "1"
    if appends:
        yield warning(
            about,
            "an append-only file is on: every write goes to disk too, and protects only updates "
            "that the journal does not have yet",
            "set appendonly no, unless you want that",
        )
    if save:
        yield warning(
            about,
            f"snapshots are on (save {save!r}): each forks Redis and may double its memory; a "
            "restart goes back to the last one",
            "set save '', unless you want that",
        )
    if save is None:
        yield not_checked(f"{about}, snapshots", "this user may not CONFIG GET save")
    elif not appends and not save and not failed:
        yield ok(about, "none: after a restart the updater publishes its journal's newest version")


def limit(info: Info, *, budget: int | None) -> Finding:
    """Check that memory is limited and no keys are evicted at the limit.

    ``budget``: ``scheduler.memory_budget`` in bytes.
    """
    about = "redis maxmemory"
    most, policy = int(info["maxmemory"]), info["maxmemory_policy"]
    if most and policy != "noeviction":
        return problem(
            about,
            f"{size(most)}; when it is reached, Redis evicts keys (maxmemory-policy {policy}), "
            "including models and updates",
            "set maxmemory-policy noeviction",
        )
    if most:
        return ok(about, f"{size(most)}, noeviction")
    if policy != "noeviction":
        return warning(
            about,
            f"no limit, and maxmemory-policy {policy}",
            "set maxmemory, and maxmemory-policy noeviction",
        )
    if budget is not None:
        return ok(about, f"no limit; scheduler.memory_budget is {size(budget)}")
    return warning(
        about,
        "neither a limit nor scheduler.memory_budget: Redis grows until the system kills it",
        "set maxmemory below the memory of the machine or pod",
    )


@dataclass(frozen=True)
class Need:
    """Memory that a run needs in Redis, counted in models."""

    model_bytes: int
    open: int  # open tasks, each of which ends in an update
    queue: int  # updates
    kept: int  # versions, and vectors kept for devices

    @property
    def models(self) -> int:
        """Total, including 2 models in the making, as the scheduler counts."""
        return self.open + self.queue + self.kept + 2


def need(
    policy: Policy,
    layout: Layout,
    *,
    devices: int,
    trainers: int,
    queue: int,
    keep: tuple[int, int],
) -> Need:
    """Estimate what a run will need.

    ``keep``: the number and bytes of versions that the updater keeps.
    """
    most = max(1, trainers)
    match policy:
        case Rounds(size=k):
            wanted = k
        case Poisson(n=n):
            wanted = n
        case Anarchic():
            wanted = most
        case _:
            wanted = policy.n or most
    versions, most_bytes = keep
    kept = min(versions, max(2, most_bytes // max(1, layout.nbytes)))
    return Need(layout.nbytes, min(wanted, devices), queue, kept + vectors(layout, devices))


def room(info: Info, wants: Need | None, *, budget: int | None) -> Finding:
    """Check that the run fits Redis's memory. ``budget``: ``scheduler.memory_budget`` in bytes."""
    about = "redis memory"
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    now = f"uses {size(used)}" + (f" of {size(most)}" if most else "")
    change = "raise maxmemory, or lower updater.keep_versions"
    if most and used >= most:
        return problem(about, f"full: {now}, writes are refused", change)
    if most and used >= _FULL * most:
        return warning(about, f"nearly full: {now}", change)
    if wants is None:
        return ok(about, now)
    wanted = wants.models * wants.model_bytes
    enough = f"raise maxmemory to {size(-(-wanted // BUDGET_SHARE))}"
    if most and wants.model_bytes * _LEAST_MODELS > most:
        return problem(
            about,
            f"maxmemory is {size(most)} and a model {size(wants.model_bytes)}, so no update of it "
            "can become a version",
            enough,
        )
    takes = (
        f"{counted(wants.open, 'task')}, {wants.queue} in the queue, {wants.kept} kept and 2 in "
        f"the making are {wants.models} models of {size(wants.model_bytes)}: {size(wanted)}"
    )
    share = budget if budget is not None else int(most * BUDGET_SHARE)
    if share and wants.model_bytes:
        fits = max(1, room_beside(share, wants.model_bytes, wants.kept) - wants.queue)
        if fits < wants.open:
            raised = f"raise scheduler.memory_budget to {size(wanted)}" if budget else enough
            return warning(
                about,
                f"{takes}; the scheduler may use {size(share)} and keeps {counted(fits, 'task')} "
                f"open instead of {wants.open}",
                f"{raised}, or lower updater.keep_versions",
            )
    return ok(about, f"{now}; {takes}")


def latency(seconds: Sequence[float], timeout_s: float) -> Finding:
    """Compare round trips with the time-out of one exchange."""
    about, slowest = "redis latency", max(seconds)
    text = (
        f"round trip {1000 * median(seconds):.2f} ms, median of {len(seconds)}; slowest "
        f"{1000 * slowest:.2f} ms"
    )
    if slowest >= _SLOW * timeout_s:
        return warning(
            about,
            f"{text}; redis.timeout_s = {timeout_s}; it also covers an 8 MB window of a model",
            "raise redis.timeout_s (at most 20), or move the services closer to Redis",
        )
    return ok(about, f"{text}; redis.timeout_s = {timeout_s}")


def clock(asked: Sequence[tuple[float, float, float]], policy: Policy) -> Finding:
    """Compare this machine's clock with Redis's.

    ``asked``: (before, Redis's time, after) of each exchange, in seconds; the fastest is used, as
    the most precise.
    """
    about = "clock"
    before, theirs, after = min(asked, key=lambda one: one[2] - one[0])
    skew, unsure = (before + after) / 2 - theirs, max(0.0, (after - before) / 2)
    if abs(skew) <= _SKEW_S + unsure:
        return ok(
            about, f"{1000 * skew:+.1f} ms from Redis's clock, give or take {1000 * unsure:.1f}"
        )
    text = f"this machine's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'}"
    change = "synchronise both machines by NTP"
    if isinstance(policy, Rounds) and skew >= policy.timeout_s:
        return problem(
            about,
            f"{text} Redis's, and rounds end after scheduler.policy.timeout_s = "
            f"{policy.timeout_s:g} s: a trainer here gives up every task of a scheduler on Redis's "
            "clock",
            change,
        )
    return warning(
        about, f"{text} Redis's: this affects times of versions and deadlines of rounds", change
    )


# rights

# Each command with complete sample arguments; it is only checked, never executed. K: a key.
_SAMPLES: dict[str, tuple[str, ...]] = {
    "acl|dryrun": ("default", "ping"), "acl|getuser": ("default",), "acl|log": (), "acl|whoami": (),
    "asking": (),
    "client|kill": ("ID", "1"), "client|list": (), "copy": ("K", "K"),
    "client|setname": ("x",), "cluster|slots": (), "config|get": ("save",),
    "dbsize": (), "discard": (), "function|kill": (), "del": ("K",), "evalsha": ("0", "1", "K"),
    "exec": (), "exists": ("K",), "get": ("K",), "hdel": ("K", "x"), "hexists": ("K", "x"),
    "hget": ("K", "x"), "hgetall": ("K",), "hincrby": ("K", "x", "1"), "hkeys": ("K",),
    "hlen": ("K",), "hmget": ("K", "x"), "hset": ("K", "x", "x"), "hstrlen": ("K", "x"),
    "hvals": ("K",), "getrange": ("K", "0", "0"),
    "info": ("memory",), "memory|usage": ("K",), "multi": (), "persist": ("K",),
    "pexpire": ("K", "1"), "ping": (), "pttl": ("K",), "rename": ("K", "K"), "role": (),
    "sadd": ("K", "x"), "scan": ("0",), "script|kill": (), "smembers": ("K",),
    "srem": ("K", "x"),
    "script|load": ("return 1",), "select": ("0",), "set": ("K", "x"),
    "slowlog|get": (), "strlen": ("K",), "time": (),
    "ttl": ("K",), "type": ("K",), "unlink": ("K",),
    "xack": ("K", "x", "0-1"),
    "xadd": ("K", "*", "x", "x"), "xclaim": ("K", "x", "x", "0", "0-1"), "xdel": ("K", "0-1"),
    "xgroup|create": ("K", "x", "$"), "xgroup|delconsumer": ("K", "x", "x"),
    "xinfo|consumers": ("K", "x"), "xinfo|groups": ("K",), "xinfo|stream": ("K",),
    "xlen": ("K",), "xpending": ("K", "x"), "xrange": ("K", "-", "+"),
    "xread": ("STREAMS", "K", "0"), "xreadgroup": ("GROUP", "x", "x", "STREAMS", "K", ">"),
    "xrevrange": ("K", "+", "-"), "xtrim": ("K", "MINID", "0"), "zadd": ("K", "1", "x"),
    "zcard": ("K",), "zcount": ("K", "0", "1"), "zlexcount": ("K", "-", "+"),
    "zmscore": ("K", "x"), "zrange": ("K", "0", "1"),
    "zrangebylex": ("K", "-", "+"), "zrangebyscore": ("K", "0", "1"), "zrem": ("K", "x"),
    "zremrangebyrank": ("K", "0", "1"), "zscore": ("K", "x"),
}  # fmt: skip
_READERS = ("hget", "hgetall", "get", "xlen", "xrange", "pttl")
_BOTH = ("xreadgroup", "hset", "set")  # for roles that may not send scripts
_WRITERS = ("xadd", "hset", "hincrby", "pexpire")


@dataclass(frozen=True)
class Asked:
    """A command that a role must be allowed: in words, and complete."""

    what: str
    command: tuple[str, ...]


def _whole(command: str, key: str) -> tuple[str, ...]:
    arguments = (key if one == "K" else one for one in _SAMPLES[command])
    return (*command.upper().split("|"), *arguments)


def required(role: str, keys: Keys, redis: RedisSettings, site: str = POOL) -> list[Asked]:
    """Everything a role must be allowed: each command on one of its keys, and each key."""
    return [asked for one in parts(role, site) for asked in _required(one, keys, redis)]


def _required(rights: Rights, keys: Keys, redis: RedisSettings) -> list[Asked]:
    clustered, watched = redis.cluster, redis.sentinel is not None
    needed = {"cluster|slots": clustered, "asking": clustered, "role": watched}
    may = [command for command in commands(rights) if needed.get(command, True)]
    names = {
        kind: [name.replace("*", "doctor") for name in listed]
        for kind, listed in (
            ("both", rights.both), ("reads", rights.reads), ("writes", rights.writes)
        )
    }  # fmt: skip
    own = keys.prefix + next(name for listed in names.values() for name in listed)
    found = [Asked(one.replace("|", " ").upper(), _whole(one, own)) for one in may]
    of_kind = {
        # Redis requires read and write access to all keys of a script.
        "both": next((one for one in ("evalsha", *_BOTH) if one in may), ""),
        "reads": next((one for one in _READERS if one in may), ""),
        "writes": next((one for one in _WRITERS if one in may), ""),
    }
    words = {"both": "to use", "reads": "to read", "writes": "to write"}
    for kind, listed in names.items():
        for name in listed:
            if kind == "both" or name not in names["both"]:
                key = keys.prefix + name
                found.append(Asked(f"{words[kind]} {key}", _whole(of_kind[kind], key)))
    return found


def rights_of(user: str, keys: Keys, redis: RedisSettings) -> tuple[str, list[Asked]]:
    """Required rights of a user, of a role or shared by all services, as (purpose, rights)."""
    if user in ROLES:
        return f"fedstream {user}", required(user, keys, redis)
    if user.startswith("trainer-"):
        site = user.removeprefix("trainer-")
        return f"fedstream trainer of site {site}", required("trainer", keys, redis, site)
    services = (role for role in ROLES if role != "operator")
    everything = (asked for role in services for asked in required(role, keys, redis))
    return "every service", list({asked.command: asked for asked in everything}.values())


async def allowed(client: Client, asked: Sequence[Asked]) -> list[bool] | None:
    """Check which commands this connection's user may send, without executing them.

    None if that can't be found out. Redis 7 checks the commands inside a script; for older
    versions, they are queued in a transaction that is discarded.
    """
    packed = msgpack.packb([one.command for one in asked], use_bin_type=False)
    try:
        reply = await MAY(client, {}, packed)
    except BrokerError as error:
        if error.retriable:
            raise
    else:
        return [bool(one) for one in reply]
    try:
        await client.pipeline([("MULTI",), ("DISCARD",)])
    except BrokerError as error:
        if error.retriable:
            raise
        return None
    return [await _queued(client, one.command) for one in asked]


async def _queued(client: Client, command: tuple[str, ...]) -> bool:
    if command[0] in ("MULTI", "EXEC"):
        return True  # allowed() has just sent a transaction
    try:
        await client.pipeline([("MULTI",), command, ("DISCARD",)])
    except BrokerError as error:
        return refusal(error) is None
    return True


def rights(user: str, what: str, asked: Sequence[Asked], may: Sequence[bool] | None) -> Finding:
    """Check that a user has the rights its role needs."""
    about = f"rights of {user}"
    if may is None:
        return not_checked(about, "needs Redis 7 and EVALSHA, or MULTI and DISCARD")
    unmet = (one.what for one, good in zip(asked, may, strict=True) if not good)
    missing = list(dict.fromkeys(unmet))  # several roles may need the same command, on other keys
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return problem(
            about,
            f"may not {'; '.join(missing[:5])}{more}, which {what} needs",
            "allow that, as `fedstream acl` does",
        )
    return ok(about, f"may do what {what} needs")


def refusal(error: BrokerError) -> str | None:
    """Reason, if the error is a missing right or unknown command; None for any other error."""
    text = str(error)
    if denied := re.search(r"no permissions to run the '([^']+)'", text):
        return f"may not {denied[1].upper().replace('|', ' ')}"
    found = re.search(r" (?:refuses: |(?=[Uu]nknown (?:sub)?command))(.*)", text)
    return found[1] if found else None


# a run


def agreement(
    run: Run,
    *,
    strategy: str,
    task: str,
    versions: int,
    layout: Layout | None,
    devices: int | None,
) -> Iterator[Finding]:
    """Compare the configuration with the run in Redis.

    ``layout`` and ``devices`` are None if the task did not load.
    """
    about = "run"
    found = []
    if run.strategy != strategy:
        found.append(
            problem(
                about,
                f"strategy.name = {strategy!r}, the run was made with {run.strategy!r}",
                "restore it, or choose another run.name and journal.dir",
            )
        )
    if layout is not None and layout.without_controls() != run.layout.without_controls():
        found.append(
            problem(
                about,
                f"the model of task {task!r} has {layout.parameters} parameters in "
                f"{len(layout.tensors)} tensors (layout {layout.signature}), the run's has "
                f"{run.layout.parameters} in {len(run.layout.tensors)} ({run.layout.signature})",
                "give every service the task of the run, or purge the run",
            )
        )
    if run.task != task:
        found.append(
            warning(
                about,
                f"task.name = {task!r}, the run was made with {run.task!r}",
                "restore it, unless both are the same task",
            )
        )
    if devices is not None and devices < run.devices:
        found.append(
            problem(
                about,
                f"{devices} devices (task.devices), but the run was made with {run.devices}",
                "restore it: tasks for the other devices would fail",
            )
        )
    if run.versions != versions:
        found.append(
            warning(
                about,
                f"run.versions = {versions}, but the run was made to end at version {run.versions}",
                "restore it: changing it has no effect now",
            )
        )
    yield from found
    if not found:
        state = "is running" if run.state == "running" else f"is finished: {run.why}"
        yield ok(about, f"{state}; made by strategy {run.strategy!r} with task {run.task!r}")
