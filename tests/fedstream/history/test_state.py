"""What a run's folder says of its state, and its numbers and pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fedstream
from fedstream.core.errors import FedstreamError
from fedstream.history import pictures
from fedstream.history.report import is_occupied, occupied
from fedstream.settings import run_toml
from fedstream.settings.config import Settings
from tests.journals import Scribe

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_folder_is_occupied_by_one_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.history.report._LOOK_S", 0.0)
    assert not is_occupied(tmp_path)
    with occupied(tmp_path):
        assert is_occupied(tmp_path)
        with (
            pytest.raises(FedstreamError, match="another process is writing a run there"),
            occupied(tmp_path),
        ):
            pass
    assert not is_occupied(tmp_path)


def test_a_run_is_running_until_its_process_ends(simulated: Path, tmp_path: Path) -> None:
    """Its summary may be that of an earlier invocation; a killed run leaves its Redis behind."""
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    assert fedstream.open(out).state == "finished"
    with occupied(out):
        run = fedstream.open(out)
        assert run.state == "running"
        assert run.summary["updates"] == 30  # from the journal
    run_toml.write(Settings(), out, "redis://somewhere:1", private=True)
    run = fedstream.open(out)
    assert (run.state, run.summary["why"]) == ("interrupted", "killed")


def test_a_run_without_a_summary_was_killed_unless_its_journal_is_complete(
    simulated: Path, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "bare" / "journal")
    scribe.update()
    scribe.close()
    assert fedstream.open(tmp_path / "bare").state == "unfinished"
    (tmp_path / "bare" / "run.toml").touch()
    assert fedstream.open(tmp_path / "bare").state == "interrupted"
    assert fedstream.open(simulated / "journal").state == "finished"


def test_the_journal_gives_the_numbers_of_the_summary(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    told = fedstream.open(out).summary
    (out / "summary.json").unlink()
    found = fedstream.open(out).summary
    same = (
        "versions",
        "versions_wanted",
        "updates",
        "mean_staleness",
        "max_staleness",
        "refused",
        "state",
        "why",
        "run",
        "task",
        "strategy",
        "devices",
        "simulated",
        "measured_version",
        "best_accuracy_version",
    )
    assert {name: found[name] for name in same} == {name: told[name] for name in same}
    for name in ("accuracy", "virtual_seconds"):
        assert found[name] == pytest.approx(told[name], abs=1e-3)


def test_a_summary_of_an_older_release_counts_its_updates(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    numbers = json.loads((out / "summary.json").read_text())
    del numbers["updates"]
    (out / "summary.json").write_text(json.dumps(numbers | {"tasks": {"applied": 7, "dead": 1}}))
    assert fedstream.open(out).summary["updates"] == 7


@pytest.mark.parametrize("text", ["", "[]", '{"run": "x"}', '{"run": 1}'])
def test_a_foreign_summary_is_refused_with_its_place(
    text: str, simulated: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    (out / "summary.json").write_text(text)
    with pytest.raises(FedstreamError, match=r"summary\.json: is not a run's summary"):
        _ = fedstream.open(out).summary


def test_a_foreign_table_is_refused_with_its_line(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    (out / "metrics.csv").write_text("version,seconds,updates,accuracy\nzero,0,0,0.5\n")
    with pytest.raises(FedstreamError, match=r"metrics\.csv: line 2: is not a row"):
        _ = fedstream.open(out).metrics


def test_a_torn_line_is_left_out(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    with (out / "metrics.csv").open("a") as table:
        table.write("31,1.0,1,0,0.4,3,task,0.5,0.9")
    assert list(fedstream.open(out).metrics.index) == [0, 10, 20, 30]


def test_a_run_shows_itself(simulated: Path) -> None:
    run = fedstream.open(simulated)
    lines = repr(run).splitlines()
    assert lines[0] == "run        demo, finished: version 30 reached"
    assert lines[2] == "strategy   fedasync"
    assert lines[-1] == f"folder     {simulated}"
    assert run._repr_png_().startswith(PNG)


def test_what_a_recording_says_cannot_become_markup(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "png", lambda _: b"picture")
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    numbers = json.loads((out / "summary.json").read_text())
    hostile = "<script>alert(1)</script>\x1b[2J"
    (out / "summary.json").write_text(json.dumps(numbers | {"why": hostile, "task": hostile}))
    run = fedstream.open(out)
    shown = run._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in shown
    assert 'src="data:image/png;base64,cGljdHVyZQ=="' in shown
    assert "\x1b" not in repr(run)
