"""Experiments on a tiny task: what is run, kept, gone on with, shown, and refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import nn
from torch.utils.data import TensorDataset

from experiments import __main__ as command
from experiments import reproduction, rules, running
from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    Panel,
    Picture,
    Results,
    Row,
    SweepPanel,
    above,
    best_elsewhere,
    catalogue,
    no_claims,
    settings_of,
    within,
)
from experiments.running import PlannedRun, Store, job_of, jobs_of, run, thinned
from experiments.showing import DIFFERENCES, TABLE, show, table
from fedstream.core.errors import ConfigError
from fedstream.simulation import VersionMade, engine
from fedstream.simulation.arrivals import Job
from fedstream.simulation.training import Training
from fedstream.trainer.solvers import Trained

TASK = """
import torch
from fedstream import Task

class Tiny(Task):
    devices = 4

    def model(self):
        return torch.nn.Linear(3, 2)

    def device_data(self, device):
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(device))
        return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self):
        return self.device_data(99)
"""


def claims(results: Results) -> list[JudgedClaim]:
    fast = results.values("fast")
    return [
        JudgedClaim("Fast is fast.", [fast], f"It reached {fast.mean():.4f}."),
        JudgedClaim("It lasts.", [], "Too short."),
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Two cells, two repeats."""
    task = tmp_path_factory.mktemp("task") / "a_tiny_task.py"
    task.write_text(TASK)
    return Experiment(
        name="tiny",
        title="Tiny",
        source="A paper, table 1",
        base={
            "task.name": f"{task}:Tiny",
            "run.versions": 20,
            "solver.batch_size": 5,
            "strategy.name": "fedasync",
            "strategy.alpha": 0.5,
            "strategy.alpha_schedule.kind": "step",
            "strategy.alpha_schedule.at": 8,
            "simulation.evaluate_every": 5,
            "simulation.threads": 1,
        },
        cells=(Cell("fast", {"solver.lr": 0.5}, paper=0.9), Cell("slow", {"solver.lr": 0.1})),
        repeats=2,
        tolerance=0.5,
        points=5,
        pictures=(
            Picture(
                "curves.png",
                "Tiny",
                (
                    Panel("Accuracy", {"fast": "fast", "slow": "slow"}, x="gradients"),
                    Panel("Loss", {"fast": "fast"}, y="training_loss", log=True),
                    SweepPanel("Rate", {"all": {0.1: "slow", 0.5: "fast"}}),
                ),
            ),
        ),
        claims=claims,
        notes=("A note.",),
    )


# what is run


def test_changing_the_kind_drops_the_bases_keys(tiny: Experiment) -> None:
    cell = Cell("other", {"strategy.name": "fedavg", "strategy.clients_per_round": 2})
    keys = tiny.sets(cell, 0, 1.0)
    assert "strategy.alpha" not in keys
    assert "strategy.alpha_schedule.at" not in keys
    assert settings_of(keys).strategy.name == "fedavg"


def test_scale_divides_versions_and_keeps_the_decays_position(tiny: Experiment) -> None:
    keys = tiny.sets(tiny.cells[0], 0, 4.0)
    assert keys["run.versions"] == 5
    assert keys["strategy.alpha_schedule.at"] == 2
    assert keys["simulation.evaluate_every"] == 1
    assert keys["solver.lr"] == 0.5


def test_every_experiment_has_a_valid_configuration() -> None:
    for experiment in catalogue().values():
        if experiment.cells:
            running.check(experiment)


# what is kept


def test_run_writes_rows_curves_table_and_pictures(tiny: Experiment, tmp_path: Path) -> None:
    folder, said = tmp_path / "out", list[str]()
    results = run(tiny, folder, command="reproduce tiny", say=said.append)
    show(tiny, results, folder)
    assert [len(results.of("fast")), len(results.of("slow"))] == [2, 2]
    row = results.of("fast")[0]
    assert (row.state, row.versions, row.updates) == ("finished", 20, 20)
    assert row.gradients == 20 * 5
    x, mean, deviation = results.curve("fast", "gradients", "accuracy")
    assert x.tolist() == [0, 25, 50, 75, 100]
    for value, index in ((25, 1), (37.5, 1), (100, 4)):
        before = results.at("fast", "gradients", value, "accuracy")
        after = results.at("fast", "gradients", value, "accuracy", after=True)
        assert list(before) == list(after) == [0, 1]
        assert np.mean([*before.values()]) == pytest.approx(mean[index])
        assert np.mean([*after.values()]) == pytest.approx(mean[min(index + 1, 4)])
    assert deviation[-1] == pytest.approx(results.deviation("fast", "last"))
    assert mean[-1] == pytest.approx(results.mean("fast", "last"))
    about = json.loads((folder / "about.json").read_text())
    assert about["calls"][0]["command"] == "reproduce tiny"
    assert about["runs"] == 4
    assert about["cells"]["fast"] == {"paper": 0.9, "solver.lr": 0.5}
    assert len(said) == 1 + 4
    text = (folder / TABLE).read_text()
    assert "full length, 2 repeats; `reproduce tiny`" in text
    assert "| fast | 0.9000 | " in text
    assert "Within 0.5 of the paper: 1 of 1 cells." in text
    assert "**not tested** (two repeats): Fast is fast. It reached" in text
    assert "**not tested** (no comparison): It lasts. Too short." in text
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", DIFFERENCES}


def test_existing_run_is_not_repeated(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []

    def counted(job: PlannedRun) -> tuple[Row, reproduction.Points]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((job.cell, job.repeat))
        return honest(job)

    honest = running.run_job
    monkeypatch.setattr(running, "run_job", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "about.json").read_text())["runs"] == 3
    rows = tmp_path / "out" / "results.csv"  # as if killed between a curve and its row
    *complete, _ = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(complete))
    first = Store(tmp_path / "out").results()
    assert len(first.rows) == 2
    monkeypatch.setattr(running, "run_job", honest)
    resumed = run(tiny, tmp_path / "out")
    assert len(resumed.rows) == 4
    assert resumed.rows[:2] == first.rows
    whole = run(tiny, tmp_path / "whole")
    for row, same in zip(whole.rows, resumed.rows, strict=True):
        assert replace(row, seconds=0) == replace(same, seconds=0)
        for name, values in whole.curves[row.cell, row.repeat].items():
            np.testing.assert_array_equal(values, resumed.curves[row.cell, row.repeat][name])


def test_a_killed_run_continues_from_its_checkpoint(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second of four runs of 20 updates, it repeats none of the first 30."""
    tiny = replace(tiny, base={**tiny.base, "simulation.batched": False})
    left = [30]

    def counted(self: Training, jobs: Sequence[Job]) -> list[Trained]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return train(self, jobs)

    train, folder = Training.train, tmp_path / "out"
    whole = run(tiny, tmp_path / "whole")
    monkeypatch.setattr(engine, "_SAVE_S", 0.0)
    monkeypatch.setattr(Training, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, folder)
    assert [path.name[:6] for path in folder.glob("*.checkpoint")] == ["slow-0"]
    left[0] = 50
    resumed = run(tiny, folder)
    assert (left, [*folder.glob("*.checkpoint")]) == ([0], [])
    for row, same in zip(whole.rows, resumed.rows, strict=True):
        assert replace(row, seconds=0) == replace(same, seconds=0)
        for name, values in whole.curves[row.cell, row.repeat].items():
            np.testing.assert_array_equal(values, resumed.curves[row.cell, row.repeat][name])


def test_only_changed_configurations_are_run_again(tiny: Experiment, tmp_path: Path) -> None:
    before = run(tiny, tmp_path)
    cells = (Cell("fast", {"solver.lr": 0.4}), tiny.cells[1])
    said: list[str] = []
    after = run(replace(tiny, cells=cells), tmp_path, say=said.append)
    assert said[0] == "tiny: 4 runs, 2 of them done already"
    assert after.of("slow") == before.of("slow")
    assert after.of("fast") != before.of("fast")
    fewer = run(replace(tiny, cells=cells), tmp_path, repeats=1)
    assert fewer.rows == after.rows  # repeats that are there stay
    again = run(tiny, tmp_path, repeats=1, again=True)
    assert len(again.rows) == 2


def test_results_of_different_scales_are_not_mixed(tiny: Experiment, tmp_path: Path) -> None:
    results = run(tiny, tmp_path, repeats=1, scale=10)
    assert results.of("fast")[0].versions == 2
    assert "T divided by 10, 1 repeat" in (text := table(tiny, results))
    assert text.startswith("# Tiny, T / 10\n")
    assert "Within" not in text  # the paper's numbers are of its own length
    with pytest.raises(ConfigError, match="holds results at scale 10, not 1: give --scale 10"):
        run(tiny, tmp_path)
    assert run(tiny, tmp_path, repeats=1, again=True).of("fast")[0].versions == 20


def test_results_of_another_experiment_are_not_replaced(tiny: Experiment, tmp_path: Path) -> None:
    before = run(tiny, tmp_path, repeats=1)
    with pytest.raises(ConfigError, match="holds results of tiny: choose another folder"):
        run(replace(tiny, name="other"), tmp_path, repeats=1, again=True)
    assert Store(tmp_path).results().rows == before.rows


def test_curves_are_thinned_and_average_losses_in_between() -> None:
    def made(version: int) -> VersionMade:
        metrics = {"accuracy": 0.5, "loss": 1.0} if version % 2 == 0 else {}
        loss = None if version == 0 else float(version)
        return VersionMade(version, (), version, version, 0.0, 0, 0.0, loss, metrics)

    curve = thinned([made(version) for version in range(9)], 3)
    assert curve["version"].tolist() == [0, 4, 8]
    assert np.isnan(curve["training_loss"][0])
    assert curve["training_loss"][1:].tolist() == [2.5, 6.5]


def test_figures_are_compared_repeat_by_repeat() -> None:
    """Cells may have different repeats: those that both have count."""
    assert above({0: 3.0, 1: 5.0, 7: 1.0}, {1: 2.0, 0: 2.0, 2: 9.0}, 0.5, times=0.5).tolist() == [
        1.5,
        3.5,
    ]
    one, other = within(({0: 0.5}, {0: 0.25}), 0.5)
    assert (one[0], other[0]) == (0.75, 0.25)


def test_a_repeats_best_cell_is_that_of_the_other_repeats() -> None:
    lucky, steady = {0: 9.0, 1: 1.0, 2: 1.0, 5: 9.0}, {0: 2.0, 1: 2.0, 2: 3.0}
    assert best_elsewhere([lucky, steady]) == {0: 2.0, 1: 1.0, 2: 1.0}
    assert best_elsewhere([{0: 1.0}]) == best_elsewhere([]) == {}


def test_measurements_after_so_many_answers_do_not_count(tiny: Experiment, tmp_path: Path) -> None:
    results = run(tiny, tmp_path, repeats=1)
    accuracy = results.curves["fast", 0]["accuracy"]  # at 0, 5, 10, 15 and 20 answers
    assert results.late("fast", "accuracy", 10) == {0: accuracy[2]}
    assert results.late("fast", "accuracy", 9) == {0: accuracy[1]}
    assert results.late("fast", "accuracy") == {0: accuracy[4]}


@pytest.mark.parametrize("name", catalogue())
def test_stored_results_match_current_configurations(name: str) -> None:
    """Else `python -m experiments` would throw them away and run them anew."""
    experiment = catalogue()[name]
    cells = {cell.label: cell for cell in experiment.cells}
    rows = Store(command.RESULTS / name).results().rows
    wanted = [job_of(experiment, cells[row.cell], row.repeat, row.scale) for row in rows]
    assert [row.configuration for row in rows] == [job.configuration for job in wanted]


@pytest.mark.parametrize("study", rules.STUDIES, ids=lambda study: study.name)
def test_published_steps_are_the_best_of_those_that_were_tried(study: rules.Study) -> None:
    path = study.folder / rules.CHOSEN
    assert (json.loads(path.read_text()) if path.is_file() else {}) == study.best()


def test_held_out_images_are_on_no_device() -> None:
    rows = torch.arange(250.0)
    shares = [TensorDataset(rows[:59]), TensorDataset(rows[59:])]
    task = rules.HeldOut(nn.Flatten, shares, TensorDataset(rows))
    kept = [set(task.device_data(device).tensors[0].tolist()) for device in range(2)]
    apart = set(task.validation_data().tensors[0].tolist())
    assert apart == {118.0, 178.0, 238.0}
    assert [len(of) for of in kept] == [59, 188]
    assert not apart & set.union(*kept)


# some of it, and by which program


def test_single_cell_with_a_given_first_seed(tiny: Experiment) -> None:
    def wanted(*cells: str, seed: int = 0) -> list[tuple[str, int]]:
        jobs = jobs_of(tiny, repeats=2, scale=1.0, cells=cells, seed=seed)
        assert all(job.sets["run.seed"] == job.sets["task.seed"] == job.repeat for job in jobs)
        return sorted((job.cell, job.repeat) for job in jobs)

    assert wanted("slow", seed=7) == [("slow", 7), ("slow", 8)]
    assert wanted("s*", "fast") == wanted("*") == wanted()
    with pytest.raises(ConfigError, match="tiny has no cell 'slwo'; did you mean 'slow'"):
        wanted("slwo")


def test_an_experiment_whose_cells_are_not_chosen_yet(tiny: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny has no cells yet: first run `that`"):
        run(replace(tiny, cells=(), before="first run `that`"), tmp_path / "out")


def test_the_list_says_what_an_experiment_without_cells_waits_for(
    tiny: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = replace(tiny, before="first run `that`")
    known = {"ready": ready, "waiting": replace(ready, cells=())}
    monkeypatch.setattr(reproduction, "catalogue", lambda: known)
    assert command.listed() == [
        "ready                      2 cells  Tiny",
        "waiting                    0 cells  Tiny (first run `that`)",
    ]


def test_results_name_their_precision(tiny: Experiment, tmp_path: Path) -> None:
    bf16 = replace(tiny, base={**tiny.base, "solver.precision": "bf16"})
    assert {row.precision for row in run(tiny, tmp_path, repeats=1, scale=10).rows} == {""}
    rows = run(bf16, tmp_path, repeats=1, scale=10).rows
    assert {row.precision for row in rows} <= {"bf16", "float32"}


def test_results_name_their_commits(tiny: Experiment, tmp_path: Path) -> None:
    results = run(tiny, tmp_path, repeats=1, scale=10, program="0123456789ab")
    assert {row.commit for row in results.rows} == {"0123456789ab"}
    assert "; commit 0123456789ab; machine" in table(tiny, results)
    results = run(
        tiny, tmp_path, repeats=2, scale=10, cells=["slow"], program="ba9876543210+", command="2"
    )
    calls = json.loads((tmp_path / "about.json").read_text())["calls"]
    assert [one["machine"]["commit"] for one in calls] == ["0123456789ab", "ba9876543210+"]
    told = "; commit 0123456789ab (2 runs), ba9876543210 with changes (1 run); machine"
    assert told in table(tiny, results)


@pytest.mark.parametrize("name", [one for one in catalogue() if (command.RESULTS / one).is_dir()])
def test_every_published_table_follows_from_the_stored_numbers(name: str) -> None:
    folder = Path(reproduction.__file__).parent / "results" / name
    found = Store(folder).results()
    assert table(catalogue()[name], found) == (folder / TABLE).read_text(), (
        f"`python -m experiments {name}` writes {TABLE} anew from the numbers that are there"
    )
    lengths = {len(column) for curve in found.curves.values() for column in curve.values()}
    assert lengths
    assert max(lengths) <= catalogue()[name].points


# what is refused


def ask(names: Sequence[str], out: Path | None = None) -> None:
    command.reproduce(
        names,
        repeats=1,
        scale=50.0,
        processes=1,
        out=out,
        again=False,
        command="reproduce",
        say=lambda _: None,
    )


@pytest.mark.process
def test_the_command_runs_an_experiment_by_its_name(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "catalogue", lambda: {"tiny": tiny})
    ask(["tiny"], tmp_path / "out")
    assert (tmp_path / "out" / TABLE).is_file()


@pytest.mark.process
def test_the_data_folder_reaches_tasks_of_experiments_own(
    tiny: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = {"task.name": "experiments.attackers:attacked", "task.args": {"data": "mnist"}}
    own = replace(tiny, base=base, cells=(Cell("only", {}),), pictures=(), claims=no_claims)
    monkeypatch.setattr(reproduction, "catalogue", lambda: {"own": own})
    monkeypatch.setenv("FEDSTREAM_DATA", "elsewhere")
    with pytest.raises(typer.Exit):
        command.main(["own"], repeats=1, data_root=str(tmp_path), jobs=1, out=tmp_path / "out")
    assert f"is not in {tmp_path}/MNIST/raw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cells": (Cell("fast", {}), Cell("fast", {}))}, "tiny has two cells 'fast'"),
        ({"cells": (Cell("fast", {}),)}, "tiny has no cell 'slow'; did you mean 'fast'?"),
        ({"cells": (Cell("a", {}, beside="aa"),), "pictures": ()}, "tiny has no cell 'aa'"),
        (
            {"cells": (Cell("a", {"solver.lrr": 1}),), "pictures": ()},
            r"tiny, cell 'a': solver.lrr = 1 .*: unknown key; did you mean solver.lr\?",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_before_anything_runs(
    changed: dict[str, Any], message: str, tiny: Experiment, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(replace(tiny, **changed), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_command_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reproduce", interrupted)
    with pytest.raises(typer.Exit) as end:
        command.main(["rules"])
    assert end.value.exit_code == 130
    assert "the same command continues" in capsys.readouterr().err


def test_two_experiments_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "EXPERIMENTS", (*rules.EXPERIMENTS, replace(rules.EXPERIMENTS[0])))
    with pytest.raises(ConfigError, match="two experiments are named 'rules-steps'"):
        catalogue()


def test_list_with_a_name_lists_its_cells(
    tiny: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "catalogue", lambda: {"tiny": tiny})
    assert command.listed(["tiny"]) == ["fast", "slow"]


def test_unknown_experiment_is_told_where_the_known_ones_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown experiment nope: .* lists all$"):
        ask(["afl-mnist-table2", "nope"])
    with pytest.raises(ConfigError, match=r"lists all; did you mean 'afl-mnist-table2'\?"):
        ask(["afl-mnist-tabl2"])
    with pytest.raises(ConfigError, match="name an experiment"):
        ask([])
    with pytest.raises(ConfigError, match="--out takes the results of one experiment"):
        ask(["afl-mnist-table2", "afl-mnist-table3"], tmp_path)


@pytest.mark.parametrize("name", catalogue())
def test_runs_too_short_to_judge_are_still_shown(name: str) -> None:
    """As by --scale 2000: one version, with nothing to take a mean of."""
    experiment, points = catalogue()[name], 1
    rows, curves = [], {}
    for n, cell in enumerate(experiment.cells):
        best = 0.1 + n / 1000
        rows.append(
            Row(
                cell.label,
                0,
                2000.0,
                "",
                "finished",
                points - 1,
                1,
                1,
                1.0,
                2,
                0,
                best,
                points - 1,
                best,
                1.0,
            )
        )
        columns = ("version", "updates", "gradients", "epochs", "communications", "time")
        spent = {column: np.arange(points, dtype=float) for column in columns}
        measured = {
            "training_loss": np.full(points, np.nan),
            "accuracy": np.full(points, best),
            "loss": np.full(points, 1.0),
            "perplexity": np.full(points, np.e),
        }
        curves[cell.label, 0] = spent | measured
    made = table(experiment, Results(rows, curves, 2000.0))
    assert ("\n## Claims\n" in made) == (experiment.claims is not no_claims)
