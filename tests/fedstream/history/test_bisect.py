"""`fedstream journal bisect` and `export`: the update that spoiled a model, and any model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedstream.core.layout import Layout, Model, Tensor
from fedstream.history.bisect import search
from fedstream.journal import opened
from fedstream.journal.inspection import model_at, recorded_versions
from fedstream.strategies import FedAvgSettings
from fedstream.trainer import vector
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings
from tests.fedstream.history.scribes import (
    FIRST,
    By,
    Command,
    contents,
    two_segments,
)
from tests.journals import LAYOUT, Scribe
from tests.support import model_of


def test_bisect_finds_the_poisoned_update(journal: Command, poisoned: Path) -> None:
    code, out, said = journal("bisect", poisoned, "--below", 0.9, "--every", 7, "--json")
    assert (code, said) == (0, "")
    found = json.loads(out)
    [cause] = found["causes"]
    assert (found["found"], found["version"], cause["device"]) == (True, 23, 7)
    assert found["before"] > 0.9
    assert found["after"] < 0.5
    assert (cause["task"], cause["tau"], cause["staleness"]) == ("task-22", 22, 0)
    assert cause["weight"] == 0.4
    assert cause["distance"] > cause["norm"] > 0
    assert [23, found["after"]] in found["measured"]


def test_bisect_by_a_loss_as_text(journal: Command, poisoned: Path) -> None:
    code, out, _ = journal("bisect", poisoned, "--metric", "loss", "--above", 4.0)
    assert code == 0
    *_, found, cause = out.splitlines()
    assert found.startswith("loss went above 4 with version 23: ")
    assert cause.startswith("device 7, task task-22: trained from version 22 (staleness 0), weight")
    assert "version 1: loss" in out


def test_bisect_takes_the_task_of_the_runs_configuration(
    journal: Command, poisoned: Path, tmp_path: Path
) -> None:
    (poisoned / "run.toml").write_text("[task]\nname = 'nobody'\n")
    code, _, said = journal("bisect", poisoned, "--below", 0.5)
    assert code == 2
    assert "unknown task 'nobody'; choose one of digits, mnist" in said
    assert journal("bisect", poisoned, "--below", 0.5, "--task", "digits")[0] == 0
    config = tmp_path / "other.toml"
    config.write_text("[task]\nname = 'digits'\n")
    assert journal("bisect", poisoned, "--below", 0.5, "--config", config)[0] == 0
    (poisoned / "run.toml").unlink()


@pytest.mark.parametrize(
    ("bad", "every", "version", "measured"),
    [
        ({5, 6, 7, 8}, 4, 5, {0, 4, 5, 8}),
        ({5, 7, 8}, 4, 5, {0, 4, 5, 8}),  # the first crossing of the interval
        ({5}, 4, None, {0, 4, 8, 10}),  # a fall that recovers in between goes unseen
        ({5}, 1, 5, {0, 1, 2, 3, 4, 5}),
        ({0, 1, 2, 3, 10}, 4, 10, {0, 4, 8, 9, 10}),  # what was never good does not fall
    ],
)
def test_bisect_measures_the_named_versions(
    bad: set[int], every: int, version: int | None, measured: set[int], tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path)
    for number in range(10):
        scribe.update()
        if number == 5:
            scribe.segment()
    scribe.close()
    digests: dict[int, str] = {}

    def measure(number: int, model: Model) -> float:
        digests[number] = model.digest()
        return float(number not in bad)

    with opened(tmp_path) as chain:
        found = search(chain, measure, lambda value: value > 0.5, every)
    assert (found.crossing.version if found.crossing else None) == version
    assert found.measured.keys() == measured
    assert digests == {number: scribe.digests[number] for number in measured}


@pytest.mark.parametrize(
    ("recorded", "version", "recovered", "measured"),
    [
        # As the run measured it, every second version: it fell at 5 and was well again by 8.
        ({0: 1.0, 2: 1.0, 4: 1.0, 6: 0.0, 8: 1.0, 10: 1.0}, 5, (8, 1.0), {0, 4, 5, 6}),
        ({0: 1.0, 4: 1.0, 6: math.nan, 10: 0.0}, 5, None, {0, 4, 5, 6}),
        # Another task's numbers send the search astray, no further: its own measurements decide.
        ({0: 1.0, 2: 0.0, 4: 1.0, 8: 0.0}, None, None, {0, 2, 4, 8, 10}),
        ({0: 0.0, 6: 0.0, 8: 1.0}, None, None, {0, 8, 10}),  # it was never good before
    ],
)
def test_bisect_looks_where_the_run_itself_measured_a_fall(
    recorded: dict[int, float],
    version: int | None,
    recovered: tuple[int, float] | None,
    measured: set[int],
    tmp_path: Path,
) -> None:
    scribe = Scribe(tmp_path)
    for _ in range(10):
        scribe.update()
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(
            chain,
            lambda version, _: float(version not in {5, 6, 7}),
            lambda value: value > 0.5,
            8,
            recorded=recorded,
        )
    assert (found.crossing.version if found.crossing else None) == version
    assert found.recovered == recovered
    assert found.measured.keys() == measured


def test_bisect_reads_what_the_run_measured(journal: Command, poisoned: Path) -> None:
    table = poisoned / "metrics.csv"
    rows = "".join(f"{v},0,1,{v},{a}\n" for v, a in ((20, 0.95), (23, 0.1), (26, 0.75), (30, 0.4)))
    table.write_text(f"version,seconds,updates,total_updates,accuracy\n{rows}")
    try:
        for folder in (poisoned, poisoned / "journal"):
            options = ("--below", 0.5, "--every", 30, "--json")
            code, out, _ = journal("bisect", folder, *options)
            found = json.loads(out)
            assert (code, found["version"], found["recovered"]) == (0, 23, [26, 0.75])
            assert found["text"].endswith("; by version 26 it was 0.7500 again")
            assert [version for version, _ in found["measured"]] == [0, 20, 21, 22, 23]
    finally:
        table.unlink()


def test_bisect_looks_at_no_later_version_than_it_is_told(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    for _ in range(10):
        scribe.update()
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(chain, lambda version, _: -version, lambda value: value > -9, 4, 6)
    assert found.crossing is None
    assert found.measured.keys() == {0, 4, 6}


def test_bisect_names_every_update_of_a_round(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedAvgSettings(clients_per_round=2))
    for device in range(6):
        scribe.update(device)
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(chain, lambda version, _: -version, lambda value: value > -2, 3)
    assert found.crossing is not None
    assert (found.crossing.version, [one.device for one in found.crossing.causes]) == (2, [2, 3])


def test_bisect_blames_no_update_for_an_adopted_model(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.adopt()
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(chain, lambda version, _: -version, lambda value: value > -2)
    assert found.crossing is not None
    assert (found.crossing.version, found.crossing.causes) == (4, ())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--below", 0.01),
            "accuracy never went below 0.01 after a better value, in the 31 versions measured",
        ),
        (("--below", 1.1), "accuracy was below 1.1 in all 31 versions measured"),
    ],
)
def test_bisect_finds_nothing(
    options: tuple[object, ...], said: str, journal: Command, poisoned: Path
) -> None:
    code, out, _ = journal("bisect", poisoned, *options)
    assert (code, out.splitlines()[-1]) == (1, said)
    code, out, _ = journal("bisect", poisoned, *options, "--json")
    assert (code, json.loads(out)["found"], json.loads(out)["text"]) == (1, False, said)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "give either --below X or --above X"),
        (("--below", 1, "--above", 1), 2, "give either --below X or --above X"),
        (("--above", "nan"), 2, "--above nan: must be a finite number"),
        (("--below", 1, "--metric", "f1"), 1, "no metric 'f1'; it has accuracy, loss"),
    ],
)
def test_bisect_asked_wrongly(
    options: tuple[object, ...], code: int, said: str, journal: Command, poisoned: Path
) -> None:
    found, _, words = journal("bisect", poisoned, *options)
    assert found == code
    assert said in words
    assert words.count("\n") == 1


def test_bisect_with_a_task_that_raises(journal: Command, poisoned: Path, tmp_path: Path) -> None:
    program = tmp_path / "raising_task.py"
    program.write_text(
        "from fedstream import Task\n"
        "from fedstream.trainer.images import digits\n"
        "from fedstream.trainer.task import TaskSettings\n"
        "class Raising(Task):\n"
        "    model = device_data = digits(TaskSettings()).model\n"
        "    def test_data(self): print('words'); return [1]\n"
        "    def metrics(self, model, data): return {'accuracy': 1 / 0}\n"
        "class Untested(Raising):\n"
        "    def test_data(self): return None\n"
        "class Missing(Raising):\n"
        "    def test_data(self): raise OSError('no disk')\n"
    )
    for name, said in (
        ("Raising", "metrics() of version 0 raised ZeroDivisionError: division by zero"),
        ("Untested", "has no test data"),
        ("Missing", "raised OSError: no disk"),
    ):
        task = f"{program}:{name}"
        code, out, words = journal("bisect", poisoned, "--below", 0.5, "--task", task)
        assert (code, out) == (1, "")
        assert said in words.splitlines()[-1]


def test_export_is_the_model_bit_for_bit(journal: Command, poisoned: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    code, out, _ = journal("export", poisoned, "--out", file)
    assert code == 0
    with opened(poisoned) as chain:
        model, digest = model_at(chain, 30)
    assert out == f"version 30 ({digest}) written to {file}\n"
    task = load_task("digits", TaskSettings())
    module = task.model()
    module.load_state_dict(load_file(file))
    again = Model(model.layout)
    vector.read(module, again)
    assert again.digest() == digest
    with safe_open(file, "pt") as opened_file:
        assert opened_file.metadata() == {
            "version": "30",
            "digest": digest,
            "run": "demo",
            "task": "digits",
        }
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("version", [0, 6, 9])
def test_export_any_version(version: int, journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    with opened(tmp_path) as chain:
        digest = next(one.digest for one in recorded_versions(chain) if one.version == version)
    file = tmp_path / "model.safetensors"
    assert journal("export", tmp_path, "--version", version, "--out", file)[0] == 0
    with safe_open(file, "pt") as found:
        assert found.metadata()["digest"] == digest
    model = Model(LAYOUT)
    model.floats[:] = load_file(file)["weight"].numpy()
    assert model.digest() == digest


def test_export_keeps_dtypes(journal: Command, tmp_path: Path) -> None:
    layout = Layout(
        (
            Tensor("half", (2, 1), "bfloat16", "parameter"),
            Tensor("wide", (), "float64", "buffer"),
            Tensor("seen", (), "int64", "integer"),
            Tensor("flag", (2,), "bool", "integer"),
        )
    )
    scribe = By(tmp_path, model_of(layout, 1.0, 2.0, 3.0, integers=(7, 0, 1)))
    scribe.close()
    file = tmp_path / "m.safetensors"
    assert journal("export", tmp_path, "--out", file)[0] == 0
    found = load_file(file)
    assert found["half"].dtype is torch.bfloat16
    assert found["half"].tolist() == [[1.0], [2.0]]
    assert (found["wide"].dtype, found["wide"].shape) == (torch.float64, ())
    assert found["seen"].item() == 7
    assert found["flag"].tolist() == [False, True]


def test_export_overwrites_only_with_force(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    code, _, said = journal("export", tmp_path, "--out", file)
    assert (code, file.read_text()) == (2, "mine")
    assert "already exists" in said
    assert journal("export", tmp_path, "--out", file, "--force")[0] == 0
    assert load_file(file).keys() == {"weight"}
    before = contents(tmp_path)
    segment = tmp_path / "journal" / FIRST
    assert journal("export", tmp_path, "--out", segment, "--force")[0] == 2
    assert journal("export", tmp_path, "--out", tmp_path / "not" / "there.st")[0] == 1
    assert contents(tmp_path) == before
