"""Construction of each service from the configuration; only some of them import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.keys import Keys
from fedstream.coordinator.access import tokens_of
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import Scheduler
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import MakePage
from fedstream.core.errors import ConfigError
from fedstream.core.records import Run
from fedstream.flower import apps
from fedstream.runtime.plugins import runs_program
from fedstream.runtime.service import Service, serve
from fedstream.settings.config import Settings
from fedstream.settings.dry_step import (
    check_local,
    test_data_of,
    try_measuring,
    try_model,
    try_training,
)
from fedstream.settings.plugin_sources import part_sources
from fedstream.settings.start import first_model
from fedstream.sinks.service import DRAIN_S, Sinks
from fedstream.sinks.settings import named, parameters
from fedstream.trainer.devices import AlwaysAvailable, eligible
from fedstream.trainer.evaluator import Evaluator
from fedstream.trainer.goals import required_goal
from fedstream.trainer.loading import load_task
from fedstream.trainer.on_devices import has_device_tests
from fedstream.trainer.service import Trainer
from fedstream.trainer.solvers import Solvers
from fedstream.trainer.task import declared_goals
from fedstream.updater.service import Updater

if TYPE_CHECKING:
    from torch import nn

    from fedstream.core.layout import Layout, Model
    from fedstream.runtime.http import HttpSettings
    from fedstream.strategies import Strategy
    from fedstream.trainer.task import Task, TaskSettings

DEVICES = 10  # default, if neither the configuration nor the task sets a number


def task_of(settings: Settings) -> Task:
    """Load the task and check the other keys against it. Raises ConfigError."""
    task = loaded(settings.task)
    devices_of(settings, task)
    declared_goals(task)  # raises
    if settings.evaluator.batch_size is not None:
        task.evaluation_batch = settings.evaluator.batch_size
    return task


def loaded(settings: TaskSettings) -> Task:
    """Load the task, which may be a Flower app. Raises ConfigError, DataError."""

    def adapt(found: object) -> object:
        if not apps.is_client_app(found):
            return found
        from fedstream.flower.client import configured

        return configured(found, settings.name, settings.devices)

    if runs_program(settings.name):  # a recording may have such a folder beside a built-in task
        apps.look_in(settings.args)
    return load_task(settings.name, settings, adapt=adapt)


def devices_of(settings: Settings, task: Task) -> int:
    """Number of devices of the run. Raises ConfigError if another key contradicts it."""
    devices = settings.task.devices or task.devices or DEVICES
    strategy, slow = settings.strategy, settings.devices.slow_devices
    if strategy.remembered not in (None, devices):
        raise ConfigError(
            f"strategy.devices = {strategy.remembered}, but the run has {devices} devices "
            "(task.devices): leave out strategy.devices"
        )
    strategy.build(devices)  # raises ConfigError if the rule can't work with so many
    if max(slow, default=0) >= devices:
        raise ConfigError(
            f"devices.slow_devices = {list(slow)}: there is no device {max(slow)}: the run's "
            f"{devices} devices (task.devices) are numbered from 0"
        )
    for key, groups in (("solvers", settings.solvers), ("participation", settings.participation)):
        last = max((device for group in groups for device in group.devices), default=0)
        if last >= devices:
            raise ConfigError(
                f"{key}: there is no device {last}: the run's {devices} devices (task.devices) are "
                "numbered from 0"
            )
    _check_steps(settings, task)
    if settings.evaluator.per_device != "never" and not has_device_tests(task):
        raise ConfigError(
            f"evaluator.per_device = {settings.evaluator.per_device!r}: task "
            f"{settings.task.name!r} has no test data of devices: define device_test_data(device)"
        )
    if (on_devices := settings.evaluator.on_devices) is not None:
        if not has_device_tests(task):
            raise ConfigError(
                f"evaluator.on_devices: task {settings.task.name!r} has no test data of devices: "
                "define device_test_data(device)"
            )
        if on_devices.min_devices > devices:
            raise ConfigError(
                f"evaluator.on_devices.min_devices = {on_devices.min_devices}, but the run has "
                f"{devices} devices (task.devices): no version would ever have metrics"
            )
    if strategy.adapt is not None:
        required_goal("strategy.adapt.metric", strategy.adapt.metric, task.goal)
    policy = settings.policy
    if isinstance(policy, Rounds) and policy.min_answers > devices:
        raise ConfigError(
            f"scheduler.policy.min_answers = {policy.min_answers}, but the run has {devices} "
            "devices (task.devices): no round would ever get that many answers"
        )
    return devices


def described(settings: Settings, module: nn.Module) -> str:
    """The parts of a task's model, and the bytes of an update, for people."""
    from fedstream.trainer.vector import layout_of

    layout = layout_of(module)
    parts = f"{layout.parameters:,} parameters trained"
    if layout.unshared is not None:
        for name, some in (
            ("frozen", layout.unshared.frozen),
            ("local", layout.unshared.of_devices),
        ):
            parts += f", {some.floats:,} {name}" if some.tensors else ""
    sent = layout.with_controls() if settings.strategy.controls else layout
    form = settings.wire.of_updates
    if (policy := settings.private.read()) is not None:
        form = policy.format
    return f"{parts}; an update has {form.sizes(sent)[1]:,} bytes"


def _check_steps(settings: Settings, task: Task) -> None:
    """Raise ConfigError if the strategy needs steps that the task's training doesn't return."""
    rule = settings.strategy
    if not task.exact_steps and (rule.by_steps or rule.controls):
        why = (
            "corrects client drift within local training"
            if rule.controls
            else "divides by the number of local steps and the learning rate"
        )
        raise ConfigError(
            f"strategy.name = {rule.name!r} {why}, which "
            f"{settings.task.name!r} decides by itself and does not report: choose fedasync, "
            "fedbuff or fedavg"
        )


def check_used(settings: Settings) -> None:
    """Raise ConfigError for keys that have no effect on a user's own task."""
    task = settings.task
    if not runs_program(task.name):
        return
    without = {
        "partition": task.partition is not None,
        "data_root (--data-root)": task.data_root is not None,
        "download": task.download,
        "seed": task.seed != 0,
    }
    if useless := [key for key, given in without.items() if given]:
        raise ConfigError(
            f"task.{useless[0]} has no effect on {task.name!r}: your own task finds and splits its "
            "data itself; leave it out"
        )


def check_private(settings: Settings, layout: Layout) -> None:
    """Raise ConfigError if a private run's policy does not fit the strategy or the model."""
    if settings.private.policy is not None:
        from fedstream.strategies.private_sums import PrivateSums, check_layout

        rule = settings.rule
        assert isinstance(rule, PrivateSums)  # noqa: S101  (there is a policy)
        check_layout(layout, rule.terms.policy)


def check_turns(rule: Strategy, devices: int) -> None:
    """Raise ConfigError if correlated noise lets too many of a run's devices sit out."""
    if rule.sits_out and devices < (needed := rule.batch * (1 + rule.sits_out)):
        raise ConfigError(
            f"the privacy policy has bands = {1 + rule.sits_out}, so a device is in one of as many "
            f"sums in a row: sums of {rule.batch} updates need {needed} devices, the run has "
            f"{devices}"
        )


def create_run(settings: Settings) -> tuple[Run, Model]:
    """Make a new run: its record and version 0. Raises ConfigError, DataError.

    The model is checked, but neither data nor training, because they may be elsewhere.
    """
    task = task_of(settings)
    devices = devices_of(settings, task)
    try_model(settings, task)
    rule = settings.rule.build()
    model, start = first_model(task, settings.run.seed, settings.run.start, controls=rule.controls)
    check_private(settings, model.layout)
    check_turns(rule, devices)
    run = Run(
        layout=model.layout,
        strategy=settings.strategy.name,
        task=settings.task.name,
        devices=devices,
        versions=settings.run.versions,
        seed=settings.run.seed,
        created=0.0,  # set by the updater
        max_staleness=rule.max_staleness,
        cancel_stale=rule.cancel_stale,
        sends=rule.sends,
        by_steps=rule.by_steps,
        start=start,
        goal=declared_goals(task),
        stop_metric=settings.run.stop_metric,
        policy=rule.policy,
    )
    return run, model


def _coordinator(
    settings: Settings, keys: Keys, name: str, page: MakePage | None = None
) -> tuple[Service, float]:
    policy, solvers = settings.policy, Solvers(settings.solver, settings.solvers)
    by_steps = settings.strategy.by_steps and settings.private.policy is None
    service = Coordinator(
        settings.coordinator,
        settings.lease,
        keys=keys,
        redis=settings.redis,
        name=name,
        anarchic=not isinstance(policy, Rounds) and policy.devices_decide,
        lr_of=(lambda device, tau: solvers[device].at(tau).lr) if by_steps else None,
        tokens=tokens_of(settings.http, settings.page.operator_token),
        page=page,
    )
    return service, settings.coordinator.drain_s


def _scheduler(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    availability = settings.devices.availability

    def is_eligible(run: Run, device: int, now: float) -> bool:
        return eligible(availability, device, run.seed, now - run.created)

    service = Scheduler(
        settings.scheduler,
        settings.policy,
        keys=keys,
        redis=settings.redis,
        name=name,
        seed=settings.run.seed,
        is_eligible=None if isinstance(availability, AlwaysAvailable) else is_eligible,
        participation=settings.participation,
    )
    return service, settings.scheduler.drain_s


def _updater(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    service = Updater(
        settings.updater,
        settings.rule,
        settings.journal,
        keys=keys,
        redis=settings.redis,
        name=name,
        create_run=lambda: create_run(settings),
        versions=settings.run.versions if "versions" in settings.run.model_fields_set else 0,
        stop_metric=settings.run.stop_metric,
        parts=part_sources(settings),
        published_as=settings.wire.of_models,
        digests=settings.wire.digest,
        private=settings.private,
    )
    return service, settings.updater.drain_s


def _trainer(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    def load() -> Task:
        task = task_of(settings)
        devices = settings.trainer.owns or range(devices_of(settings, task))
        try_model(settings, task)
        try_training(settings, task, devices, settings.trainer.device)
        return task

    service = Trainer(
        settings.trainer,
        settings.solver,
        settings.devices,
        settings.lease,
        keys=keys,
        redis=settings.redis,
        name=name,
        load=load,
        solvers=settings.solvers,
        participation=settings.participation,
        wire=settings.wire.of_updates,
        private=settings.private,
        run_devices=settings.task.devices,
    )
    return service, settings.trainer.drain_s


def _evaluator(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    def load() -> Task:
        task = task_of(settings)
        check_local(settings, task)
        try_model(settings, task)
        data, devices = test_data_of(settings, task), devices_of(settings, task)
        try_measuring(settings, task, data, devices, settings.evaluator.device)
        return task

    adapt = settings.strategy.adapt
    service = Evaluator(
        settings.evaluator,
        keys=keys,
        redis=settings.redis,
        name=name,
        load=load,
        stop=settings.run.stop,
        run_devices=settings.task.devices,
        adapt=None if adapt is None else (adapt, Path(settings.journal.dir)),
    )
    return service, settings.evaluator.drain_s


def _sinks(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    service = Sinks(
        named(settings.sinks), parameters(settings), keys=keys, redis=settings.redis, name=name
    )
    return service, DRAIN_S


def _gateway(settings: Settings, keys: Keys, name: str) -> tuple[Service, float]:
    try:
        from fedstream.coordinator.gateway.service import Gateway
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the gateway needs the package {error.name}: pip install 'fedstream[gateway]'"
        ) from error
    service = Gateway(
        settings.gateway,
        settings.lease,
        keys=keys,
        redis=settings.redis,
        name=name,
        update=settings.wire.of_updates,
    )
    return service, settings.gateway.drain_s


def _helper(settings: Settings, _keys: Keys, _name: str) -> tuple[Service, float]:
    try:
        from fedstream.helper.service import HelperService
    except ImportError as error:  # or a release of it without HPKE
        raise ConfigError(
            "the helper needs the package cryptography: pip install 'fedstream[private]'"
        ) from error
    return HelperService(settings.helper, settings.http), settings.helper.drain_s


_BUILDERS: dict[str, Callable[[Settings, Keys, str], tuple[Service, float]]] = {
    "coordinator": _coordinator,
    "scheduler": _scheduler,
    "updater": _updater,
    "trainer": _trainer,
    "evaluator": _evaluator,
    "sinks": _sinks,
    "gateway": _gateway,
    "helper": _helper,
}
ROLES = tuple(_BUILDERS)


def serve_role(role: str, settings: Settings, name: str, page: MakePage | None = None) -> int:
    """Run a service in this process until told to stop; returns the exit code.

    ``page``: the live page, for a coordinator.
    """
    keys = Keys(settings.run.name)
    if page is not None:
        service, drain_s = _coordinator(settings, keys, name, page)
    else:
        service, drain_s = _BUILDERS[role](settings, keys, name)
    # After the gateway was made, which notices renewals.
    tls = None
    if role == "gateway":
        tls = settings.gateway.tls()
    elif role == "helper":
        tls = settings.helper.tls()
    return serve(
        service,
        http=http_of(role, settings),
        log=settings.log,
        run=settings.run.name,
        name=name,
        drain_s=drain_s,
        tracing=settings.tracing,
        tls=tls,
    )


def http_of(role: str, settings: Settings) -> HttpSettings:
    """A service's addresses, names and limits on clients."""
    http = settings.http
    if role == "coordinator" and http.has_token and not http.hosts:
        # A page under another name has no token, and no cookie for us.
        return http.model_copy(update={"hosts": None})
    if role == "gateway":
        gateway, is_direct = settings.gateway, not settings.gateway.proxies
        return http.model_copy(
            update={
                "hosts": None,  # a device proves itself in each request
                "connections": gateway.connections,
                "address_connections": gateway.address_connections if is_direct else None,
                "address_arrivals": gateway.address_arrivals if is_direct else None,
            }
        )
    return http
