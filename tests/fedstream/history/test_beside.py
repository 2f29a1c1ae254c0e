"""Runs beside each other: lists, comparisons and reports."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fedstream
from fedstream.core.errors import ConfigError, DataError
from fedstream.history import reporting
from fedstream.history.report import occupied
from fedstream.runtime.config import dump
from fedstream.settings.config import Settings
from tests.fedstream.history.test_state import PNG
from tests.journals import Scribe

Command = Callable[..., tuple[int, str, str]]

HEADER = "version,seconds,updates,total_updates,accuracy,test_loss\n"


def left(
    folder: Path,
    *points: tuple[int, float, int, float],
    strategy: str = "fedasync",
    config: str = "",
    **numbers: object,
) -> Path:
    """A run's folder with these measurements: version, seconds, updates, accuracy."""
    folder.mkdir(parents=True)
    rows = [f"{v},{s},{u},{u},{accuracy},{1 - accuracy}\n" for v, s, u, accuracy in points]
    (folder / "metrics.csv").write_text(HEADER + "".join(rows))
    about = {
        "run": "demo",
        "task": "digits",
        "strategy": strategy,
        "state": "finished",
        "why": "done",
        "devices": 10,
        "versions": points[-1][0],
        "versions_wanted": points[-1][0],
        "updates": points[-1][2],
        "seconds": points[-1][1],
        "updates_per_s": 10.0,
        "mean_staleness": 0.5,
        "created": "2026-11-22T13:00:00.000+00:00",
        "accuracy": points[-1][3],
        "best_accuracy": max(p[3] for p in points),
    }
    (folder / "summary.json").write_text(json.dumps(about | numbers))
    (folder / "run.toml").write_text(
        f'[run]\nname = "{folder.name}"\n[task]\nname = "digits"\n'
        f'[strategy]\nname = "{strategy}"\n{config}'
    )
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    one = left(
        tmp_path / "runs" / "one",
        (0, 0.0, 0, 0.1),
        (10, 1.0, 10, 0.6),
        (20, 2.0, 20, 0.5),
        config="alpha = 0.4\n[redis]\nurl = 'redis://a'",
    )
    other = left(
        tmp_path / "runs" / "other",
        (0, 0.0, 0, 0.1),
        (5, 4.0, 50, 0.9),
        strategy="fedbuff",
        created="2026-11-22T12:00:00.000+00:00",
    )
    return [one, other]


def test_list_shows_every_run_even_broken_ones(two: list[Path], command: Command) -> None:
    folder = two[0].parent
    (folder / "notes").mkdir()  # no run
    (folder / "broken").mkdir()
    (folder / "broken" / "summary.json").write_text("{")
    (folder / "damaged" / "journal").mkdir(parents=True)
    (folder / "damaged" / "journal" / "00000001-000000.journal").write_text("not a journal")
    code, out, _ = command("list", folder)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[:3]] == ["run", "other", "one"]  # the oldest first
    assert lines[1].split()[:8] == [
        "other",
        "finished",
        "fedbuff",
        "digits",
        "5",
        "50",
        "0.9000",
        "0.9000",
    ]
    assert any(line.startswith("broken: ") and "is not a run's summary" in line for line in lines)
    assert any(line.startswith("damaged: ") and "journal" in line for line in lines)
    assert "notes" not in out
    found = {
        Path(row["folder"]).name: row for row in json.loads(command("list", folder, "--json")[1])
    }
    assert found["one"]["best_accuracy"] == found["one"]["best"] == 0.6
    assert found["one"]["metric"] == "accuracy"
    assert "error" in found["broken"]
    assert found.keys() == {"one", "other", "broken", "damaged"}


def test_list_shows_an_own_strategy_without_its_folders(tmp_path: Path, command: Command) -> None:
    rule = f"{tmp_path}/my_rules.py:Mine"
    left(tmp_path / "own", (5, 1.0, 50, 0.9), strategy=rule)
    assert command("list", tmp_path)[1].splitlines()[1].split()[2] == "my_rules.py:Mine"
    assert json.loads(command("list", tmp_path, "--json")[1])[0]["strategy"] == rule


def test_list_recognises_a_running_run(simulated: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(simulated, tmp_path / "run")
    with occupied(tmp_path / "run"):
        assert "  running " in command("list", tmp_path)[1]
    assert "  finished " in command("list", tmp_path)[1]


def test_list_of_nothing(tmp_path: Path, command: Command) -> None:
    assert command("list", tmp_path) == (0, f"{tmp_path}: no runs there\n", "")
    code, _, err = command("list", tmp_path / "nowhere")
    assert code == 2
    assert "No such file or directory: name a folder that contains runs" in err


def test_comparison_says_what_it_took_to_reach_what_all_reached(two: list[Path]) -> None:
    found = fedstream.compare(two)
    assert found.target == 0.6  # the lower of the best
    table = found.table
    assert list(table.index) == ["one", "other"]
    assert list(table["final"]) == [0.5, 0.9]
    assert list(table["best"]) == [0.6, 0.9]
    assert list(table["best_version"]) == [10, 5]
    assert list(table["versions_to_target"]) == [10, 5]
    assert list(table["updates_to_target"]) == [10, 50]
    assert list(table["seconds_to_target"]) == [1.0, 4.0]
    higher = fedstream.compare(two, target=0.8)
    assert higher.table["versions_to_target"].isna().tolist() == [True, False]


def test_comparison_by_loss_prefers_small_values(two: list[Path]) -> None:
    found = fedstream.compare(two, metric="loss")
    assert found.target == pytest.approx(0.4)
    assert list(found.table["best_version"]) == [10, 5]


def test_comparison_names_only_keys_that_differ(two: list[Path]) -> None:
    assert fedstream.compare(two).differences == {
        "strategy.alpha": [0.4, None],
        "strategy.name": ["fedasync", "fedbuff"],
    }
    assert fedstream.compare([two[0], two[0]]).differences == {}


def test_a_bare_journal_differs_only_in_what_it_says(two: list[Path], tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal", versions=400, seed=1)
    scribe.update()
    scribe.close()
    (two[0] / "run.toml").write_text(dump(Settings()))
    found = fedstream.compare([two[0], tmp_path / "journal"])
    assert found.differences == {"run.seed": [0, 1]}  # of the rest, nobody knows
    assert fedstream.compare([two[1], two[0], tmp_path / "journal"]).differences["solver.lr"] == [
        None,
        0.3,
        "?",
    ]


def test_runs_of_one_name_are_told_apart_by_their_paths(two: list[Path], tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere" / "one"
    shutil.copytree(two[0], twin)
    assert fedstream.compare([*two, twin]).names == [str(two[0]), "other", str(twin)]


def test_comparison_command(two: list[Path], tmp_path: Path, command: Command) -> None:
    code, out, _ = command("compare", *two, "--out", tmp_path / "c")
    assert code == 0
    words = [line.split() for line in out.splitlines()]
    assert ["run", "one", "other"] in words
    assert ["best", "accuracy", "0.6000", "0.9000"] in words
    assert ["updates", "to", "0.6", "10", "50"] in words
    assert ["strategy.alpha", "0.4", "-"] in words
    assert (tmp_path / "c" / "comparison.png").read_bytes().startswith(PNG)
    with (tmp_path / "c" / "comparison.csv").open() as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["one", "other"]
    told = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert told["differences"]["strategy.name"] == {"one": "fedasync", "other": "fedbuff"}
    code, _, err = command("compare", *two, "--out", tmp_path / "c")
    assert (code, "already contains comparison.png" in err) == (2, True)


def test_what_cannot_be_compared(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run has measured 'f1'; measured: accuracy, loss"):
        fedstream.compare(two, metric="f1")
    with pytest.raises(DataError, match=r"measured 'accuraci'; did you mean 'accuracy'\?$"):
        fedstream.compare(two, metric="accuraci")
    with pytest.raises(ConfigError, match="no runs to compare"):
        fedstream.compare([])


def test_unmeasured_runs_compare_by_what_is_known(golden: Path) -> None:
    found = fedstream.compare([golden / "fedasync", golden / "fedbuff"])
    assert found.target is None
    assert "accuracy" not in repr(found)
    assert found.differences["strategy.name"] == ["fedasync", "fedbuff"]
    assert "<table>" in found._repr_html_()


def test_report_of_a_journal_alone(simulated: Path, tmp_path: Path, command: Command) -> None:
    """As for a run in production, which leaves nothing else; its own table is the known answer."""
    shutil.copytree(simulated / "journal", tmp_path / "run" / "journal")
    code, out, err = command("report", tmp_path / "run", "--json", "--evaluate-every", 10)
    assert (code, err) == (0, "")
    told = json.loads(out)
    files = [Path(file) for file in told["files"]]
    assert [file.parent.name for file in files] == ["report-1"] * 3
    assert (told["state"], told["versions"]) == ("finished", 30)
    mine, theirs = (fedstream.open(folder).measurements for folder in (files[0].parent, simulated))
    for one in theirs:  # devices are measured while a run goes on
        for name in [name for name in one.metrics if name.startswith("device_")]:
            del one.metrics[name]
    assert mine == theirs
    assert files[2].read_bytes().startswith(PNG)
    assert command("report", tmp_path / "run", "--out", tmp_path / "run" / "journal")[0] == 2


def test_report_does_not_run_a_recorded_program(tmp_path: Path, command: Command) -> None:
    program = tmp_path / "evil.py"
    program.write_text("raise SystemExit('ran')")
    scribe = Scribe(tmp_path / "run" / "journal", task=f"{program}:task")
    scribe.update()
    scribe.close()
    code, out, err = command("report", tmp_path / "run")
    assert code == 0
    assert "not measured: " in err
    assert "loading it runs its code: give --task" in err
    assert "accuracy   not measured" in out
    assert command("report", tmp_path / "run", "--evaluate-every", 5)[0] == 2


def test_report_keeps_the_measurements_of_a_run(simulated: Path, tmp_path: Path) -> None:

    found = reporting.write(simulated, tmp_path / "report")
    assert found.notes == []
    assert (
        fedstream.open(tmp_path / "report").measurements == fedstream.open(simulated).measurements
    )
