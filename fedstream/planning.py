"""How much a run with devices over HTTPS needs: pure arithmetic, from what each step costs.

What a step costs was measured (:class:`StepCosts`); who takes part and how is assumed
(:class:`Fleet`); the rest is multiplication. It is for planning, and no promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.broker.layout import Layout, Tensor
from fedstream.wire import format_of

DAY_S = 86_400.0
_TOKEN_S = 480.0  # a device asks for its next token when a fifth of ten minutes is left
_TOKEN_COMMANDS = 3  # of Redis: the registration, whether it is revoked, the nonce
_QUEUED_S = 1.0  # that an update is in Redis
_MB = 1e6
_GB = 1e9
# What changed in a model, as a share of its bytes: the most that was measured in
# `benchmarks/results/changes.md`, by the kind of format.
CHANGES: Final[Mapping[str, float]] = {"f32": 0.81, "bf16": 0.59, "int8": 0.66}


@dataclass(frozen=True)
class Fleet:
    """Devices, and how they take part."""

    devices: int
    model_bytes: int  # that a task downloads, if it is not just what changed
    update_bytes: int  # that it uploads
    changes: float = 1.0  # share of them that changes take; 1: whole models are sent
    batch: float = 1.0  # updates that make a version
    online: float = 0.25  # share of the time that a device is present
    tasks_a_day: float = 1.0  # of each device
    sessions_a_day: float = 2.0  # times a day that a device connects anew
    train_s: float = 60.0  # that a task takes on a device
    peak: float = 2.0  # the busiest hour's traffic over the mean
    poll_s: float = 50.0  # that a check-in waits
    retry_s: float = 5.5  # between two check-ins, in the mean
    heartbeat_s: float = 5.0  # between two heartbeats of a device that trains

    def __post_init__(self) -> None:
        """Raise ConfigError for a fleet that can't be."""
        if not 0 < self.online <= 1:
            raise ConfigError(f"--online {self.online:g}: must be above 0 and at most 1")
        if not 0 < self.changes <= 1:
            raise ConfigError(f"--changes {self.changes:g}: must be above 0 and at most 1")
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch:g}: a version takes at least one update")
        if self.peak < 1:
            raise ConfigError(f"--peak {self.peak:g}: the busiest hour is at least the mean: 1")
        for name in ("devices", "model_bytes", "update_bytes", "poll_s", "retry_s", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', ' ')}: must be above 0")
        for name in ("tasks_a_day", "sessions_a_day", "train_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must not be below 0")
        busy = self.tasks_a_day * self.train_s / DAY_S
        if busy > self.online:
            raise ConfigError(
                f"a device would train {busy:.0%} of the time and be present {self.online:.0%}: "
                "lower --tasks-a-day or --train-s, or raise --online"
            )


@dataclass(frozen=True)
class TaskCost:
    """Processor time of one service for a task: ``ms``, and ``ms_per_mb`` of model and update."""

    ms: float
    ms_per_mb: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """What each step costs.

    The defaults were measured: `python -m benchmarks.plan` writes them here, except for what grows
    with the model, which one size of models does not tell; see `docs/how-to/plan-devices.md`.
    """

    arrival_ms: float = 3.27  # gateway: TLS handshake, enrolment, token, first check-in
    check_in_ms: float = 0.226  # gateway: a check-in without a task
    beat_ms: float = 0.226  # gateway: a heartbeat, taken to cost what a check-in does
    gateway: TaskCost = TaskCost(0.471, 1.8)
    coordinator: TaskCost = TaskCost(0.0736, 0.08)
    scheduler: TaskCost = TaskCost(0.133, 0.04)
    updater: TaskCost = TaskCost(0.394, 1.1)
    redis: TaskCost = TaskCost(0.195, 0.8)
    check_in_redis_ms: float = 0.0139  # Redis: a check-in without a task
    token_redis_ms: float = 0.05  # Redis: a token
    task_commands: float = 79.2  # of Redis, with those inside scripts
    check_in_commands: float = 0.141
    gateway_mb: float = 113.0  # of memory, before any device comes
    device_kb: float = 31.3  # of a gateway's memory, for a connected device
    registered_bytes: float = 631.0  # of Redis, for a device that has enrolled
    models_kept: int = 8  # in Redis
    changes_ms_per_mb: float = 1.8  # gateway: to make changes, for a MB of the model

    def tasks(self) -> dict[str, TaskCost]:
        """The costs of a task by service."""
        return {
            "gateway": self.gateway, "coordinator": self.coordinator, "scheduler": self.scheduler,
            "updater": self.updater, "redis": self.redis,
        }  # fmt: skip

    @classmethod
    def measured(cls, results: Mapping[str, Any]) -> StepCosts:
        """What `python -m benchmarks.gateway` found, in its `gateway.json`. Raises ConfigError.

        One run tells nothing of other sizes of models: what grows with them is as by default.
        """
        base = cls()
        try:
            found, asked = results["found"], results["asked"]
            idle, work, empty = found["idle"], found["work"], found["empty"]
            both_mb = 2 * 4 * asked["parameters"] / _MB
            # Devices that wait check in while others work: that is no cost of a task.
            waiting_ms = {
                role: 1000 * share / work["per_s"] for role, share in idle["share"].items()
            }
            tasks = {
                role: TaskCost(
                    max(
                        0.0,
                        work["ms"][role] - waiting_ms.get(role, 0.0) - cost.ms_per_mb * both_mb,
                    ),
                    cost.ms_per_mb,
                )
                for role, cost in base.tasks().items()
            }
            devices = asked["devices"]
            rate = devices / (asked["poll_s"] + asked["pause_s"])  # check-ins per second

            def each(name: str) -> float:
                """Milliseconds of a service for a check-in."""
                more = idle["share"][name] - empty["share"][name]
                return float(1000 * max(0.0, more) / rate)

            commands = idle["commands_per_s"] - empty["commands_per_s"]
            return replace(
                base,
                gateway=tasks["gateway"], coordinator=tasks["coordinator"],
                scheduler=tasks["scheduler"], updater=tasks["updater"], redis=tasks["redis"],
                arrival_ms=found["arrivals"]["ms"]["gateway"], check_in_ms=each("gateway"),
                beat_ms=each("gateway"), check_in_redis_ms=each("redis"),
                task_commands=work["commands"], check_in_commands=max(0.0, commands) / rate,
                gateway_mb=empty["memory_mb"],
                device_kb=1000 * (idle["memory_mb"] - empty["memory_mb"]) / devices,
                registered_bytes=(idle["redis_memory"] - empty["redis_memory"]) / devices,
            )  # fmt: skip
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"not the results of `python -m benchmarks.gateway`: {error!r}"
            ) from error


@dataclass(frozen=True)
class Rules:
    """How full anything may be, and how much one replica takes."""

    full: float = 0.6  # of a core
    devices: int = 20_000  # of a gateway's replica (gateway.devices)
    models: int = 256 << 20  # bytes of models in its memory (gateway.model_bytes)
    # New connections per second that it takes from one address (gateway.address_arrivals).
    address_arrivals: float = 200.0
    spare: int = 1  # replicas more than needed


@dataclass(frozen=True)
class Forecast:
    """What it takes. Rates and cores are those of the busiest hour, bytes a day those of a day."""

    present: float  # devices
    check_ins: float  # per second
    tasks: float
    heartbeats: float
    arrivals: float  # TLS handshakes
    tokens: float
    changes: float  # share of the downloads that are just what changed
    down_gb: float  # a day
    up_gb: float
    down_mbit: float  # per second
    up_mbit: float
    redis_commands: float  # per second
    redis_gb: float
    cores: Mapping[str, float]  # by service
    replicas: int  # of the gateway
    replica_gb: float  # of memory, of one of them
    # New connections per second of one of them, if those to spare are away.
    replica_arrivals: float
    runs: int  # 1: one run takes it; else into how many it has to be divided
    most_tasks_a_day: float  # of each device, that one run takes


def bytes_of(parameters: int, name: str) -> int:
    """Bytes of a model of float32 parameters in a wire format; with +zstd, at most so many.

    Raises ConfigError for a format that there is not.
    """
    if parameters < 1:
        raise ConfigError(f"--parameters {parameters}: must be at least 1")
    try:
        wire = format_of(name)
    except FedstreamError as error:
        raise ConfigError(f"format {name}: {error}") from error
    return wire.sizes(Layout((Tensor("all", (parameters,), "float32", "parameter"),)))[1]


def forecast(fleet: Fleet, costs: StepCosts, rules: Rules) -> Forecast:
    """What a fleet needs."""
    present = fleet.devices * fleet.online
    tasks = fleet.peak * fleet.devices * fleet.tasks_a_day / DAY_S
    waiting = max(0.0, present - tasks * fleet.train_s)
    check_ins = waiting / (fleet.poll_s + fleet.retry_s) + tasks
    heartbeats = tasks * fleet.train_s / fleet.heartbeat_s
    arrivals = fleet.peak * fleet.devices * fleet.sessions_a_day / DAY_S
    a_day = fleet.devices * fleet.tasks_a_day
    both_mb = (fleet.model_bytes + fleet.update_bytes) / _MB
    cores = {
        role: tasks * (cost.ms + cost.ms_per_mb * both_mb) / 1000
        for role, cost in costs.tasks().items()
    }
    known = still_known(fleet, rules)
    down = fleet.model_bytes * (1 - known * (1 - fleet.changes))
    made_ms = known * costs.changes_ms_per_mb * fleet.model_bytes / _MB
    spared_ms = costs.gateway.ms_per_mb * (fleet.model_bytes - down) / _MB
    cores["gateway"] += (
        tasks * (made_ms - spared_ms)
        + check_ins * costs.check_in_ms + heartbeats * costs.beat_ms + arrivals * costs.arrival_ms
    ) / 1000  # fmt: skip
    tokens = present / _TOKEN_S + arrivals
    waits_ms = check_ins * costs.check_in_redis_ms + tokens * costs.token_redis_ms
    cores["redis"] += waits_ms / 1000
    needed = max(cores["gateway"] / rules.full, present / rules.devices)
    replicas = max(1, math.ceil(needed)) + rules.spare
    # The updater and Redis work on one core each, however many there are.
    tightest = max(cores["updater"], cores["redis"]) / rules.full
    left = max(0.0, rules.full - waits_ms / 1000)  # of Redis's core, for tasks
    of_tasks = max(cores["updater"] / rules.full, _over(cores["redis"] - waits_ms / 1000, left))
    return Forecast(
        present=present, check_ins=check_ins, tasks=tasks, heartbeats=heartbeats,
        arrivals=arrivals, tokens=tokens, changes=known,
        down_gb=a_day * down / _GB, up_gb=a_day * fleet.update_bytes / _GB,
        down_mbit=tasks * down * 8 / _MB, up_mbit=tasks * fleet.update_bytes * 8 / _MB,
        redis_commands=(
            tasks * costs.task_commands + check_ins * costs.check_in_commands
            + tokens * _TOKEN_COMMANDS
        ),
        redis_gb=(
            fleet.devices * costs.registered_bytes + costs.models_kept * fleet.model_bytes
            + _QUEUED_S * tasks * fleet.update_bytes
        ) / _GB,
        cores=cores, replicas=replicas,
        replica_gb=(
            costs.gateway_mb * _MB + present / replicas * costs.device_kb * 1000
        ) / _GB,
        replica_arrivals=arrivals / (replicas - rules.spare),
        runs=max(1, math.ceil(tightest)),
        most_tasks_a_day=_over(fleet.tasks_a_day, of_tasks),
    )  # fmt: skip


def still_known(fleet: Fleet, rules: Rules) -> float:
    """The share of tasks whose device has a model that the gateway still has in memory.

    Until its next task, each other device has one in the mean, and a version comes after a batch.
    Devices are drawn at random, so how many versions that are is drawn from an exponential
    distribution. That a replica doesn't need models that none of its devices had is left out.
    """
    if fleet.changes == 1:
        return 0.0
    kept = rules.models // fleet.model_bytes
    return 1 - math.exp(-kept * fleet.batch / fleet.devices)


def _over(number: float, by: float) -> float:
    """A quotient, infinite if there is nothing to divide by."""
    return number / by if by else math.inf
