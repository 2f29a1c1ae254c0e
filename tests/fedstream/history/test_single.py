"""`fedstream report --html`: all of a run's pages in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstream.history.model_stats import AHEAD
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import single
from fedstream.journal import opened
from fedstream.journal.contributions import stats
from tests.fedstream.conftest import Command
from tests.fedstream.history.conftest import VERSIONS, Page


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
