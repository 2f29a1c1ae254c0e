"""The whole configuration: one table per part, each declared beside what it configures.

Every service reads the same file, so shared settings are written once. The defaults train the
built-in task `digits` well, with ten devices of two classes each.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, model_validator

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import check_name
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.coordinator.policies import InFlight, Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import SchedulerSettings
from fedstream.coordinator.settings import CoordinatorSettings, PageSettings
from fedstream.helper.settings import HelperSettings
from fedstream.journal import JournalSettings
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.config import Option, Section, load
from fedstream.runtime.http import HttpSettings
from fedstream.runtime.logging import LogSettings
from fedstream.runtime.task_settings import (
    LeaseSettings,
    Participation,
    ParticipationGroup,
    WireSettings,
)
from fedstream.runtime.tracing import TracingSettings
from fedstream.settings.private_runs import private_rule, refusal
from fedstream.settings.simulation import (
    NoStaleness,
    SimulatedStaleness,
    SimulationSettings,
    UniformStaleness,
)
from fedstream.settings.start import StartingPoint
from fedstream.sinks.settings import SomeSink
from fedstream.strategies import RULES, FedAsyncSettings, Strategy, StrategySettings
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.evaluator import EvaluatorSettings
from fedstream.trainer.goals import StopSettings, is_on_devices, is_over_devices
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import Sgd, SolverGroups, Solvers, SolverSettings
from fedstream.trainer.task import TaskSettings
from fedstream.updater.service import UpdaterSettings


class RunSettings(Section):
    """Name, goal and seed of a run."""

    name: str = "demo"
    versions: Annotated[int, Field(ge=1, le=2**53)] = 400  # the run ends with this one
    stop: StopSettings | None = None  # or earlier, by a metric
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # for version 0 and the scheduler's draws
    dry_step: bool = True  # try one training step and one evaluation before the start
    start: str | None = (
        None  # version 0: DIR@VERSION or FILE.safetensors; None: drawn from the seed
    )

    @property
    def stop_metric(self) -> str | None:
        """The metric that may end the run."""
        return self.stop.metric if self.stop else None


class Settings(Section):
    """The whole configuration."""

    run: RunSettings = RunSettings()
    redis: RedisSettings = RedisSettings()
    http: HttpSettings = HttpSettings()
    page: PageSettings = PageSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    task: TaskSettings = TaskSettings()
    strategy: StrategySettings = FedAsyncSettings()
    solver: SolverSettings = Sgd()
    solvers: SolverGroups = ()  # solvers of groups of devices
    participation: tuple[ParticipationGroup, ...] = ()  # rate and length of some devices' tasks
    scheduler: SchedulerSettings = SchedulerSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    gateway: GatewaySettings = GatewaySettings()
    helper: HelperSettings = HelperSettings()
    private: PrivateSettings = PrivateSettings()
    lease: LeaseSettings = LeaseSettings()
    updater: UpdaterSettings = UpdaterSettings()
    journal: JournalSettings = JournalSettings()
    trainer: TrainerSettings = TrainerSettings()
    devices: DeviceSettings = DeviceSettings()
    wire: WireSettings = WireSettings()
    evaluator: EvaluatorSettings = EvaluatorSettings()
    simulation: SimulationSettings = SimulationSettings()
    sinks: tuple[SomeSink, ...] = ()  # trackers

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        """Check the tables against one another; messages name both keys."""
        policy, strategy = self.scheduler.policy, self.strategy
        if strategy.rounds == "always" and not isinstance(policy, Rounds | None):
            raise ValueError(
                f"strategy.name = {strategy.name!r} needs scheduler.policy.kind = 'rounds', "
                f"not {policy.kind!r}: leave out scheduler.policy"
            )
        if isinstance(policy, Rounds):
            self._check_rounds(policy)
        has_limit = strategy.max_staleness is not None and not isinstance(self.policy, Rounds)
        if strategy.cancel_stale and not has_limit:
            raise ValueError(
                "strategy.cancel_stale = true needs strategy.max_staleness, and no rounds, which "
                "end their tasks anyway: set the limit, or leave it out"
            )
        self._check_solvers()
        if self.strategy.sends == "model" and self.wire.of_updates.of_changes:
            raise ValueError(
                f"wire.update = {self.wire.update!r} with strategy.name = {self.strategy.name!r}: "
                f"{self.strategy.name} takes models, and {self.wire.of_updates.kind} is too coarse "
                "for them; use bf16 or int8, or a strategy that takes deltas, such as fedbuff"
            )
        stop, on_devices = self.run.stop, self.evaluator.on_devices
        if on_devices is not None and self.evaluator.per_device != "never":
            raise ValueError(
                "evaluator.on_devices and evaluator.per_device both measure the devices' own test "
                "data: leave out evaluator.per_device"
            )
        if stop and is_on_devices(stop.metric) and on_devices is None:
            raise ValueError(
                f"run.stop.metric = {stop.metric!r} is measured by the devices: also set "
                "evaluator.on_devices, as in evaluator.on_devices.fraction = 0.1"
            )
        measured = on_devices is not None or self.evaluator.per_device == "always"
        if stop and is_over_devices(stop.metric) and not measured:
            raise ValueError(
                f"run.stop.metric = {stop.metric!r} is measured on the devices: also set "
                "evaluator.per_device = 'always'"
            )
        remembered, devices = strategy.remembered, self.task.devices
        if remembered is not None and devices is not None and remembered != devices:
            raise ValueError(
                f"strategy.devices = {remembered} differs from task.devices = {devices}: "
                "leave out strategy.devices"
            )
        if isinstance(policy, Policy) and policy.devices_decide and self.trainer.anarchic is None:
            raise ValueError(
                f"scheduler.policy.kind = {policy.kind!r} leaves triggering to the devices: also "
                "set trainer.anarchic, as in trainer.anarchic.rate = 1.0"
            )
        if isinstance(policy, Policy) and policy.devices_decide and self.scheduler.rest_s:
            raise ValueError(
                f"scheduler.rest_s = {self.scheduler.rest_s:g} with scheduler.policy.kind = "
                f"{policy.kind!r}: devices that trigger themselves decide when they rest; leave it "
                "out"
            )
        if strategy.adapt is not None and not self.journal.weights:
            raise ValueError(
                "strategy.adapt with journal.weights = false: the models to score are made "
                "from the journal's updates: leave out journal.weights"
            )
        # A user's rule may name any update.
        names_none = type(strategy) in RULES.built_in.values() and not strategy.names_suspects
        if self.updater.quarantine_after and names_none:
            raise ValueError(
                f"updater.quarantine_after = {self.updater.quarantine_after} with strategy.name = "
                f"{strategy.name!r}, which names no suspects: set strategy.clip, fedbuff's "
                "strategy.aggregate or strategy.name = 'aflguard', or leave it out"
            )
        if self.updater.quarantine_after and strategy.needs_all:
            raise ValueError(
                f"updater.quarantine_after = {self.updater.quarantine_after} with strategy.name = "
                f"{strategy.name!r}, which waits for every device: the run would stop at the first "
                "quarantine; leave it out"
            )
        Participation(self.scheduler.steps, self.participation)  # raises on duplicate devices
        if self.private.policy is not None and (why := refusal(self)):
            raise ValueError(why)
        return self

    def _check_solvers(self) -> None:
        """Check that the strategy accepts the answers of the devices' solvers."""
        rule, others = self.strategy, Solvers(self.solver, self.solvers).others
        whose = {"": self.solver} | {f" of device {d}": other for d, other in others.items()}
        for of, solver in whose.items():
            if rule.controls != solver.controls:
                raise ValueError(
                    f"strategy.name = {rule.name!r} with solver.kind{of} = {solver.kind!r}: "
                    "SCAFFOLD's server and devices go together: set both to 'scaffold' or "
                    "neither"
                )
            how = solver.compression.kind
            if how != "none" and rule.sends == "model":
                raise ValueError(
                    f"strategy.name = {rule.name!r} with solver.compression.kind{of} = {how!r}: "
                    "its devices send models, and only deltas can be compressed; choose a "
                    "strategy that takes them, such as fedbuff"
                )

    def _check_rounds(self, policy: Rounds) -> None:
        """Check that a round can make a version."""
        rule = self.strategy
        if rule.rounds == "never":
            raise ValueError(
                f"scheduler.policy.kind = 'rounds' is not for strategy.name = {rule.name!r}: "
                "choose one that makes versions of rounds, such as fedavg or fedbuff"
            )
        if policy.k is not None and policy.k < rule.batch:
            raise ValueError(
                f"scheduler.policy.k = {policy.k} is below "
                f"strategy.{rule.batch_key} = {rule.batch}: no round would ever be complete"
            )
        if policy.min_answers > rule.batch:
            raise ValueError(
                f"scheduler.policy.min_answers = {policy.min_answers} is above "
                f"strategy.{rule.batch_key} = {rule.batch}, the answers that complete a round"
            )
        if rule.max_staleness:
            raise ValueError(
                f"strategy.max_staleness = {rule.max_staleness} with scheduler.policy.kind = "
                "'rounds': rounds drop late answers anyway; leave it out"
            )

    @property
    def policy(self) -> Policy | Rounds:
        """The configured policy, or the strategy's default."""
        policy = self.scheduler.policy
        if policy is None:
            policy = Rounds() if self.strategy.rounds == "always" else InFlight()
        if isinstance(policy, Rounds) and policy.k is None:
            return policy.model_copy(update={"k": self.strategy.batch})
        return policy

    @property
    def rule(self) -> Strategy:
        """The strategy for this run; in rounds, it drops late updates.

        Of a private run, it reads the policy. Raises ConfigError.
        """
        rule = self.strategy
        if isinstance(self.policy, Rounds) and rule.max_staleness is None:
            rule = rule.model_copy(update={"max_staleness": 0})
        return private_rule(self, rule)

    @property
    def staleness(self) -> SimulatedStaleness:
        """The simulation's configured staleness, or the policy's default."""
        if self.simulation.staleness is not None:
            return self.simulation.staleness
        return NoStaleness() if isinstance(self.policy, Rounds) else UniformStaleness()

    def with_absolute_paths(self) -> Settings:
        """The same settings with absolute paths of read files, for any working directory."""
        task = _absolute(self.task, "data_root")
        file, _, attribute = task.name.rpartition(":")
        if file.endswith(".py"):
            task = task.model_copy(update={"name": f"{Path(file).absolute()}:{attribute}"})
        if isinstance(folder := task.args.get("app_dir"), str):  # a Flower app's
            args = {**task.args, "app_dir": str(Path(folder).absolute())}
            task = task.model_copy(update={"args": args})
        run = self.run
        if run.start is not None:
            run = run.model_copy(update={"start": StartingPoint.parsed(run.start).absolute})
        redis = _absolute(self.redis, "password_file")
        if redis.tls is not None:
            redis = redis.model_copy(update={"tls": _absolute(redis.tls, "ca", "cert", "key")})
        if redis.sentinel is not None:
            sentinel = _absolute(redis.sentinel, "password_file")
            redis = redis.model_copy(update={"sentinel": sentinel})
        gateway = _absolute(
            self.gateway, "tls_cert", "tls_key", "client_ca", "flower_app", "flower_keys"
        )
        files = ("policy", "roster", "key", "store", "tls_cert", "tls_key", "client_ca")
        made = {
            "run": run,
            "task": task,
            "trainer": _absolute(self.trainer, "local_dir"),
            "redis": redis,
            "gateway": gateway,
            "helper": _absolute(self.helper, *files),
            "private": _absolute(self.private, "policy", "keys", "ca", "tls_cert", "tls_key"),
            "http": _absolute(self.http, "token_file", "certificates"),
        }
        return self.model_copy(update=made)


_TableT = TypeVar("_TableT", bound=BaseModel)


def _absolute(table: _TableT, *keys: str) -> _TableT:
    """A table of the configuration with these paths, if set, made absolute."""
    files: dict[str, object] = {}
    for key in keys:
        match getattr(table, key):
            case str(file):
                files[key] = str(Path(file).absolute())
            case (_, *_) as several:
                files[key] = tuple(str(Path(file).absolute()) for file in several)
    return table.model_copy(update=files)


_OPTIONS = {  # command-line options and the keys they set
    "--task": "task.name",
    "--strategy": "strategy.name",
    "--devices": "task.devices",
    "--from": "run.start",
    "--versions": "run.versions",
    "--updates": "run.versions",
    "--redis": "redis.url",
    "--run": "run.name",
    "--data-root": "task.data_root",
    "--track": "sinks",
    "--flower": "task.args.app_dir",
    "--model": "task.args.model",
}


def options(**given: object) -> list[Option]:
    """Options that were given, by parameter name: ``versions``, ``data_root``."""
    named = ((f"--{name.replace('_', '-')}", value) for name, value in given.items())
    return [Option(name, _OPTIONS[name], value) for name, value in named if value is not None]


def read(
    path: Path | None,
    sets: Sequence[str] = (),
    options: Sequence[Option] = (),
    *,
    trusted: bool = True,
    keys: Collection[str] | None = None,
) -> Settings:
    """Read the configuration. Raises ConfigError.

    Later layers override earlier ones: file, environment, ``sets``, ``options``. ``trusted``: the
    programs that the file names may run. ``keys``: as :func:`load` takes them.
    """
    settings = load(
        Settings,
        path=path,
        environ=os.environ,
        sets=sets,
        options=options,
        trusted=trusted,
        keys=keys,
    )
    given = (option.name for option in options if option.key == "run.name")
    check_name(next(given, "run.name"), settings.run.name)
    return settings
