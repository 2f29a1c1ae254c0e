"""A task that trains with a Flower ``ClientApp`` in this process, and its initial model."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fedstream.core.errors import ConfigError, DataError
from fedstream.flower import apps, records
from fedstream.protocol.flower import RATES, loss_of, metrics_of, samples_of
from fedstream.runtime.plugins import import_attribute
from fedstream.trainer.data import seeded
from fedstream.trainer.solvers import Cancelled, Proximal, Trained, Work
from fedstream.trainer.task import Mean, Task

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, RecordDict
    from flwr.clientapp import ClientApp

GIVE = "name the app's model with --model package.module:Name (task.args.model)"


class Arrays(nn.Module):
    """A model of numbered arrays in the app's order, for apps without torch."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        super().__init__()
        for n, values in enumerate(arrays):
            array = np.asarray(values)
            if array.dtype.kind != "f":
                raise ConfigError(
                    f"array {n} of the model is of dtype {array.dtype}: only arrays of float "
                    "without names can be mixed; for others, let the model be a torch module"
                )
            self.register_parameter(str(n), nn.Parameter(torch.from_numpy(array.copy())))


def maker(
    given: str | Callable[[], object] | None,
    app_module: ModuleType | None,
    initial: Callable[[], Sequence[Any]] | None,
) -> Callable[[], nn.Module]:
    """The function that makes version 0.

    ``given``: a callable, or its name; None: the only module class in ``app_module``, or else
    ``initial``, which returns a client's initial arrays. Raises ConfigError.
    """
    if isinstance(given, str):
        if ":" not in given:
            raise ConfigError(f"model {given!r}: expected package.module:Name")
        given, _ = import_attribute(given, what="model")
    if given is not None:
        if not callable(given) or isinstance(given, nn.Module):
            raise ConfigError(
                f"the Flower app's model is of type {type(given).__name__}: expected a callable "
                "without arguments, such as the model's class"
            )
        return lambda: _module(given())
    classes = _classes(app_module) if app_module is not None else []
    if len(classes) == 1:
        return lambda: _module(classes[0]())
    if classes:
        names = ", ".join(one.__name__ for one in classes)
        raise ConfigError(f"which of {names} is the Flower app's model? {GIVE}")
    if initial is None:
        raise ConfigError(f"the Flower app's module has no torch model: {GIVE}")
    return lambda: _module(initial())


def _classes(module: ModuleType) -> list[type[nn.Module]]:
    """The module classes that an app's module defines or imports, without torch's own."""
    found = {
        one: None
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, nn.Module)
        and not one.__module__.startswith(("torch.", "torchvision."))
    }
    return list(found)


def _module(made: object) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    if isinstance(made, list | tuple) and made:  # a client may return an empty list
        return Arrays(made)
    raise ConfigError(
        f"the Flower app's model is of type {type(made).__name__}: expected a torch.nn.Module or a "
        f"list of numpy arrays; {GIVE}"
    )


def module_of(spec: str) -> ModuleType | None:
    """The module that an app was loaded from by name."""
    source = spec.rpartition(":")[0]
    return sys.modules.get(Path(source).stem if source.endswith(".py") else source)


Scalar = bool | int | float | str

_STATE_BYTES = 256 << 20
_NODES = 2  # Flower's node 1 is the server
_SERVER = 1
_EVALUATED = 10
_DEVICES = 10


class Partitions(Dataset[int]):
    """The numbers of partitions, as a data set for clients that load their data themselves."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> int:
        return self._numbers[row]


class FlowerTask(Task):
    """A Flower ``ClientApp`` as a task; :func:`task` makes one.

    Each device is a partition: ``context.node_config`` has its number as ``partition-id``, and
    ``num-partitions``. This process keeps a client's ``context.state`` for the device's next task,
    in 256 MiB for all devices; above this limit, the least recently trained devices lose their
    state.
    """

    exact_steps: ClassVar[bool] = False

    def __init__(
        self,
        app: ClientApp,
        *,
        model: Callable[[], nn.Module],
        devices: int | None,
        run_config: Mapping[str, Any],
        evaluate_on: int,
        test_data: Dataset[Any] | None,
    ) -> None:
        """``devices``: None for the joined run's number, and 10 before."""
        self.devices = devices or _DEVICES
        self._follows_run = devices is None
        self._app = app
        self._model = model
        self._run_config = dict(run_config)
        self._evaluate_on = evaluate_on
        self._test_data = test_data
        self._states: OrderedDict[int, RecordDict] = OrderedDict()
        if not _answers(app, "train"):
            raise ConfigError(
                "the Flower ClientApp has no train function: register one with @app.train()"
            )

    def model(self) -> nn.Module:
        return self._model()

    @property
    def run_devices(self) -> int | None:
        return None if self._follows_run else self.devices

    def joined(self, devices: int) -> None:
        if self._follows_run:
            self.devices = devices

    def device_data(self, device: int) -> Partitions:
        """The number of the device's partition, whose data the client loads.

        Raises DataError for a device that does not exist.
        """
        if not 0 <= device < (self.devices or 0):
            raise DataError(
                f"there is no partition {device}: the Flower app has {self.devices} "
                "(num-partitions), numbered from 0"
            )
        return Partitions(range(device, device + 1))

    def test_data(self) -> Dataset[Any] | None:
        """The test data given to :func:`task`, or the partitions for the app's evaluation."""
        if self._test_data is not None:
            return self._test_data
        on = min(self._evaluate_on, self.devices or 0)
        return Partitions(range(on)) if on and _answers(self._app, "evaluate") else None

    def device_test_data(self, device: int) -> Partitions | None:
        """The number of the device's partition, for the app's evaluation; None: it has none."""
        return self.device_data(device) if _answers(self._app, "evaluate") else None

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        """The clients' metrics averaged over examples; on given test data, the task's default."""
        if not isinstance(data, Partitions):
            return super().metrics(model, data)
        arrays = records.arrays_of(model)
        sums: dict[str, float] = {}
        weights: dict[str, int] = {}
        for row in range(len(data)):
            partition, who = int(data[row]), f"device {data[row]}: the Flower client"
            content = self._ask("evaluate", partition, arrays, self._run_config, "")
            numbers = records.numbers_of(content)
            samples = samples_of(numbers, who)
            for name, value in metrics_of(numbers).items():
                sums[name] = sums.get(name, 0.0) + samples * value
                weights[name] = weights.get(name, 0) + samples
        return {name: Mean(total, weights[name]) for name, total in sums.items()}

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        """Let the client train; H and the learning rate are hints.

        All random generators are seeded for the client, and restored afterwards. A client cannot be
        interrupted. Raises Cancelled before it starts; DataError, naming device and array, if its
        reply is not a model; and the client's errors.
        """
        if work.cancelled():
            raise Cancelled
        who = f"device {work.device}: the Flower client"
        config = train_config(work, self._run_config)
        with seeded(work.seed):
            content = self._ask(
                "train", work.device, records.arrays_of(model), config, str(work.version + 1)
            )
        numbers = records.numbers_of(content)
        samples = samples_of(numbers, who)
        records.load(content, model, who)
        return Trained(steps=0, samples=samples, loss=loss_of(numbers), lr=_rate(config))

    def _ask(
        self, kind: str, device: int, arrays: ArrayRecord, config: Mapping[str, Any], group: str
    ) -> RecordDict:
        """Call the app for one device, like Flower's node."""
        asked = records.request(
            arrays,
            config,
            ins="fitins" if kind == "train" else "evaluateins",
            legacy=_is_legacy(self._app),
        )
        context = _context(
            device, self.devices or 0, self._run_config, _copy(self._states.get(device))
        )
        content = _call(self._app, kind, asked, context, group)
        self._keep(device, context.state)
        return content

    def _keep(self, device: int, state: RecordDict) -> None:
        """Keep a client's state, dropping the oldest states above the limit."""
        self._states.pop(device, None)
        if not state:
            return
        self._states[device] = state
        size = sum(map(_size, self._states.values())) if len(self._states) > 1 else 0
        while size > _STATE_BYTES and len(self._states) > 1:
            size -= _size(self._states.popitem(last=False)[1])


def task(
    app: str | ClientApp,
    *,
    model: str | Callable[[], object] | None = None,
    devices: int = _DEVICES,
    run_config: Mapping[str, Any] | None = None,
    evaluate_on: int = _EVALUATED,
    test_data: Dataset[Any] | None = None,
    app_dir: str | Path = ".",
) -> FlowerTask:
    """A task whose devices are the partitions of an unchanged Flower ``ClientApp``.

    ``app`` is the object, or its name ``package.module:attribute``. ``model`` is a callable
    without arguments, or its name; it returns an untrained ``torch.nn.Module``, or a list of numpy
    arrays in the app's order. It may be left out if the app's module has only one module class, or
    if its client has ``get_parameters``. ``run_config`` overrides ``[tool.flwr.app.config]`` in
    ``app_dir``'s ``pyproject.toml``.

    The app evaluates versions on its first ``evaluate_on`` partitions, unless there is
    ``test_data``, which :meth:`fedstream.Task.metrics` measures. For more, make a subclass of
    :class:`FlowerTask`.

    Raises ConfigError if there is no such app or model.
    """
    apps.look_in({"app_dir": str(Path(app_dir).absolute())})
    module = None
    if isinstance(app, str):
        from fedstream.trainer.in_memory import declare_missing

        declare_missing()  # a user's program may import torchvision
        found, _ = import_attribute(app, what="Flower app")
        module = module_of(app)
    else:
        found = app
    if not apps.is_client_app(found):
        raise ConfigError(
            f"Flower app {app!r} is of type {type(found).__name__}: expected a flwr ClientApp"
        )
    config = apps.run_config(Path(app_dir), run_config or {})
    return _made(found, module, model, config, devices, evaluate_on, test_data)


def configured(app: ClientApp, spec: str, devices: int | None) -> Callable[..., FlowerTask]:
    """A function that makes the task of an app which ``task.name`` names, from ``task.args``."""

    def made(
        model: str | None = None,
        run_config: dict[str, Scalar] | None = None,
        evaluate_on: int = _EVALUATED,
        app_dir: str = ".",
    ) -> FlowerTask:
        config = apps.run_config(Path(app_dir), run_config or {})
        return _made(app, module_of(spec), model, config, devices, evaluate_on, None)

    return made


def _made(
    app: ClientApp,
    module: ModuleType | None,
    model: str | Callable[[], object] | None,
    config: Mapping[str, Any],
    devices: int | None,
    evaluate_on: int,
    test_data: Dataset[Any] | None,
) -> FlowerTask:
    first = (lambda: _initial(app, devices or _DEVICES, config)) if _is_legacy(app) else None
    return FlowerTask(
        app,
        model=maker(model, module, first),
        devices=devices,
        run_config=config,
        evaluate_on=evaluate_on,
        test_data=test_data,
    )


def train_config(work: Work, run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for a client, as a ``ServerApp`` would make it.

    This is the run configuration with hints: the learning rate as ``lr``, and H as
    ``local-epochs``, ``local-steps`` or ``local-seconds``. The run configuration takes precedence.
    Version t is trained in ``server-round`` t + 1, as Flower counts from 1. Keys with a hyphen are
    repeated with an underscore.
    """
    solver = work.solver
    hints: dict[str, Any] = {
        "lr": next((run_config[key] for key in RATES if key in run_config), solver.lr),
        "server-round": work.version + 1,
    }
    lengths = {"epochs": work.epochs, "steps": work.steps, "seconds": work.seconds}
    hints |= {f"local-{unit}": n for unit, n in lengths.items() if n is not None}
    if isinstance(solver, Proximal):
        hints["proximal-mu"] = solver.rho
    either = {key.replace("-", "_"): value for key, value in hints.items()}
    return {**either, **hints, **run_config}


def _rate(config: Mapping[str, Any]) -> float | None:
    """The learning rate in the client's configuration, if valid."""
    rate = config["lr"]
    return float(rate) if isinstance(rate, int | float) and 0 < rate < math.inf else None


def _is_legacy(app: ClientApp) -> bool:
    """Whether the app is a ``client_fn``, which expects records under other names."""
    return app._call is not None  # noqa: SLF001  (Flower has no public way to tell)


def _answers(app: ClientApp, kind: str) -> bool:
    """Whether the app handles this kind of message; a ``client_fn`` takes all."""
    return _is_legacy(app) or f"{kind}.default" in app._registered_funcs  # noqa: SLF001  (as above)


def _initial(app: ClientApp, devices: int, run_config: Mapping[str, Any]) -> list[Any]:
    """The first device's initial arrays. Raises ConfigError if there are none."""
    from flwr.app import ConfigRecord, RecordDict

    asked = RecordDict({"getparametersins.config": ConfigRecord({})})
    context = _context(0, devices, run_config, RecordDict())
    try:
        content = _call(app, "get_parameters", asked, context, "")
    except DataError as error:
        raise ConfigError(f"{error}: {GIVE}") from error
    arrays = content.array_records["getparametersres.parameters"]
    return [array.numpy() for name, array in arrays.items() if name != "_empty"]


def _call(app: ClientApp, kind: str, asked: RecordDict, context: Context, group: str) -> RecordDict:
    """Call the app. Raises DataError if its reply is an error, and the client's errors."""
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    # A Message needs these; the client's replies derive theirs from ours.
    TaskIdentity.task_id = TaskIdentity.run_id = context.run_id
    TaskIdentity.node_id = _SERVER
    message = Message(asked, context.node_id, kind, group_id=group)
    who = f"device {context.node_config['partition-id']}: the Flower client"
    return records.content_of(app(message, context), who)


def _context(
    device: int, devices: int, run_config: Mapping[str, Any], state: RecordDict
) -> Context:
    from flwr.app import Context

    return Context(
        run_id=1,
        node_id=_NODES + device,
        state=state,
        run_config=dict(run_config),
        node_config={"partition-id": device, "num-partitions": devices},
    )


def _copy(state: RecordDict | None) -> RecordDict:
    """A copy for the client to change, so that an error leaves the state unchanged."""
    from flwr.app import RecordDict

    return RecordDict({name: record.copy() for name, record in (state or {}).items()})


def _size(state: RecordDict) -> int:
    """Approximate bytes of a client's state; Flower's own count fails on empty values."""
    return sum(_length(value) for record in state.values() for value in record.values())


def _length(value: Any) -> int:
    match getattr(value, "data", value):  # of an array
        case bytes() | str() as text:
            return len(text)
        case list() as several:
            return sum(map(_length, several))
        case _:
            return 8
