"""An unchanged Flower ClientApp as a task: what it is asked, and what becomes of its answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstream.core.errors import ConfigError, DataError
from fedstream.core.layout import Model
from fedstream.flower import FlowerTask, task
from fedstream.flower import client as client_module
from fedstream.flower.apps import find, is_client_app
from fedstream.settings.config import Settings, read
from fedstream.settings.services import loaded, task_of
from fedstream.trainer.on_devices import sums_of
from fedstream.trainer.solvers import Cancelled, Sgd, Work
from fedstream.trainer.task import initial
from fedstream.trainer.vector import layout_of
from fedstream.trainer.vector import read as read_vector

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
Handler = Callable[[Message, Any], Message]


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())


def work(device: int = 0, *, seed: int = 7, version: int = 4, stopped: bool = False) -> Work:
    return Work(
        device=device,
        task="t",
        version=version,
        seed=seed,
        steps=5,
        epochs=None,
        solver=Sgd(lr=0.25),
        cancelled=lambda: stopped,
    )


class Small(nn.Module):
    """Two weights, and a batch norm's buffers: floats and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.norm = nn.BatchNorm1d(1)


def app_of(train: Handler | None = None, evaluate: Handler | None = None) -> ClientApp:
    app = ClientApp()
    if train is not None:
        app.train()(train)
    if evaluate is not None:
        app.evaluate()(evaluate)
    return app


def replying(change: Callable[[dict[str, Any]], object]) -> ClientApp:
    """An app that returns what it gets, and 3 examples, after a change of the reply's records."""

    def train(message: Message, _: Any) -> Message:
        records = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 3, "train_loss": 0.5}),
        }
        change(records)
        return Message(RecordDict(records), reply_to=message)

    return app_of(train)


def trained(app: ClientApp, piece: Work | None = None) -> tuple[nn.Module, Any]:
    subject = task(app, model=Small, devices=4)
    module = subject.model()
    return module, subject.train(module, subject.device_data(0), piece or work())


def test_a_client_is_asked_as_flower_asks_it() -> None:
    seen: list[tuple[Message, Any]] = []

    def train(message: Message, context: Any) -> Message:
        seen.append((message, context))
        numbers = MetricRecord({"num-examples": 3, "train_loss": 0.5})
        content = {"arrays": message.content["arrays"], "metrics": numbers}
        return Message(RecordDict(content), reply_to=message)

    subject = task(app_of(train), model=Small, devices=4, run_config={"batch-size": 32})
    module = subject.model()
    result = subject.train(module, subject.device_data(2), work(2))
    [(message, context)] = seen
    assert message.metadata.message_type == "train"
    assert message.metadata.group_id == "5"
    assert context.node_config == {"partition-id": 2, "num-partitions": 4}
    assert context.run_config == {"batch-size": 32}
    assert list(message.content["arrays"]) == list(module.state_dict())
    config = message.content["config"]
    assert (config["lr"], config["server-round"], config["local-steps"]) == (0.25, 5, 5)
    assert config["batch-size"] == 32
    assert (result.samples, result.steps, result.loss, result.lr) == (3, 0, 0.5, 0.25)
    assert module.state_dict()["w"].tolist() == [1.0, 2.0]


def test_the_run_config_decides_the_learning_rate() -> None:
    config = {"learning-rate": 0.1, "local-epochs": 2}
    sent = client_module.train_config(work(), config)
    assert (sent["lr"], sent["local-epochs"]) == (0.1, 2)
    assert client_module.train_config(work(), {"lr": 0.2})["lr"] == 0.2
    assert client_module.train_config(work(), {})["lr"] == 0.25


def test_reply_becomes_the_model() -> None:
    def change(records: dict[str, Any]) -> None:
        arrays = dict(records["arrays"].items())
        arrays["w"] = Array(np.array([5.0, 6.0]))  # float64 is rounded
        arrays["norm.num_batches_tracked"] = Array(np.array(9))
        records["arrays"] = ArrayRecord(dict(reversed(arrays.items())))  # the order is no matter

    module, _ = trained(replying(change))
    assert module.state_dict()["w"].tolist() == [5.0, 6.0]
    assert module.state_dict()["norm.num_batches_tracked"] == 9


def put(name: str, values: Any) -> Callable[[dict[str, Any]], None]:
    def change(records: dict[str, Any]) -> None:
        arrays = dict(records["arrays"].items())
        arrays[name] = Array(np.array(values))
        records["arrays"] = ArrayRecord(arrays)

    return change


def numbers(**given: Any) -> Callable[[dict[str, Any]], None]:
    def change(records: dict[str, Any]) -> None:
        named = {name.replace("_", "-"): value for name, value in given.items()}
        records["metrics"] = MetricRecord(named)

    return change


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(records: dict[str, Any]) -> None:
        arrays = {key: value for key, value in records["arrays"].items() if key != name}
        records["arrays"] = ArrayRecord(arrays)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (numbers(), r"device 0: the Flower client did not say on how many examples"),
        (numbers(num_examples=0), r"reported num-examples = 0: expected a whole number above 0"),
        (numbers(num_examples=float("nan")), r"num-examples = nan"),
        (put("w", [1.0]), r"array 'w' has shape \(1,\), in the model it has \(2,\)"),
        (put("w", [1, 2]), r"array 'w' is of dtype int64, in the model it is of torch\.float32"),
        (put("v", [1.0]), r"returned an array 'v', which the model lacks"),
        (without("w"), r"returned no array 'w', which the model has"),
        (lambda r: r.pop("arrays"), r"returned 0 array records: expected one, named 'arrays'"),
    ],
)
def test_useless_reply_is_refused_and_changes_nothing(
    change: Callable[[dict[str, Any]], None], said: str
) -> None:
    subject = task(replying(change), model=Small)
    module = subject.model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(DataError, match=said):
        subject.train(module, subject.device_data(0), work())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_reply_that_is_an_error_or_no_message_is_refused() -> None:
    failing = app_of(lambda message, _: Message(Error(0, "no data today"), reply_to=message))
    with pytest.raises(DataError, match=r"answered with error 0: no data today"):
        trained(failing)
    with pytest.raises(DataError, match=r"returned dict: expected a flwr\.app\.Message"):
        trained(app_of(lambda *_: {}))


def test_cancelled_before_the_client_is_asked() -> None:
    def train(*_: Any) -> Message:
        raise AssertionError("asked")

    with pytest.raises(Cancelled):
        trained(app_of(train), work(stopped=True))


# what a client keeps


def counting(fails_at: int = 0, of_bytes: int = 0) -> ClientApp:
    """An app that counts its calls in its state, and reports them as its loss."""

    def train(message: Message, context: Any) -> Message:
        before = context.state["calls"]["n"] if "calls" in context.state else 0
        context.state["calls"] = MetricRecord({"n": before + 1})
        context.state["more"] = ConfigRecord({"bytes": bytes(of_bytes)})
        if fails_at and before + 1 == fails_at:
            raise ValueError("now")
        numbers = MetricRecord({"num-examples": 1, "train_loss": before + 1})
        content = {"arrays": message.content["arrays"], "metrics": numbers}
        return Message(RecordDict(content), reply_to=message)

    return app_of(train)


def losses(subject: FlowerTask, *devices: int) -> list[float | None]:
    module = subject.model()
    return [subject.train(module, subject.device_data(d), work(d)).loss for d in devices]


def test_each_device_keeps_its_own_state() -> None:
    assert losses(task(counting(), model=Small), 0, 1, 0, 0, 1) == [1, 1, 2, 3, 2]


def test_state_stays_as_it_was_if_the_client_raises() -> None:
    subject = task(counting(fails_at=2), model=Small)
    assert losses(subject, 0) == [1]
    for _ in range(2):  # the second failure shows that the first left nothing
        with pytest.raises(ValueError, match="now"):
            losses(subject, 0)


def test_state_of_the_device_trained_longest_ago_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "_STATE_BYTES", 250)
    subject = task(counting(of_bytes=90), model=Small)
    assert losses(subject, 0, 1, 2, 1, 2, 0) == [1, 1, 1, 2, 2, 1]


# determinism


def test_same_task_gives_the_same_update_and_leaves_the_generators_alone() -> None:
    def train(message: Message, _: Any) -> Message:
        drawn = torch.rand(1).item() + np.random.rand() + random.random()
        arrays = dict(message.content["arrays"].items())
        arrays["w"] = Array(np.array([drawn, 0.0]))
        content = {"arrays": ArrayRecord(arrays), "m": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    def drawn(seed: int) -> float:
        module, _ = trained(app_of(train), work(seed=seed))
        return float(module.state_dict()["w"][0])

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = drawn(7)
    assert first == drawn(7) != drawn(8)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


# evaluation


def test_metrics_are_means_weighted_by_examples() -> None:
    def evaluate(message: Message, context: Any) -> Message:
        device = context.node_config["partition-id"]
        found = {"eval_acc": 0.5 * device, "eval_loss": 2.0 * device}
        numbers = MetricRecord(found | {"num-examples": 1 + 2 * device})
        return Message(RecordDict({"metrics": numbers}), reply_to=message)

    subject = task(app_of(lambda *_: None, evaluate), model=Small, devices=5, evaluate_on=2)
    data = subject.test_data()
    assert data is not None
    assert subject.metrics(subject.model(), data) == {"accuracy": 0.375, "loss": 1.5}


def test_device_is_measured_by_its_client_weighted_by_its_examples() -> None:
    """Also if the evaluator has test data of its own."""

    def evaluate(message: Message, context: Any) -> Message:
        numbers = MetricRecord(
            {"eval_acc": 0.25, "num-examples": context.node_config["partition-id"]}
        )
        return Message(RecordDict({"metrics": numbers}), reply_to=message)

    subject = task(
        app_of(lambda *_: None, evaluate),
        model=Small,
        devices=5,
        test_data=client_module.Partitions(range(0)),
    )
    data = subject.device_test_data(4)
    assert data is not None
    assert sums_of(subject, subject.model(), data)[1] == {"accuracy": (1.0, 4.0)}


def test_app_that_does_not_evaluate_is_not_evaluated() -> None:
    subject = task(replying(len), model=Small)
    assert subject.test_data() is None
    assert subject.device_test_data(0) is None


def test_app_that_does_not_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no train function: register one with @app\.train"):
        task(ClientApp(), model=Small)


# version 0


class Lists(NumPyClient):  # type: ignore[misc]  # flwr is not where mypy runs
    """A client without torch: two arrays, in an order of its own."""

    def get_parameters(self, config: Any) -> list[Any]:
        return [np.array([[1.0, 2.0]], np.float32), np.array([3.0], np.float32)]

    def fit(self, parameters: list[Any], config: Any) -> Any:
        return [array + 1 for array in parameters], 4, {"loss": 0.25}


def test_client_without_torch_names_its_own_model() -> None:
    subject = task(ClientApp(lambda _: Lists().to_client()))
    module = subject.model()
    assert [value.tolist() for value in module.state_dict().values()] == [[[1.0, 2.0]], [3.0]]
    result = subject.train(module, subject.device_data(0), work())
    assert [value.tolist() for value in module.state_dict().values()] == [[[2.0, 3.0]], [4.0]]
    assert (result.samples, result.loss) == (4, 0.25)


def test_numpy_client_with_another_number_of_arrays_is_refused() -> None:
    subject = task(ClientApp(lambda _: Lists().to_client()), model=Small)
    module = subject.model()

    class Less(Lists):
        def fit(self, parameters: list[Any], config: Any) -> Any:
            return parameters[:1], 4, {}

    subject = task(ClientApp(lambda _: Less().to_client()), model=Small)
    with pytest.raises(DataError, match=r"returned 1 arrays, the model has 6"):
        subject.train(module, subject.device_data(0), work())


def test_unknown_model_is_asked_for() -> None:
    class Silent(NumPyClient):  # type: ignore[misc]  # as above
        pass

    with pytest.raises(ConfigError, match=r"does not implement `get_parameters`: name .*--model"):
        task(ClientApp(lambda _: Silent().to_client())).model()
    with pytest.raises(ConfigError, match=r"has no torch model: name the app's model with --model"):
        task(replying(len))


def test_bfloat16_travels_as_float32() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.5], dtype=torch.bfloat16))

    seen = []

    def change(records: dict[str, Any]) -> None:
        seen.append(records["arrays"]["w"].dtype)

    subject = task(replying(change), model=Half)
    module = subject.model()
    subject.train(module, subject.device_data(0), work())
    assert seen == ["float32"]
    assert module.state_dict()["w"].dtype == torch.bfloat16


# the example, whose two clients do the same


def configured(name: str, *sets: str) -> Settings:
    return read(None, (f"task.name={name}", f"task.args.app_dir={EXAMPLE}", *sets))


@pytest.fixture
def fresh_example() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("digits_app")]:
        del sys.modules[name]


@pytest.mark.usefixtures("fresh_example")
def test_message_api_and_numpy_client_train_to_the_same_bits() -> None:
    digests = set()
    for name in ("client_app", "numpy_client"):
        subject = loaded(configured(f"digits_app.{name}:app").task)
        assert subject.devices == 10
        module, model = subject.model(), initial(subject, 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = subject.model()
        result = subject.train(module, subject.device_data(3), work(3))
        into = Model(layout_of(module))
        read_vector(module, into)
        assert into.layout == model.layout
        assert result.samples == 144
        assert result.lr == 0.1  # of the app's run configuration, not the solver's
        digests.add(into.digest())
        data = subject.test_data()
        assert data is not None
        assert subject.metrics(module, data)["accuracy"] > 0.3  # of one device's training
    assert len(digests) == 1
    assert digests != {model.digest()}


@pytest.mark.usefixtures("fresh_example")
def test_a_run_has_as_many_partitions_as_devices_unless_a_number_is_given() -> None:
    name = "digits_app.client_app:app"
    for sets, expected in (((), 6), (("task.devices=5",), 5)):
        subject = loaded(configured(name, *sets).task)
        subject.joined(6)
        assert subject.devices == expected


@pytest.mark.usefixtures("fresh_example")
def test_strategy_that_needs_exact_steps_refuses_the_app() -> None:
    settings = configured("digits_app.client_app:app", "strategy.name=afa-cd")
    with pytest.raises(ConfigError, match=r"strategy.name = 'afa-cd' .* choose fedasync"):
        task_of(settings)


@pytest.mark.usefixtures("fresh_example")
def test_wrong_keys_are_named() -> None:
    name = "digits_app.client_app:app"
    with pytest.raises(ConfigError, match=r"task\.args\.run_config\.epochs: .* it has local-"):
        loaded(configured(name, "task.args.run_config.epochs=3").task)
    with pytest.raises(ConfigError, match=r"task\.args\.models.*did you mean task\.args\.model"):
        loaded(configured(name, "task.args.models=x").task)
    with pytest.raises(ConfigError, match=r"model 'Net': expected package\.module:Name"):
        loaded(configured(name, "task.args.model=Net").task)
    with pytest.raises(DataError, match=r"there is no partition 10"):
        loaded(configured(name).task).device_data(10)


def test_find_reads_the_apps_project(tmp_path: Path) -> None:
    assert find(str(EXAMPLE)) == ("digits_app.client_app:app", str(EXAMPLE))
    assert find("my_app.client:app") == ("my_app.client:app", str(Path.cwd()))
    with pytest.raises(ConfigError, match=r"there is no file .*pyproject\.toml"):
        find(str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(ConfigError, match=r"has no clientapp in \[tool\.flwr\.app\.components\]"):
        find(str(tmp_path))


def test_tables_of_the_run_config_become_keys_with_dots(tmp_path: Path) -> None:
    text = "[tool.flwr.app.config]\na = 1\n[tool.flwr.app.config.b]\nc = 'x'\n"
    (tmp_path / "pyproject.toml").write_text(text)
    app = replying(len)
    assert is_client_app(app)
    seen = task(app, model=Small, app_dir=tmp_path, run_config={"b.c": "y"})
    assert seen._run_config == {"a": 1, "b.c": "y"}
