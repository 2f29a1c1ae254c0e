"""`fedstream replay`: what it says, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest

from fedstream.cli import app as cli
from fedstream.core import reasons
from fedstream.core.errors import ConfigError
from fedstream.history import replay, report
from fedstream.journal import Segment
from fedstream.strategies import (
    AflGuardSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
)
from fedstream.strategies.adapt import Adapt
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, initial
from tests.integration.command import BLOBS
from tests.journals import Scribe
from tests.support import layout_of, model_of


def fedstream(*arguments: object) -> int:
    """The exit code of `fedstream replay`, run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run of digits, 20 versions, as far as a replay needs it."""
    layout = initial(load_task("digits", TaskSettings()), 0).layout
    scribe = Scribe(tmp_path / "run" / "journal", layout=layout)
    for n in range(20):
        scribe.update(late=n % 3)
        if n == 10:
            scribe.segment(epoch=2)
    scribe.close()
    return tmp_path / "run"


def test_every_version_is_compared(
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in (out, out / "journal"):
        assert fedstream(folder) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "20 of 20 versions identical"
        assert said[1].startswith("20 versions from 0 to 20, 20 records, 1 checkpoint passed")
    assert fedstream(out, "--skip-update-digests") == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "20 of 20 versions identical; digests of updates not checked (--skip-update-digests)"
    )
    assert fedstream(out, "--from", 5, "--until", 9, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["begin"], numbers["version"], numbers["made"], numbers["identical"]) == (
        5,
        9,
        4,
        4,
    )


def test_replay_can_measure(
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fedstream(out, "--evaluate-every", 8, "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["version"] for point in points] == [8, 16, 20]
    assert all(0 <= point["original"]["accuracy"] <= 1 for point in points)


def test_first_divergence_ends_the_replay(
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = max((out / "journal").iterdir())
    with Segment(path) as segment:
        *_, last = segment.records()
    with path.open("r+b") as file:
        file.seek(last.payload)
        file.write(b"\x43\x43\x43\x43")
    assert fedstream(out) == 1
    said = capsys.readouterr()
    assert said.out.startswith("19 versions from 0 to 19")
    where = f"at byte {last.place.offset}: the update does not match its digest"
    assert where in said.err
    assert fedstream(out, "--json") == 1
    assert where in json.loads(capsys.readouterr().out)["error"]


def test_other_rule_is_compared_with_the_recorded_one(
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change = ("--set", "strategy.alpha=0.1", "--without", "device=3")
    assert fedstream(out, *change) == 0
    said = capsys.readouterr().out
    assert "accuracy 0." in said
    inherited = sum(n - n % 3 >= 4 for n in range(20) if n % 10 != 3)  # by device 3's in version 4
    assert (
        "the changed rule used 18 of 20 updates, 2 left out; "
        f"{inherited} of the 18 were trained from a model influenced by what was left out"
    ) in said
    assert "the original: 20 of 20 versions identical" in said
    with (out / "replay-1" / "replay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["version"]) for row in rows] == list(range(2, 21, 2))
    assert rows[-1]["version changed"] == "18"  # device 3 had two updates
    assert all(float(row["distance"]) > 0 for row in rows)
    assert (out / "replay-1" / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert fedstream(out, *change) == 0
    assert (out / "replay-2" / "replay.csv").is_file()


def test_inherited_influence_is_counted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def inherited(*arguments: object) -> object:
        options = ("--evaluate-every", 0, "--json", *arguments)
        assert fedstream(tmp_path, *options) == 0
        return json.loads(capsys.readouterr().out)["inherited"]

    scribe = Scribe(tmp_path, FedBuffSettings(buffer_size=2))
    # Device 1's update is in version 2, which only the last two were trained from.
    for device, late in ((0, 0), (2, 0), (1, 1), (3, 1), (4, 1), (5, 0), (6, 1)):
        scribe.update(device, late=late)
    scribe.close()
    assert inherited("--without", "device=1") == 2
    assert inherited("--without", "device=6") is None  # it is in no version
    assert inherited("--without", "device=1", "--from", 2) == 2
    assert inherited("--set", "strategy.server_lr=0.5") is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--set", "run.seed=3"], 2, "a replay can change only the strategy"),
        (["--set", "strategy.alpha=7"], 2, "strategy.alpha = 7 (from --set): must be less"),
        (["--set", "strategy.alfa=1"], 2, "did you mean strategy.alpha?"),
        (["--without", "7"], 2, "--without 7: expected a device"),
        (["--without", "device=70"], 1, "device 70 never took part (the run has 10 devices)"),
        (["--until", "21"], 1, "version 21 does not exist yet; the newest is 20"),
        (
            ["--without", "device=1", "--out", "{out}/journal/x"],
            2,
            "is inside the journal's folder",
        ),
        (["--evaluate-every", "5", "--task", "nope"], 2, "choose one of digits, mnist"),
        (
            ["--evaluate-every", "5", "--task", "{out}/other.py:task"],
            1,
            "model has other tensors",
        ),
        (
            ["--redis", "redis://127.0.0.1:1/0", "--until", "3"],
            2,
            "to live services: leave out --until",
        ),
        (["--speed", "2"], 2, "--speed needs --redis URL"),
        (["--run", "again"], 2, "--run needs --redis URL"),
        (["--without", "device=1", "--out", "{out}/taken"], 2, "already contains replay.csv"),
    ],
)
def test_invalid_options_are_one_line_errors(
    out: Path,
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (out / "other.py").write_text(BLOBS)
    (out / "taken").mkdir()
    (out / "taken" / "replay.csv").touch()
    given = [argument.format(out=out) for argument in arguments]
    assert fedstream(out, *given) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("fedstream: ")
    assert error.count("\n") == 1


def test_without_test_data_only_distances_are_shown(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "without_tests.py").write_text("""
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings
task = load_task("digits", TaskSettings())
task.test_data = lambda: None
""")
    measuring = ("--evaluate-every", 10, "--task", out / "without_tests.py:task")
    assert fedstream(out, *measuring) == 1
    assert "has no test data to measure models with" in capsys.readouterr().err
    assert fedstream(out, *measuring, "--set", "strategy.alpha=0.2") == 0
    said = capsys.readouterr()
    assert "has no test data to measure models with: only their distances are shown" in said.err
    assert said.out.split()[:2] == ["version", "distance"]


def test_no_journal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fedstream(tmp_path) == 1
    assert f"{tmp_path}: there is no journal" in capsys.readouterr().err


def test_outcome_without_a_measurement(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = ("--set", "strategy.name=fedavg", "--evaluate-every", 0)
    monkeypatch.chdir(out)
    assert fedstream(".", *change) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.match(r"distance [0-9.]+ from the original; the original: 20 of 20", said[0])
    assert said[1] == "the changed rule used 13 of 20 updates, dropped 7 (too stale)"
    assert len(said) == 3  # and no files
    assert fedstream("journal", *change, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["updates"] == {"used": 13, "dropped": 7, "left_out": 0, "no_base": 0, "unfit": 0}
    assert numbers["distance"] > 0


def test_rule_of_another_family(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Devices sent models; the first update after the deleted beginning has no known x_tau."""
    change = ("--set", "strategy.name=fedbuff", "--evaluate-every", 0)
    assert fedstream(out, *change) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("the original: 20 of 20 versions identical")
    assert said[1] == (
        "the changed rule used 20 of 20 updates; it got each model minus the recorded one that it "
        "was trained from"
    )
    min((out / "journal").iterdir()).unlink()
    assert fedstream(out, *change, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["converted_to"] == "delta"
    assert numbers["updates"] == {"used": 8, "dropped": 0, "left_out": 0, "no_base": 1, "unfit": 0}
    assert fedstream(out, *change) == 0
    assert "used 8 of 9 updates, could not convert 1 (trained from models that" in (
        capsys.readouterr().out
    )
    assert fedstream(out, "--set", "strategy.name=scaffold") == 1
    assert "also takes control variates" in capsys.readouterr().err


def test_a_wider_radius_cannot_use_what_was_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scribe = Scribe(tmp_path / "journal", AflGuardSettings(radius=1.0))
    taken = [scribe.update(device=device) for device in (3, 0, 1, 2)]
    scribe.close()
    assert [one.reason for one in taken if one.outcome == "refused"] == [
        reasons.NO_ROOT,
        *[reasons.FAR_FROM_ROOT] * 2,
    ]
    change = ("--set", "strategy.radius=9", "--evaluate-every", 0)
    assert fedstream(tmp_path, *change) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "the changed rule used 1 of 1 updates; 3 that were refused (far from the root, no root "
        "update yet) are journalled without their bytes"
    )


def test_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "journal").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given in ("run", "run/journal"):
        assert str(report.beside(Path(given), "replay", None, ())) == "run/replay-1"
    monkeypatch.chdir(tmp_path / "run" / "journal")
    assert report.beside(Path(), "replay", None, ()).resolve() == tmp_path / "run" / "replay-1"


def test_title_says_what_was_changed() -> None:
    assert replay._title("x", (), frozenset({3})) == "x, replayed without device 3"
    sets = ["strategy.alpha=0.1"]
    assert replay._title("x", sets, frozenset()) == "x, replayed with strategy.alpha=0.1"
    both = "x, replayed with strategy.alpha=0.1, without devices 3, 7"
    assert replay._title("x", sets, frozenset({7, 3})) == both


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms, 24,000 versions/s"), (0.0001, "1 ms"), (12.34, "12.3 s, 24 versions/s")],
)
def test_pace_has_two_significant_digits(seconds: float, text: str) -> None:
    made = 296 if seconds > 0.001 else 0
    assert replay._pace(replay.ReplayResult(changed=False, made=made, seconds=seconds)) == text


# what a change means


def test_set_changes_one_recorded_parameter() -> None:
    recorded = FedAsyncSettings(alpha=0.5, max_staleness=4).model_dump(mode="json")
    rule = replay.rule_by(["strategy.alpha=0.1"])
    assert rule
    assert rule(recorded) == FedAsyncSettings(alpha=0.1, max_staleness=4)
    other_kind = replay.rule_by(["strategy.staleness.kind=hinge"])
    assert other_kind
    assert other_kind(recorded).model_dump()["staleness"] == {"kind": "hinge", "a": 10.0, "b": 4}
    other = replay.rule_by(["strategy.name=fedavg"])
    assert other
    assert other(recorded) == FedAvgSettings()
    assert replay.rule_by([]) is None


def test_set_refuses_what_decides_steps_but_not_their_bounds() -> None:
    recorded = FedAsyncSettings(adapt=Adapt()).model_dump(mode="json")
    for key in ("every=20", "rows=5", "metric=accuracy", "factors=[0.1]"):
        with pytest.raises(ConfigError, match=f"{re.escape(key)}: no effect, because a replay"):
            replay.rule_by([f"strategy.adapt.{key}"])
    rule = replay.rule_by(["strategy.adapt.most=0.6", "strategy.adapt.least=0.1"])
    assert rule
    assert rule(recorded) == FedAsyncSettings(adapt=Adapt(most=0.6, least=0.1))


def test_devices() -> None:
    assert replay.devices_of(["device=7", "device=1"]) == {1, 7}
    for wrong in ("7", "device=", "device=-1", "trainer=7"):
        with pytest.raises(ConfigError, match="expected a device"):
            replay.devices_of([wrong])


def test_distance() -> None:
    layout = layout_of(100_000, 3, 2)
    one, other = model_of(layout, 1.0, integers=(0, 0)), model_of(layout, 3.0, integers=(5, 5))
    assert replay.distance(one, other) == pytest.approx(2 * math.sqrt(100_003))
