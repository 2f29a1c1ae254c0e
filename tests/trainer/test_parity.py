"""A task ends at the bits of a plain loop of torch, for many kinds of model and optimizer.

Each task is also interrupted after every step, sent as bytes, and resumed by another module.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from fedstream.settings.config import read as settings_of
from fedstream.trainer.data import seeded
from fedstream.trainer.solvers import Cancelled, Solver
from fedstream.trainer.task import Task
from fedstream.trainer.workspace import Workspace
from tests.trainer.stepping import work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

STEPS, BATCH, SEED, CLASSES, WORDS = 5, 6, 5, 3, 12

OPTIMIZERS: dict[str, tuple[Callable[[Iterator[nn.Parameter]], Optimizer], Sequence[str]]] = {
    "sgd": (lambda x: torch.optim.SGD(x, 0.1), ("lr=0.1",)),
    "nesterov": (
        lambda x: torch.optim.SGD(x, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ("lr=0.1", "momentum=0.9", "weight_decay=0.01", "nesterov=true"),
    ),
    "adam": (lambda x: torch.optim.Adam(x, 0.01, amsgrad=True), ("lr=0.01", "amsgrad=true")),
    "adamw": (lambda x: torch.optim.AdamW(x, betas=(0.8, 0.99)), ("betas=[0.8, 0.99]",)),
    "adagrad": (lambda x: torch.optim.Adagrad(x, 0.05), ("lr=0.05",)),
    "rmsprop": (
        lambda x: torch.optim.RMSprop(x, momentum=0.9, centered=True),
        ("momentum=0.9", "centered=true"),
    ),
}


def solver_of(name: str, *more: str) -> Solver:
    kind = "sgd" if name == "nesterov" else name
    keys = (f"kind={kind}", f"batch_size={BATCH}", *OPTIMIZERS[name][1], *more)
    return settings_of(None, [f"solver.{key}" for key in keys]).solver


# Kinds of model. All take rows of 8 numbers, or of 8 words.


class Own(nn.Module):
    """Layers by name, and a function of them and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def tied() -> nn.Module:
    model = Own(
        lambda own, x: own.scores(own.decode(own.embed(x).mean(1))),
        embed=nn.Embedding(WORDS, 6),
        decode=nn.Linear(6, WORDS),
        scores=nn.Linear(WORDS, CLASSES),
    )
    model.decode.weight = model.embed.weight  # type: ignore[union-attr]
    return model


def frozen() -> nn.Module:
    base = nn.Sequential(nn.Linear(8, 6), nn.Tanh()).requires_grad_(requires_grad=False)
    return nn.Sequential(base, nn.Linear(6, CLASSES))


def experts(own: Any, x: Tensor) -> Tensor:
    """Each row goes to one of four experts; those of no row get no gradient."""
    chosen = own.gate(x).topk(1).indices[:, 0] // 2
    out = x.new_zeros(len(x), CLASSES)
    for n, expert in enumerate(own.experts):
        rows = (chosen == n).nonzero()[:, 0]
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]))
    scores: Tensor = out + own.gate(x).mean()
    return scores


def noisy(own: Any, x: Tensor) -> Tensor:
    """Draws from all three global generators."""
    scale = random.random() + np.random.rand()
    scores: Tensor = own.layer(x * scale + torch.randn_like(x))
    return scores


class Doubling(torch.autograd.Function):
    """An own function with a gradient of its own."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return 2.5 * gradients[0]


def hooked() -> nn.Module:
    model = nn.Linear(8, CLASSES)
    model.weight.register_hook(lambda g: g * 0.5)  # type: ignore[no-untyped-call]
    return model


def counting(own: Any, x: Tensor) -> Tensor:
    own.layer.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    scores: Tensor = own.layer(x - own.layer.mean)
    return scores


def with_buffer() -> nn.Module:
    layer = nn.Linear(8, CLASSES)
    layer.register_buffer("mean", torch.zeros(8))
    return Own(counting, layer=layer)


def of_list(own: Any, x: Tensor) -> Tensor:
    for weight in own.weights:
        x = torch.tanh(x @ weight)
    return x[:, :CLASSES]


def image(x: Tensor) -> Tensor:
    return x.view(-1, 2, 2, 2)


def words(own: Any, x: Tensor) -> Tensor:
    scores: Tensor = own.last(own.recurrent(own.embed(x))[0][:, -1])
    return scores


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Own(
        words,
        embed=nn.Embedding(WORDS, 6),
        recurrent=kind(6, 6, batch_first=True),
        last=nn.Linear(6, CLASSES),
    )


def convolution(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Own(
        lambda own, x: own.last(own.between(own.first(image(x))).flatten(1)),
        first=nn.Conv2d(2, 4, 2, padding=1),
        between=nn.Sequential(*(one() for one in between)),
        last=nn.Linear(36, CLASSES),
    )


def perceptron(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(8, 6), *(one() for one in between), nn.Tanh(), nn.Linear(6, CLASSES)
    )


def normed(layer: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer(nn.Linear(8, 6)), nn.Tanh(), nn.Linear(6, CLASSES))


def checkpointed(*, reentrant: bool) -> Callable[[], nn.Module]:
    def forward(own: Any, x: Tensor) -> Tensor:
        x = own.first(x)
        x = checkpoint(own.middle, x, use_reentrant=reentrant)
        scores: Tensor = own.last(x)
        return scores

    return lambda: Own(
        forward,
        first=nn.Linear(8, 6),
        middle=nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 6), nn.ReLU()),
        last=nn.Linear(6, CLASSES),
    )


def mixed(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Own(
        lambda own, x: own.last(own.first(x.to(dtype)).float()),
        first=nn.Linear(8, 6, dtype=dtype),
        last=nn.Linear(6, CLASSES),
    )


def bags(*, sparse: bool) -> Callable[[], nn.Module]:
    return lambda: Own(
        lambda own, x: own.last(own.bag(x)),
        bag=nn.EmbeddingBag(WORDS, 6, sparse=sparse),
        last=nn.Linear(6, CLASSES),
    )


NUMBERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, CLASSES),
    "perceptron": perceptron(),
    "unused head": lambda: Own(
        lambda own, x: own.used(x), used=nn.Linear(8, CLASSES), unused=nn.Linear(8, 2)
    ),
    "shared layer": lambda: Own(
        lambda own, x: own.last(own.twice(torch.tanh(own.twice(x)))),
        twice=nn.Linear(8, 8),
        last=nn.Linear(8, CLASSES),
    ),
    "frozen layers": frozen,
    "dropout": perceptron(lambda: nn.Dropout(0.5)),
    "alpha dropout": perceptron(lambda: nn.AlphaDropout(0.2)),
    "batch norm": perceptron(lambda: nn.BatchNorm1d(6)),
    "cumulative batch norm": perceptron(lambda: nn.BatchNorm1d(6, momentum=None)),
    "layer norm": perceptron(lambda: nn.LayerNorm(6)),
    "own slopes": perceptron(nn.PReLU),
    "weight norm": normed(parametrizations.weight_norm),
    "spectral norm": normed(parametrizations.spectral_norm),
    "orthogonal weights": normed(parametrizations.orthogonal),
    "checkpoint": checkpointed(reentrant=False),
    "reentrant checkpoint": checkpointed(reentrant=True),
    "convolution": convolution(nn.ReLU),
    "convolution with batch norm": convolution(lambda: nn.BatchNorm2d(4), nn.ReLU),
    "group norm": convolution(lambda: nn.GroupNorm(2, 4)),
    "instance norm": convolution(lambda: nn.InstanceNorm2d(4, affine=True)),
    "dropped channels": convolution(lambda: nn.Dropout2d(0.3)),
    "transposed convolution": convolution(lambda: nn.ConvTranspose2d(4, 4, 3, padding=1)),
    "bilinear": lambda: Own(lambda own, x: own.both(x, x), both=nn.Bilinear(8, 8, CLASSES)),
    "mixture of experts": lambda: Own(
        experts,
        gate=nn.Linear(8, 8),
        experts=nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4)),
    ),
    "own function": lambda: Own(
        lambda own, x: Doubling.apply(own.layer(x)),  # type: ignore[no-untyped-call]
        layer=nn.Linear(8, CLASSES),
    ),
    "gradient hook": hooked,
    "own buffer": with_buffer,
    "list of parameters": lambda: Own(
        of_list, weights=nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))
    ),
    "random numbers of all kinds": lambda: Own(noisy, layer=nn.Linear(8, CLASSES)),
    "bfloat16 layer": mixed(torch.bfloat16),
    "float64 layer": mixed(torch.float64),
}
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": tied,
    "bag of words": bags(sparse=False),
    "sparse embedding": bags(sparse=True),
    "rnn": recurrent(nn.RNN),
    "gru": recurrent(nn.GRU),
    "lstm": recurrent(nn.LSTM),
    "transformer": lambda: Own(
        lambda own, x: own.last(own.layer(own.embed(x)).mean(1)),
        embed=nn.Embedding(WORDS, 6),
        layer=nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        last=nn.Linear(6, CLASSES),
    ),
}
NOT_RESUMED = {"float64 layer"}  # a layout does not carry float64's extra digits
OF_SPARSE = {"sgd", "adagrad"}  # torch's other optimizers refuse sparse gradients


class Kind(Task):
    """A task with a kind of model."""

    def __init__(self, name: str) -> None:
        self.make = NUMBERS.get(name) or TEXTS[name]
        draws = torch.Generator().manual_seed(1)
        x = torch.randn(20, 8, generator=draws)
        if name in TEXTS:
            x = torch.randint(WORDS, (20, 8), generator=draws)
        self.data = TensorDataset(x, torch.randint(CLASSES, (20,), generator=draws))

    def model(self) -> nn.Module:
        with seeded(0):
            return self.make()

    def device_data(self, device: int) -> TensorDataset:
        return self.data


def bits(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def batches(number: int) -> list[Tensor]:
    """The rows of the minibatches of shuffled passes."""
    order = torch.Generator().manual_seed(SEED)
    found: list[Tensor] = []
    while len(found) < number:
        found += torch.split(torch.randperm(20, generator=order), BATCH)
    return found[:number]


def plain(task: Kind, optimizer_of: Callable[[Iterator[nn.Parameter]], Optimizer]) -> list[Tensor]:
    """The loop that a user would write."""
    model = task.model().train()
    optimizer = optimizer_of(x for x in model.parameters() if x.requires_grad)
    order = torch.Generator().manual_seed(SEED)
    rows = [
        one for _ in range(2) for one in torch.split(torch.randperm(20, generator=order), BATCH)
    ]
    with seeded(SEED):
        for batch in rows[:STEPS]:
            optimizer.zero_grad()
            x, y = task.data[batch]
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return bits(model)


def by_task(task: Kind, solver: Solver, **more: Any) -> list[Tensor]:
    model = task.model()
    task.train(model, task.data, replace(work_of(solver, steps=STEPS), **more))
    return bits(model)


def interrupted(task: Kind, solver: Solver, **more: Any) -> Workspace | None:
    """The workspace after one step more, once it has been bytes."""
    asked = count()
    with pytest.raises(Cancelled) as stopped:
        by_task(task, solver, cancelled=lambda: next(asked) == 1, **more)
    saved = stopped.value.workspace
    return None if saved is None else Workspace.decode(saved.encode())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of each sparse gradient
@pytest.mark.parametrize("kind", [*NUMBERS, *TEXTS])
def test_same_bits_as_a_plain_loop(kind: str) -> None:
    task = Kind(kind)
    for name, (optimizer_of, _) in OPTIMIZERS.items():
        solver = solver_of(name)
        if kind == "sparse embedding" and name not in OF_SPARSE:
            with pytest.raises(RuntimeError, match="sparse"):
                by_task(task, solver)
            continue
        expected = plain(task, optimizer_of)
        found = by_task(task, solver)
        assert all(map(torch.equal, found, expected)), name
        saved: Workspace | None = None
        for _ in range(STEPS - 1 if kind not in NOT_RESUMED else 0):
            saved = interrupted(task, solver, resume=saved)
            found = by_task(task, solver, resume=saved)
            assert all(map(torch.equal, found, expected)), name


def test_same_bits_of_a_compiled_model() -> None:
    class Compiled(Kind):
        def model(self) -> nn.Module:
            compiled = torch.compile(super().model(), backend="aot_eager")
            assert isinstance(compiled, nn.Module)
            return compiled

    task = Compiled("perceptron")
    expected = plain(task, OPTIMIZERS["adamw"][0])
    assert all(map(torch.equal, by_task(task, solver_of("adamw")), expected))


class Two(Kind):
    """Sparse embeddings have an optimizer of their own."""

    def optimizers(self, model: nn.Module, solver: Solver) -> list[Optimizer]:
        bag, *last = model.parameters()
        return [torch.optim.SparseAdam([bag], 0.05), solver.optimizer([{"params": last}])]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_same_bits_of_two_optimizers() -> None:
    task, solver = Two("sparse embedding"), solver_of("adamw")
    model = task.model()
    bag, *last = model.parameters()
    both = [torch.optim.SparseAdam([bag], 0.05), OPTIMIZERS["adamw"][0](iter(last))]
    for rows in batches(STEPS):
        model.zero_grad()
        x, y = task.data[rows]
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        for one in both:
            one.step()
    saved = interrupted(task, solver, resume=interrupted(task, solver))
    assert saved is not None
    for resume in (None, saved):
        assert all(map(torch.equal, by_task(task, solver, resume=resume), bits(model)))


def test_same_bits_with_all_options() -> None:
    """Groups, a schedule, accumulated gradients, clipping, bfloat16 and channels last."""
    task = Kind("convolution with batch norm")
    more = (
        "groups=[{parameters=['first.*'], lr=0.001, weight_decay=0.5}]",
        "lr_scheduler={kind='CosineAnnealingLR', T_max=4}",
        "accumulate=2",
        "clip_norm=0.1",
        "precision=bf16",
        "channels_last=true",
    )
    solver = solver_of("adamw", *more)
    model = task.model().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    first = dict(model.first.named_parameters())
    rest = [x for name, x in model.named_parameters() if not name.startswith("first.")]
    groups: list[dict[str, Any]]
    groups = [{"params": first.values(), "lr": 0.001, "weight_decay": 0.5}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    rows = iter(batches(2 * STEPS))
    rates = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for batch in (next(rows), next(rows)):
            x, y = task.data[batch]
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x), y) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        rates.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        scheduler.step()
    expected = bits(model)
    assert all(map(torch.equal, by_task(task, solver), expected))
    saved = interrupted(task, solver, resume=interrupted(task, solver))
    assert saved is not None
    assert all(map(torch.equal, by_task(task, solver, resume=saved), expected))
    result = task.train(task.model(), task.data, work_of(solver, steps=STEPS, resume=saved))
    assert result.lr == pytest.approx(sum(rates) / STEPS)  # by which strategies divide


SCHEDULES = (
    "kind='StepLR', step_size=2",
    "kind='MultiStepLR', milestones=[1, 3]",
    "kind='LinearLR', total_iters=3",
    "kind='ExponentialLR', gamma=0.5",
    "kind='CosineAnnealingWarmRestarts', T_0=2",
    "kind='OneCycleLR', max_lr=0.2, total_steps=20",
    "kind='CyclicLR', base_lr=0.01, max_lr=0.1, step_size_up=2",
    "kind='PolynomialLR', total_iters=4",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(schedule: str) -> None:
    task = Kind("linear")
    solver = solver_of("nesterov", f"lr_scheduler={{{schedule}}}")
    expected = by_task(task, solver)
    assert not all(map(torch.equal, by_task(task, solver_of("nesterov")), expected))
    saved: Workspace | None = None
    for _ in range(STEPS - 1):
        saved = interrupted(task, solver, resume=saved)
        assert all(map(torch.equal, by_task(task, solver, resume=saved), expected))


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "Adafactor"])
@pytest.mark.parametrize("kind", ["perceptron", "bfloat16 layer"])
def test_same_bits_of_an_optimizer_by_its_class(name: str, kind: str) -> None:
    task = Kind(kind)
    keys = (f"kind=torch.optim:{name}", "lr=0.01", f"batch_size={BATCH}")
    solver = settings_of(None, [f"solver.{key}" for key in keys]).solver
    expected = plain(task, lambda x: getattr(torch.optim, name)(x, lr=0.01))
    assert all(map(torch.equal, by_task(task, solver), expected))
    saved = interrupted(task, solver, resume=interrupted(task, solver))
    assert saved is not None
    assert all(map(torch.equal, by_task(task, solver, resume=saved), expected))


def test_a_task_leaves_its_module_as_it_was() -> None:
    """The next task of the same trainer may have another solver."""
    task, usual = Kind("convolution with batch norm"), solver_of("sgd")
    expected = by_task(task, usual)
    module, first = task.model(), task.model().state_dict()
    task.train(module, task.data, work_of(solver_of("sgd", "channels_last=true"), steps=STEPS))
    assert all(x.is_contiguous() and x.grad is None for x in module.parameters())
    module.load_state_dict(first)
    task.train(module, task.data, work_of(usual, steps=STEPS))
    assert all(map(torch.equal, bits(module), expected))
