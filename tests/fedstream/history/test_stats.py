"""`fedstream journal stats` and tables: norms, directions, and what fits a terminal."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedstream.cli import journal as journal_commands
from fedstream.core.layout import Layout, Tensor
from fedstream.history import journal_text as pages
from fedstream.history.journal_text import fitting
from fedstream.journal import opened
from fedstream.journal.contributions import stats
from fedstream.strategies import FedAsyncSettings, FedAvgSettings
from tests.fedstream.history.scribes import (
    By,
    Command,
    two_segments,
)
from tests.support import model_of


def test_stats_by_hand(tmp_path: Path) -> None:
    layout = Layout((Tensor("w", (2,), "float32", "parameter"),))
    scribe = By(tmp_path, model_of(layout, 0.0), strategy=FedAsyncSettings(alpha=0.5))
    scribe.brings(1, 2.0, 0.0, loss=0.25)  # x: (1, 0)
    scribe.brings(2, 1.0, 4.0, late=1)  # towards (0, 4), which device 3 undoes
    scribe.brings(3, 1.0, 0.0)
    scribe.refuse(3)
    scribe.close()
    with opened(tmp_path) as chain:
        shares = stats(chain, 1)
    one, two, three = shares[1], shares[2], shares[3]
    assert (one.norm.mean, one.distance.mean, one.loss.mean) == (2.0, 2.0, 0.25)
    assert one.cosine.mean == pytest.approx(0.0)
    assert (two.staleness.mean, two.staleness.most) == (1.0, 1)
    assert two.distance.mean == 4.0
    assert two.cosine.mean == pytest.approx(-1.0)
    assert three.outcomes == {"applied": 1, "refused": 1}
    assert three.cosine.mean is None  # no version followed


def test_unmoved_model_has_no_direction(tmp_path: Path) -> None:
    layout = Layout((Tensor("w", (2,), "float32", "parameter"),))
    scribe = By(tmp_path, model_of(layout, 1.0), strategy=FedAsyncSettings(alpha=0.5))
    scribe.brings(1, 1.0, 1.0)  # what it was given
    scribe.brings(2, 1.0, 1.0)
    scribe.close()
    with opened(tmp_path) as chain:
        shares = stats(chain, 1)
    assert (shares[1].distance.mean, shares[1].cosine.mean) == (0.0, None)


def test_stats_of_rounds_compare_with_later_rounds(tmp_path: Path) -> None:
    layout = Layout((Tensor("w", (2,), "float32", "parameter"),))
    scribe = By(tmp_path, model_of(layout, 0.0), strategy=FedAvgSettings(clients_per_round=2))
    scribe.brings(1, 2.0, 0.0)
    scribe.brings(2, 0.0, 2.0)  # x: (1, 1)
    scribe.brings(1, 2.0, 1.0)
    scribe.brings(2, 4.0, 1.0)  # x: (3, 1)
    scribe.close()
    with opened(tmp_path) as chain:
        shares = stats(chain, 1)
    assert shares[1].outcomes == {"buffered": 2}
    assert shares[1].cosine.mean == pytest.approx(1.0)
    assert shares[2].cosine.mean == pytest.approx(0.0)


def test_stats_as_table_json_and_csv(journal: Command, poisoned: Path, tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    code, out, _ = journal("stats", poisoned, "--sort", "mean_distance", "--csv", file)
    assert code == 0
    assert out.splitlines()[-6].split()[0] == "7"  # whoever poisons stands out
    with file.open() as text:
        rows = list(csv.DictReader(text))
    found = json.loads(journal("stats", poisoned, "--json")[1])
    assert rows[0]["device"] == "7"
    assert [row["device"] for row in found["devices"]] == [0, 1, 2, 3, 4, 7]
    assert sum(int(row["applied"]) for row in rows) == found["updates"] == 30
    assert rows[0].keys() == found["devices"][0].keys()
    code, _, said = journal("stats", poisoned, "--csv", file)
    assert code == 2
    assert "File exists" in said
    assert journal("stats", poisoned, "--sort", "name")[0] == 2


def test_stats_sort_both_ways_and_have_percentiles(journal: Command, tmp_path: Path) -> None:
    layout = Layout((Tensor("w", (2,), "float32", "parameter"),))
    scribe = By(tmp_path, model_of(layout, 0.0), strategy=FedAsyncSettings(alpha=0.5))
    for n in range(1, 11):
        scribe.brings(0, float(n), 0.0)
    scribe.brings(1, 100.0, 0.0)
    scribe.brings(2, 3.0, 4.0)
    scribe.refuse(4)
    scribe.close()

    def devices(*options: object) -> list[dict[str, float]]:
        told = json.loads(journal("stats", tmp_path, "--json", *options)[1])
        return list(told["devices"])

    order = [row["device"] for row in devices("--sort", "max_norm")]
    assert order == [1, 0, 2, 4]
    assert devices("--sort", "max norm") == devices("--sort", "max_norm")  # as tables show it
    order = [row["device"] for row in devices("--sort", "max_norm", "--ascending")]
    assert order == [2, 0, 1, 4]  # what has no norm comes last in any case
    assert [row["device"] for row in devices("--descending")] == [4, 2, 1, 0]
    spread = devices()[0]
    assert [spread[f"{how}_norm"] for how in ("mean", "median", "p90", "max")] == [5.5, 5, 9, 10]
    assert devices()[3]["p90_norm"] is None


def test_show_has_norms_and_distances_and_writes_csv(journal: Command, tmp_path: Path) -> None:
    layout = Layout((Tensor("w", (2,), "float32", "parameter"),))
    scribe = By(tmp_path / "journal", model_of(layout, 0.0), strategy=FedAsyncSettings(alpha=0.5))
    scribe.brings(1, 2.0, 0.0)  # x: (1, 0)
    scribe.segment()
    scribe.brings(2, 1.0, 4.0, loss=0.25)
    scribe.refuse(3, reason="\x1b[2J")
    scribe.close()

    def told(*options: str) -> list[tuple[object, object]]:
        lines = map(json.loads, journal("show", tmp_path, "--json", *options)[1].splitlines())
        return [(x.get("norm"), x.get("distance")) for x in lines if x["kind"] == "taken"]

    long = pytest.approx(17**0.5)
    assert told("--norms") == [(2.0, 2.0), (long, 4.0), (long, None)]
    assert told() == [(None, None)] * 3
    code, out, _ = journal("show", tmp_path, "--norms")
    assert code == 0
    assert "norm" in out.splitlines()[1].split()
    assert "4.123" in out
    file = tmp_path / "records.csv"
    assert (
        journal("show", tmp_path, "--norms", "--csv", file)[1] == f"3 records written to {file}\n"
    )
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [row["distance"] for row in rows] == ["2.0", "4.0", ""]
    assert (rows[1]["device"], rows[1]["loss"], rows[1]["outcome"]) == ("2", "0.25", "applied")
    assert rows[2]["reason"] == "\\x1b[2J"
    assert journal("show", tmp_path, "--csv", file)[0] == 2


@pytest.mark.parametrize("width", [40, 400])
@pytest.mark.parametrize(
    "arguments", [("show",), ("show", "--norms"), ("stats", "--sort", "p90_loss")]
)
def test_table_fits_the_terminal(
    width: int,
    arguments: tuple[str, ...],
    journal: Command,
    poisoned: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "room", lambda: width)
    what, *options = arguments
    code, out, _ = journal(what, poisoned, *options)
    assert code == 0
    lines, hidden, _ = out.partition("no room for ")
    table = lines.splitlines()
    assert max(len(line.rstrip()) for line in table if ".journal:" not in line) <= width
    assert bool(hidden) == (width < 400)
    shown = " ".join(" ".join(table[:3]).split())
    for column in ("device", "p90 loss") if what == "stats" else ("device", "outcome"):
        assert all(word in shown for word in column.split())


def test_most_important_columns_come_first() -> None:
    widths = {"a": 5, "b": 10, "c": 3, "d": 4}
    assert fitting(widths, ["b", "d", "a", "c"], None) == ["a", "b", "c", "d"]
    assert fitting(widths, ["b", "d", "a", "c"], 16) == ["b", "d"]
    assert fitting(widths, ["b", "d", "a", "c"], 15) == ["b", "c"]
    assert fitting(widths, ["b", "d", "a", "c"], 3) == ["b"]


def test_long_command_shows_a_progress_bar(
    journal: Command, poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def progress(what: str, total: int, **_: object) -> Iterator[Callable[[int], None]]:
        told.append((what, total, []))
        yield told[-1][2].append

    monkeypatch.setattr(journal_commands, "progress", progress)
    journal("verify", poisoned)
    journal("stats", poisoned)
    journal("export", poisoned, "--out", tmp_path / "model.safetensors")
    assert [what for what, _, _ in told] == ["verify", "stats", "export"]
    for _, total, done in told:
        assert done == sorted(done)
        assert len(done) > 10
        assert 0.99 * total <= done[-1] <= total


def test_stats_without_weights(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path, weights=False)
    code, out, _ = journal("stats", tmp_path)
    assert code == 0
    assert "12 of 12 updates were recorded without their weights" in out
    found = json.loads(journal("stats", tmp_path, "--json")[1])
    assert found["with_weights"] == 0
    assert found["devices"][0]["mean_distance"] is None
    assert found["devices"][0]["mean_weight"] > 0
