"""`fedstream journal show`: what it says of every record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstream.journal import Segment
from fedstream.strategies import FedAsyncSettings, FedAvgSettings
from fedstream.strategies.adapt import Adapt
from tests.fedstream.history.scribes import (
    FIRST,
    SECOND,
    Command,
    flip,
    two_segments,
)
from tests.journals import Scribe


def test_show_prints_every_record_and_reads_no_payload(
    journal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_segments(tmp_path / "journal")
    monkeypatch.setattr(Segment, "load", None)
    code, out, _ = journal("show", tmp_path)
    assert code == 0
    assert f"{FIRST}: epoch 1, begun with version 0" in out
    assert f"{SECOND}: epoch 1, continued with version 6" in out
    assert "by fedasync (alpha 0.4, alpha_schedule constant, staleness polynomial (a 0.5))" in out
    assert out.count("applied") == 12
    assert out.count("not finite") == 2
    assert "task-13" in out


def test_show_accepts_a_run_a_journal_or_a_segment(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    whole = journal("show", tmp_path)
    assert journal("show", tmp_path / "journal") == whole
    _, out, _ = journal("show", tmp_path / "journal" / SECOND)
    assert FIRST not in out
    assert out.count("applied") == 6


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), [0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9, 10, 11, 12, 12]),
        (("--device", 3), [4, 6, 12]),
        (("--device", 3, "--device", 0), [1, 4, 6, 10, 12]),
        (("--outcome", "refused"), [6, 12]),
        (("--outcome", "refused", "--outcome", "given up"), [6, 12]),
        (("--outcome", "given_up"), []),
        (("--version", "6"), [6, 6, 6]),
        (("--version", "4..7"), [4, 5, 6, 6, 6, 7]),
        (("--version", "7..8", "--outcome", "applied", "--last", 1), [8]),
        (("--last", 3), [11, 12, 12]),
    ],
)
def test_show_filters(
    options: tuple[object, ...], shown: list[int], journal: Command, tmp_path: Path
) -> None:
    two_segments(tmp_path)
    code, out, _ = journal("show", tmp_path, "--json", *options)
    assert code == 0
    assert [json.loads(line)["version"] for line in out.splitlines()] == shown


def test_show_reports_no_matches(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    assert journal("show", tmp_path, "--outcome", "dead") == (0, "no records\n", "")
    assert journal("show", tmp_path, "--outcome", "dead", "--json") == (0, "", "")


def test_reversed_version_range_is_rejected(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    code, out, said = journal("show", tmp_path, "--version", "7..4")
    assert (code, out, said) == (2, "", "fedstream: --version 7..4: 4 is before 7\n")


def test_show_stops_reading_early(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.update()
    at = scribe.writer.size
    scribe.update()
    scribe.writer.sync()
    scribe.update()
    scribe.close()
    flip(tmp_path / FIRST, at + 60)
    assert journal("show", tmp_path, "--version", "1")[0] == 0
    assert journal("show", tmp_path)[0] == 1


def test_show_json_has_every_field_and_no_nan(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedAvgSettings(clients_per_round=3))
    scribe.update(7, loss=float("nan"), samples=5)
    scribe.close_round()
    scribe.close()
    begin, taken, closed = map(json.loads, journal("show", tmp_path, "--json")[1].splitlines())
    assert begin["kind"] == "standing"
    assert begin["strategy"]["name"] == "fedavg"
    assert (begin["segment"], begin["lineage"], begin["predecessor"]) == (FIRST, "line-1", None)
    assert (taken["kind"], taken["device"], taken["outcome"]) == ("taken", 7, "buffered")
    assert (taken["loss"], taken["samples"], taken["digest"]) == (None, 5, None)
    assert taken["payload_bytes"] == 16
    assert "chunks" not in taken  # of a blob in Redis, which no record says anything about
    assert (closed["kind"], closed["version"], closed["round"]) == ("round_closed", 1, 0)
    assert "round end" in journal("show", tmp_path)[1]


def test_unknown_device_is_reported(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    code, out, said = journal("show", tmp_path, "--device", 99, "--json")
    assert (code, out) == (1, "")
    assert said == f"fedstream: {tmp_path}: device 99 never took part (the run has 10 devices)\n"


def test_a_change_of_the_step_is_shown_with_its_scores(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal", FedAsyncSettings(adapt=Adapt()))
    scribe.update()
    scribe.scale_step(0.5)
    scribe.update()
    scribe.close()
    _, out, _ = journal("show", tmp_path)
    assert "alpha 0.2: loss" in out
    _, out, _ = journal("show", tmp_path, "--json")
    [found] = [one for line in out.splitlines() if (one := json.loads(line)).get("at")]
    assert (found["kind"], found["scale"], found["rate"]) == ("step_scaled", 0.5, 0.2)


def quarantines(folder: Path) -> None:
    """Two devices go into quarantine, an update is refused, and one is released."""
    scribe = Scribe(folder)
    scribe.update(3)
    scribe.quarantine(3, 4, why="poison")
    scribe.refuse(3, "device quarantined")
    scribe.segment()
    scribe.quarantine(4, release=True)
    scribe.update(4)
    scribe.close()


def test_quarantines_are_shown_in_order(journal: Command, tmp_path: Path) -> None:
    quarantines(tmp_path / "journal")
    code, out, _ = journal("show", tmp_path, "--json")
    assert code == 0
    kinds = [json.loads(line)["kind"] for line in out.splitlines()]
    assert kinds == [
        "standing",
        "taken",
        "standing",
        "quarantine_set",
        "taken",
        "standing",
        "quarantine_set",
        "taken",
    ]
    first, standing, second = (
        one
        for line in out.splitlines()
        if (one := json.loads(line))["kind"] == "quarantine_set" or one.get("quarantined")
    )
    assert (first["devices"], first["release"], first["why"]) == ([3, 4], False, "poison")
    assert [group["devices"] for group in standing["quarantined"]] == [[3, 4]]
    assert (second["devices"], second["release"]) == ([4], True)
    _, out, _ = journal("show", tmp_path)
    assert [row.split()[2:] for row in out.splitlines() if "quarantine " in row] == [
        ["quarantine", "devices", "3", "4:", "poison"]
    ]
    _, out, _ = journal("show", tmp_path, "--device", "4")
    assert "devices 3 4: poison" in out
    assert "release" in out


def test_journal_with_quarantines_is_verified_and_replayed(
    journal: Command, tmp_path: Path
) -> None:
    quarantines(tmp_path / "journal")
    code, out, _ = journal("verify", tmp_path)
    assert (code, out.count(" bytes: intact")) == (0, 3)
    rows = tmp_path / "rows.csv"
    assert journal("show", tmp_path, "--csv", rows)[0] == 0
    assert "devices 3 4: poison" in rows.read_text()


def test_show_says_what_the_run_began_with_and_whose_rules_it_had(
    journal: Command, tmp_path: Path
) -> None:
    rule, solver = "1f" * 32, "2e" * 32
    scribe = Scribe(
        tmp_path / "journal",
        start="first@2 d1g357",
        sources={"name": rule},
        parts={"solver.kind": solver},
    )
    scribe.update()
    scribe.segment()
    scribe.update()
    scribe.close()
    _, out, _ = journal("show", tmp_path)
    assert out.count("version 0 is first@2 d1g357\n") == 1  # of the first segment alone
    assert out.count(f"strategy.name: SHA-256 of its file {rule}\n") == 2
    assert out.count(f"solver.kind: SHA-256 of its file {solver}\n") == 2
