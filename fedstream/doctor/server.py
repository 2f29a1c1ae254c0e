"""`fedstream doctor`'s judgement of a Redis server: INFO, memory, latency and clock. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedstream.coordinator.policies import Anarchic, InFlight, Poisson, Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import BUDGET_SHARE, vectors
from fedstream.coordinator.scheduling import room_beside
from fedstream.core.layout import Layout
from fedstream.doctor.findings import Finding, not_checked, ok, problem, size, warning
from fedstream.terminal import counted

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
    """Check what Redis writes to disk. ``save``: the setting; None if this user can't read it."""
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
    kept: int  # versions, unshared values, and vectors kept for devices

    @property
    def models(self) -> int:
        """The total, including 2 models in the making, as the scheduler counts them."""
        return self.open + self.queue + self.kept + 2


def need(
    policy: Policy | Rounds,
    layout: Layout,
    *,
    devices: int,
    workers: int,
    queue: int,
    keep: tuple[int, int],
) -> Need:
    """Estimate the memory that a run will need.

    ``keep``: the number and bytes of versions that the updater keeps.
    """
    most = max(1, workers)
    match policy:
        case Rounds(size=k):
            wanted = k
        case Poisson(n=n):
            wanted = n
        case InFlight(n=int(n)):
            wanted = n
        case InFlight() | Anarchic():
            wanted = most
        case _:
            wanted = devices  # a user's own: at most one task per device
    versions, most_bytes = keep
    kept = min(versions, max(2, most_bytes // max(1, layout.nbytes))) + 1  # the best version
    kept += -(-layout.unshared_bytes // max(1, layout.nbytes)) + vectors(layout, devices)
    return Need(layout.nbytes, min(wanted, devices), queue, kept)


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


def skew_in(asked: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The lead of this machine's clock over Redis's, and the lead's uncertainty, in seconds.

    ``asked``: (before, Redis's time, after) of each exchange, in seconds; the fastest is used, as
    the most precise.
    """
    before, theirs, after = min(asked, key=lambda one: one[2] - one[0])
    return (before + after) / 2 - theirs, max(0.0, (after - before) / 2)


def clock(asked: Sequence[tuple[float, float, float]]) -> Finding:
    """Compare this machine's clock with Redis's. ``asked``: as :func:`skew_in` takes it."""
    about = "clock"
    skew, unsure = skew_in(asked)
    if abs(skew) <= _SKEW_S + unsure:
        return ok(
            about, f"{1000 * skew:+.1f} ms from Redis's clock, give or take {1000 * unsure:.1f}"
        )
    text = f"this machine's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'}"
    return warning(
        about,
        f"{text} Redis's: the run goes by Redis's, but times in logs and traces are this machine's",
        "synchronise both machines by NTP",
    )
