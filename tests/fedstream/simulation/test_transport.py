"""Simulations whose updates and models go through a wire format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstream.core.errors import Undecodable
from fedstream.core.formats import format_of
from fedstream.core.layout import Model
from fedstream.core.messages import Upload
from fedstream.journal import Taken
from fedstream.journal.progress import Progress, take
from fedstream.journal.replay import Replayer
from fedstream.settings.config import read
from fedstream.simulation import Arrival, plan
from fedstream.strategies import State
from fedstream.trainer import vector
from fedstream.trainer.learner import Learner
from fedstream.trainer.solvers import Trained, Work
from fedstream.trainer.task import initial, measured
from fedstream.trainer.workspace import Start
from tests.fedstream.simulation.test_simulation import AFA, DEVICES, RULES, SCAFFOLD, Small, run

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fedstream.core.layout import Floats
    from fedstream.trainer.task import Task

FEDBUFF = (*RULES["fedbuff"], "simulation.staleness.most=3")
PARAMETERS = 18  # of Small's model


def by_hand(*sets: str, update: str, model: str) -> tuple[Model, dict[int, Floats]]:
    """What the live trainer's code and the rule compute: the model, and what devices remember."""
    settings = read(None, list(sets))
    task, rule = Small(), settings.rule.build(DEVICES)
    sent, published = format_of(update), format_of(model)
    progress = Progress(State(0, initial(task, settings.run.seed, controls=rule.controls)))
    layout, memory = progress.state.model.layout, dict[int, np.ndarray]()
    trainer = Learner(lambda: task, 1, "cpu")

    def given() -> tuple[int, Model]:
        """What devices get of the newest version."""
        decoded = Model(layout)
        version = progress.state.version
        seed = version if rule.sends == "model" else None
        published.decode(published.encoded(progress.state.model, seed=seed), decoded)
        return version, decoded

    bases = [given()]
    for event in plan(settings, DEVICES):
        assert isinstance(event, Arrival)
        version, base = bases[event.tau]
        vectors = progress.state.memory.devices
        c_i = vectors[event.device] if vectors is not None else None
        work = Work(
            device=event.device,
            task=f"task-{event.n}",
            version=version,
            seed=event.seed,
            steps=event.steps,
            epochs=event.epochs,
            solver=settings.solver,
            cancelled=lambda: False,
            control=base.controls if rule.controls else None,
            device_control=c_i,
        )
        answer, start = Model(layout), Start(version, "none", base, c_i)
        learned = trainer.train(start, work, answer, rule.sends, sent, memory.get(event.device))
        if learned.unsent is not None:
            memory[event.device] = learned.unsent
        if not sent.is_plain:
            sent.decode(learned.update.buffer, answer)
        trained = learned.trained
        upload = Upload(
            task=f"task-{event.n}",
            attempt="1",
            device=event.device,
            trainer="t",
            tau=version,
            base="none",
            layout=layout.signature,
            digest="none",
            size=1,
            samples=trained.samples,
            steps=trained.steps,
            lr=settings.solver.lr,
            sends=rule.sends,
        )
        progress = take(rule, progress, upload, answer, Model(layout)).after
        if event.makes:
            bases.append(given())
        if progress.state.version == settings.run.versions:
            return given()[1], memory
    raise AssertionError("the plan is endless")


@pytest.mark.parametrize(
    ("sets", "update", "model"),
    [
        (FEDBUFF, "int4", "f32"),
        (FEDBUFF, "topk:0.2", "int8"),
        (RULES["fedasync"], "bf16", "int8"),
        (SCAFFOLD, "int4+zstd", "bf16"),
    ],
)
def test_simulation_computes_what_trainers_and_rule_do(
    sets: tuple[str, ...], update: str, model: str
) -> None:
    about = (
        *sets,
        "run.versions=12",
        "solver.batch_size=8",
        "solver.lr=0.2",
        "simulation.batched=false",
        "updater.norm_factor=0",
        f"wire.update={update}",
        f"wire.model={model}",
    )
    found = run(*about)
    final, memory = by_hand(*about, update=update, model=model)
    assert found.model.digest() == final.digest()
    assert found.remembering == len(memory)
    assert found.model.digest() != run(*about, "wire.update=f32", "wire.model=f32").model.digest()


@pytest.mark.parametrize(
    ("rule", "update"),
    [
        ("fedasync", "bf16"),
        ("fedavg", "int8+zstd"),
        ("fedbuff", "int4"),
        ("afa-cd", "topk:0.3"),
        ("afa-cs", "bf16"),
        ("ca2fl", "int4"),
        ("fadas", "topk:0.3"),
        ("scaffold", "int8+zstd"),
    ],
)
def test_run_learns_and_its_journal_replays(rule: str, update: str, tmp_path: Path) -> None:
    sets = (*RULES[rule], f"wire.update={update}", "wire.model=int8")
    found = run(*sets, journal=tmp_path / "journal")
    assert found.state == "finished"
    assert found.last("loss") < found.measured[0].metrics["loss"]
    sizes = []
    with Replayer(tmp_path / "journal", bases=True) as replayer:
        for moment in replayer:
            assert moment.base is not None, "devices trained from what the journal says"
            assert isinstance(moment.message, Taken)
            upload = moment.message.upload
            assert (upload.format, moment.identical is not False) == (update, True)
            sizes.append(upload.size)
            assert upload.size < moment.update().layout.nbytes, "the journal has what was sent"
    assert found.update_bytes == sum(sizes)


def test_devices_trained_together_keep_their_own_feedback() -> None:
    """Rounding differs from training one by one, but by far less than what the format loses."""
    task = Small(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    coarse = (*AFA, "wire.update=int4", "run.versions=5")
    together, alone = run(*coarse, task=task), run(*coarse, "simulation.batched=false", task=task)
    exact = run(*coarse, "wire.update=f32", task=task)
    assert together.together >= 8
    assert together.remembering == alone.remembering == DEVICES

    def apart(one: Model, other: Model) -> float:
        return float(np.abs(one.floats - other.floats).max())

    assert apart(together.model, alone.model) < 0.01 * apart(together.model, exact.model)


@pytest.mark.parametrize(
    ("update", "size"),
    [
        ("f32", 4 * PARAMETERS),
        ("topk:0.1", 4 + 2 * (2 + 1)),  # two values, and a byte for each place
    ],
)
def test_bytes_of_updates_are_counted(update: str, size: int) -> None:
    found = run(*FEDBUFF, f"wire.update={update}")
    assert found.update_bytes == 12 * 4 * size


@pytest.mark.parametrize(("update", "reason"), [("int8", "wire scale"), ("bf16", "not finite")])
def test_update_that_is_not_finite_is_refused_for_its_format(
    update: str, reason: str, tmp_path: Path
) -> None:
    class Once(Small):
        """Device 2 diverges in its first task, and only then."""

        diverged = False

        def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
            trained = super().train(model, data, work)
            if work.device == 2 and not self.diverged:
                self.diverged = True
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.inf)
            return trained

    found = run(*AFA, f"wire.update={update}", task=Once(), journal=tmp_path / "journal")
    assert dict(found.refused) == {reason: 1}
    assert any(u.device == 2 for made in found.versions for u in made.updates)
    with Replayer(tmp_path / "journal") as replayer:
        assert sum(moment.identical is True for moment in replayer) == 12


def test_metrics_are_of_the_model_that_is_published() -> None:
    seen: list[Model] = []
    about = ("wire.model=int8", "run.versions=3", "simulation.evaluate_every=1")
    found = run(*about, on_version=lambda made, model: seen.append(model.copy()))
    task, how = Small(), format_of("int8")
    for made, model in zip(found.versions, seen, strict=True):
        decoded = Model(model.layout)
        how.decode(how.encoded(model, seed=made.version), decoded)
        assert made.metrics["loss"] == pytest.approx(_loss(task, decoded), rel=1e-6)
        assert made.version == 0 or made.metrics["loss"] != pytest.approx(_loss(task, model), 1e-6)


def _loss(task: Task, model: Model) -> float:
    module = task.model()
    vector.load(model, module)
    data = task.test_data()
    assert data is not None
    return measured(task, module, data)["loss"]


def test_version_that_is_not_finite_cannot_be_published() -> None:
    def unfit() -> nn.Module:
        module = nn.Linear(5, 3)
        nn.init.constant_(module.weight, torch.nan)
        return module

    with pytest.raises(Undecodable, match="scale"):
        run("wire.model=int8", task=Small(unfit))
