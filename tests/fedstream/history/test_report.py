"""What a run leaves behind."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from matplotlib import rc_context

from fedstream.core.layout import Model
from fedstream.history import pictures, report
from fedstream.history.model_stats import AHEAD
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.timeline import History
from fedstream.history.ui import single
from fedstream.journal import opened
from fedstream.journal.contributions import stats
from fedstream.settings.recording import SUMMARY
from tests.fedstream.conftest import Command
from tests.fedstream.history.conftest import VERSIONS, Page
from tests.fedstream.views import CREATED, event, trigger, update, version, view

FACTS = report.Facts(
    run="demo",
    task="digits",
    strategy="fedasync",
    devices=10,
    trainers=2,
    seed=0,
    target=100,
    started=CREATED - 5,
    ended=CREATED + 5,
    state="finished",
    why="version 3 reached",
    restarts={"updater": 1, "scheduler": 0},
    torch="2.13.0",
)
COUNTS = {
    "issued": 12,
    "applied": 3,
    "buffered": 2,
    "refused": 2,
    "refused:not finite": 2,
    "given_up": 1,
    "given_up:dropped out": 1,
    "dead": 1,
    "dead:crashed its trainers": 1,
    "stray:late": 4,
}


@pytest.fixture
def history() -> History:
    history = History()
    history.publish(version(0))
    history.publish(version(1, update("a", device=1)))
    history.publish(version(2, update("b", device=2, staleness=1)))
    history.publish(version(3, update("c", device=3, staleness=2), update("d", device=1, loss=1.5)))
    for number, accuracy in ((0, 0.1), (2, 0.9), (3, 0.8)):
        metrics = {"accuracy": accuracy, "loss": 1 - accuracy, "recall": 0.5}
        history.tell(event("evaluation", version=number, metrics=metrics))
    return history


def test_folder_is_named_after_run_and_time() -> None:
    at = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)
    assert report.default_out("demo", at) == Path("runs/demo-20261121-010203")


def test_summarys_tasks_add_up(history: History) -> None:
    seen = view(COUNTS, open=(trigger("x"), trigger("y"), trigger("z")))
    numbers = report.summary(FACTS, history, seen)
    tasks = dict(numbers["tasks"])
    assert tasks.pop("issued") == 12 == sum(tasks.values())
    assert tasks == {
        "applied": 3,
        "buffered": 2,
        "refused": 2,
        "given_up": 1,
        "dead": 1,
        "open": 3,
    }
    assert numbers["refused"] == {"not finite": 2}
    assert numbers["given_up"] == {"dropped out": 1}
    assert numbers["dead"] == {"crashed its trainers": 1}
    assert numbers["strays"] == {"late": 4}


def test_summary_has_accuracy_and_rate(history: History) -> None:
    numbers = report.summary(FACTS, history, view(COUNTS))
    assert (numbers["accuracy"], numbers["measured_version"]) == (0.8, 3)
    assert (numbers["best_accuracy"], numbers["best_accuracy_version"]) == (0.9, 2)
    assert numbers["seconds"] == 3.0
    assert numbers["updates_per_s"] == pytest.approx(4 / 3, abs=0.01)
    assert (numbers["mean_staleness"], numbers["max_staleness"]) == (0.75, 2)
    assert numbers["restarts"] == {"updater": 1, "scheduler": 0}
    assert numbers["started"] == "2023-11-14T22:13:15.000+00:00"
    assert numbers["created"] == "2023-11-14T22:13:20.000+00:00"
    assert numbers["versions_before"] == 0


def test_resumed_run_counts_seconds_since_resuming(history: History) -> None:
    facts = replace(FACTS, started=CREATED + 600)
    history.publish(version(603, update("e")))  # published 603 s after version 0
    numbers = report.summary(facts, history, view(COUNTS))
    assert (numbers["seconds"], numbers["versions_before"]) == (3.0, 3)
    assert numbers["updates_per_s"] == pytest.approx(1 / 3, abs=0.01)
    del history.versions[603]  # nothing was made since
    numbers = report.summary(facts, history, view(COUNTS))
    assert (numbers["seconds"], numbers["updates_per_s"]) == (0.0, 0.0)


def test_run_that_never_started_has_a_summary() -> None:
    facts = replace(FACTS, state="failed", why="updater exited with 2")
    numbers = report.summary(facts, History(), None)
    assert numbers["accuracy"] is None
    assert numbers["versions"] == 0
    assert set(numbers["tasks"].values()) == {0}


def test_nan_loss_is_null_in_json(tmp_path: Path) -> None:
    numbers = {
        "loss": float("nan"),
        "metrics": {"loss": float("inf")},
        "list": [float("nan"), (1,)],
    }
    report.write_summary(tmp_path, numbers)
    found = json.loads((tmp_path / SUMMARY).read_text())
    assert found == {"loss": None, "metrics": {"loss": None}, "list": [None, [1]]}


def test_undecodable_text_is_valid_in_json() -> None:
    assert json.loads(report.as_json({"why": "caf\udce9"})) == {"why": "caf\\udce9"}


def test_table_has_a_row_per_version(history: History, tmp_path: Path) -> None:
    report.Table(tmp_path, CREATED).write(history)
    with (tmp_path / report.METRICS).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["version"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0]["accuracy"] == "0.1"
    assert rows[1] == {
        "version": "1",
        "seconds": "1.0000",
        "updates": "1",
        "total_updates": "1",
        "staleness": "0",
        "weight": "0.4",
        "device": "1",
        "task": "a",
        "loss": "0.5",
        "accuracy": "",
        "test_loss": "",
        "test_recall": "",
    }
    assert (rows[3]["device"], rows[3]["task"]) == ("3 1", "c d")
    assert (rows[3]["staleness"], rows[3]["loss"]) == ("1", "1")
    assert (rows[3]["accuracy"], rows[3]["test_loss"]) == ("0.8", "0.2")


def test_table_grows_with_each_measurement(history: History, tmp_path: Path) -> None:
    """A run that is killed leaves its rows; written again at the end, the table is the same."""
    whole, table, seen = tmp_path / "whole", report.Table(tmp_path, CREATED), History()
    whole.mkdir()
    report.Table(whole, CREATED).write(history)
    lines = (whole / report.METRICS).read_text().splitlines()
    rows = []
    for number in range(4):
        seen.recall(number, history.versions[number])
        if number in history.evaluations:
            seen.measure(number, history.evaluations[number])
        table.follow(seen)
        rows.append(len((tmp_path / report.METRICS).read_text().splitlines()) - 1)
    assert rows == [1, 1, 3, 4]  # version 1 was not measured, and waits for the next that is
    assert (tmp_path / report.METRICS).read_text().splitlines() == lines
    assert [line.split(",")[3] for line in lines] == ["total_updates", "0", "1", "2", "4"]


def test_table_of_a_resumed_run_has_no_row_twice(history: History, tmp_path: Path) -> None:
    report.Table(tmp_path, CREATED).write(history)
    with (tmp_path / report.METRICS).open("a") as file:
        file.write("4,5.0,1")  # torn by the crash
    resumed = report.Table(tmp_path, CREATED)
    history.publish(version(4, update("e")))
    resumed.follow(history)  # as recalled
    history.measure(4, {"accuracy": 0.7})
    resumed.follow(history)
    resumed.follow(history)
    with (tmp_path / report.METRICS).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["version"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert (rows[4]["accuracy"], rows[4]["total_updates"]) == ("0.7", "5")


def test_table_that_could_not_be_written_is_written_anew(history: History, tmp_path: Path) -> None:
    table = report.Table(tmp_path, CREATED)
    table.follow(history)
    (tmp_path / report.METRICS).unlink()
    (tmp_path / report.METRICS).mkdir()
    history.publish(version(4, update("e")))
    history.measure(4, {"accuracy": 0.7})
    with pytest.raises(OSError, match="Is a directory"):
        table.follow(history)
    (tmp_path / report.METRICS).rmdir()
    table.follow(history)
    assert len((tmp_path / report.METRICS).read_text().splitlines()) == 6


def test_model_file_loads_into_torch(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import nn

    from fedstream.trainer import vector

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.inward = nn.Linear(3, 3)
            self.outward = nn.Linear(3, 3)
            self.outward.weight = self.inward.weight

    trained, fresh = Tied(), Tied()
    with torch.no_grad():
        for tensor in trained.state_dict().values():
            tensor.copy_(torch.ones_like(tensor) * 7)
    model = Model(vector.layout_of(trained))
    vector.read(trained, model)
    report.write_model(tmp_path, model, Tied(), {"version": "3", "digest": model.digest()})
    fresh.load_state_dict(load_file(tmp_path / report.MODEL))
    assert all(bool((tensor == 7).all()) for tensor in fresh.state_dict().values())
    with safe_open(tmp_path / report.MODEL, "numpy") as file:
        assert file.metadata() == {"version": "3", "digest": model.digest()}


@pytest.mark.parametrize("devices", [10, 200])
def test_picture_is_drawn(history: History, tmp_path: Path, devices: int) -> None:
    for name, of in (("some.png", history), ("none.png", History())):
        pictures.draw(tmp_path / name, "a run", of, created=CREATED, devices=devices)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_many_values_become_medians_of_groups() -> None:
    assert pictures.medians([5, 6], [1.0, 3.0]) == ([5, 6], [1.0, 3.0], [])
    assert pictures.medians([5, 6, 7], [math.nan, 3.0, math.inf]) == ([6], [3.0], [])
    assert pictures.medians([], []) == ([], [], [])
    at, middle, most = pictures.medians(range(450), [2.0, 1e30, 2.5] * 150)
    assert at == list(range(2, 450, 3))
    assert (set(middle), set(most)) == ({2.5}, {1e30})


def test_axis_covers_typical_values() -> None:
    falling = [2.3 - n / 500 for n in range(1000)]
    assert pictures.scale(falling) == pictures.Scale(1.05 * 2.3)
    wild = pictures.scale([*falling, 3e7, math.inf, math.nan])
    assert (wild.left_out, wild.log) == (3, False)
    assert 2.3 < wild.top < 4
    assert pictures.scale([0.1] * 995 + [0.9] * 5) == pictures.Scale(1.05 * 0.9)  # its beginning
    diverged = pictures.scale([10.0 ** (n / 50) for n in range(1000)])
    assert (diverged.log, diverged.left_out) == (True, 0)
    assert pictures.scale([]) == pictures.Scale(1.0)
    assert pictures.scale([math.nan]) == pictures.Scale(1.0, 1)
    assert pictures.scale([0.0, 0.0]) == pictures.Scale(1.0)


def test_extreme_staleness_does_not_hide_the_rest() -> None:
    assert pictures.bars({0: 5, 3: 1}) == ([0, 1, 2, 3], [5, 0, 0, 1], 1)
    assert pictures.bars({0: 500, 1: 499, 5000: 1}) == ([0, 1, 2], [500, 499, 1], 1)
    begins, counts, width = pictures.bars(dict.fromkeys(range(1000), 1))
    assert (len(begins), width, sum(counts)) == (40, 25, 1000)


@pytest.mark.parametrize("devices", [20, 200])
def test_picture_labels_do_not_overlap(devices: int) -> None:
    history = History()
    for number in range(120):
        made = update("t", device=number % devices, staleness=5000 if number == 7 else number % 3)
        history.publish(version(number, made))
        history.tell(event("evaluation", version=number, metrics={"accuracy": 0.5, "loss": 1e9}))
    with rc_context(pictures.STYLE):
        figure = pictures.picture("a $run$ \x1b", history, created=CREATED, devices=devices)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
                shown = [box for box in boxes if box.width > 0]
                for one, other in pairwise(shown):
                    assert not one.overlaps(other)
        titles = [axes.title.get_window_extent() for axes in figure.axes]
        for one, other in combinations(titles, 2):
            assert not one.overlaps(other)
        assert all(box.x1 <= figure.bbox.x1 for box in titles)


def test_curves_of_many_runs_differ_and_neighbours_even_without_colours() -> None:
    styles = [pictures.line_style(place) for place in range(28)]
    assert len({tuple(style.values()) for style in styles}) == 28
    assert all(one["linestyle"] != other["linestyle"] for one, other in pairwise(styles))


def test_command_writes_it_beside_the_other_files(
    recorded: Path, tmp_path: Path, command: Command
) -> None:
    code, out, err = command(
        "report", recorded, "--html", "--out", tmp_path, "--evaluate-every", 0, "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["files"][-1] == str(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert page.loaded == []
    assert page.links == ["#main"]
    assert {"cosine", "refused: not finite", "drift since version 0"} <= set(page.cells)


def test_devices_are_measured_as_a_replay_does(recorded: Path) -> None:
    with opened(recorded / "journal") as chain:
        share = stats(chain, AHEAD)[2]
    text = single.single(RecordedRun(recorded))
    for figure in (share.distance.mean, share.cosine.mean):
        assert f'data-value="{figure}"' in text


def test_it_does_not_tell_where_the_run_is(recorded: Path) -> None:
    assert str(recorded) not in single.single(RecordedRun(recorded))


def test_of_many_versions_some_are_chosen(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "VERSIONS", 4)
    text = single.single(RecordedRun(recorded))
    shown = [n for n in range(VERSIONS + 1) if f'id="version-{n}"' in text]
    assert shown == [0, 20, 40, 60]
    assert "4 of 61 versions, evenly chosen" in text


def test_another_report_is_not_overwritten(
    recorded: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "report.html").write_text("mine")
    code, _, err = command("report", recorded, "--html", "--out", tmp_path, "--evaluate-every", 0)
    assert (code, "choose another folder" in err) == (2, True)
    assert (tmp_path / "report.html").read_text() == "mine"
