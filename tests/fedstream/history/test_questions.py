"""Forms that ask for a bisection or another rule: what they mean, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from fedstream.history.bisect import Limit
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.pages import overview
from fedstream.history.ui.questions import (
    Bisection,
    OtherRule,
    bisection,
    first_bisection,
    other_rule,
    rule_of,
    worsening,
)


@pytest.fixture(scope="module")
def run(recorded: Path) -> RecordedRun:
    return RecordedRun(recorded)


def test_a_bisection_as_the_form_has_it(run: RecordedRun) -> None:
    asked = {"metric": "loss", "side": "above", "bound": " 1.5 ", "every": "3"}
    assert bisection(asked, run) == (Bisection("loss", Limit(1.5, above=True), 3), {})
    asked = {"metric": "accuracy", "bound": "0.5", "until": "40"}
    assert bisection(asked, run) == (Bisection("accuracy", Limit(0.5), until=40), {})


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"bound": ""}, "bound", "give either --below X or --above X"),
        ({"bound": "nan"}, "bound", "--below nan: must be a finite number"),
        ({"bound": "1e999"}, "bound", "--below inf: must be a finite number"),
        ({"bound": "half"}, "bound", "'half' is not a number"),
        ({"metric": " "}, "metric", "which metric?"),
        ({"metric": "x" * 201}, "metric", "at most 200 characters, not 201"),
        ({"every": "0"}, "every", "'0' is not a whole number from 1 on"),
        ({"every": "1e3"}, "every", "is not a whole number"),
        ({"until": "61"}, "until", "version 61 is not in the journal, which has 0 to 60"),
    ],
)
def test_what_is_wrong_is_told_of_its_field(
    run: RecordedRun, changed: dict[str, str], field: str, text: str
) -> None:
    question, problems = bisection({"metric": "accuracy", "bound": "0.5"} | changed, run)
    assert question is None
    assert problems.keys() == {field}
    assert text in problems[field]


def test_a_bisection_begins_half_way_from_the_best_to_what_came_after(
    run: RecordedRun, tmp_path: Path
) -> None:
    assert first_bisection(run)["bound"] == ""  # accuracy only rises here
    for rows, metric, side, bound, grave in (
        (("0,0.1", "10,0.9", "20,0.0", "30,0.8"), "accuracy", "below", "0.5", True),
        (("0,0.1", "10,0.984", "20,0.981"), "accuracy", "below", "0.982", False),
        (("0,5.0", "10,1.0", "20,nan", "30,3.1"), "test_loss", "above", "2", True),
    ):
        table = tmp_path / "metrics.csv"
        lines = [f"{row.replace(',', ',1,1,1,')}\n" for row in rows]
        table.write_text("".join([f"version,seconds,updates,total_updates,{metric}\n", *lines]))
        found = first_bisection(RecordedRun(run.path, metrics=table))
        worse = worsening(RecordedRun(run.path, metrics=table))
        assert worse is not None
        text = overview(RecordedRun(run.path, metrics=table))
        assert ("/bisect" in text.partition("</nav>")[2]) == grave
        assert worse.is_grave is grave
        wanted = (metric.removeprefix("test_"), side, bound)
        assert (found["metric"], found["side"], found["bound"]) == wanted
        assert bisection(found, run)[0] is not None


def test_another_rule_as_the_form_has_it(run: RecordedRun) -> None:
    asked = {
        "strategy": "fedasync",
        "alpha": "0.1",
        "staleness": "hinge",
        "from": "20",
        "set": "strategy.staleness.b=2\r\n\r\nstrategy.max_staleness = 9",
        "without": "3, 7;5",
        "every": "6",
    }
    sets = (
        "strategy.staleness.kind=hinge",
        "strategy.alpha=0.1",
        "strategy.staleness.b=2",
        "strategy.max_staleness = 9",
    )
    wanted = OtherRule("fedasync", sets, frozenset({3, 5, 7}), 20, 6)
    assert other_rule(asked, run) == (wanted, {})
    question, _ = other_rule({"without": "3"}, run)
    assert question == OtherRule(None, (), frozenset({3}), None, 1)  # 60 versions: all of them


@pytest.mark.parametrize(
    ("asked", "field", "text"),
    [
        ({}, "strategy", "what is to be different?"),
        ({"every": "5"}, "strategy", "what is to be different?"),
        ({"without": "3, x"}, "without", "'x' is not the number of a device"),
        ({"without": "9" * 5000}, "without", "is not the number of a device"),
        ({"without": "99"}, "without", "device 99 never took part"),
        ({"without": "3", "from": "61"}, "from", "version 61 does not exist yet"),
        ({"without": "3", "until": "61"}, "until", "version 61 is not in the journal"),
        ({"without": "3", "from": "9", "until": "8"}, "until", "version 8 is before version 9"),
        ({"without": "3", "from": "-1"}, "from", "is not a whole number from 0 on"),
        ({"without": "3", "every": "0"}, "every", "is not a whole number from 1 on"),
        ({"alpha": "7"}, "alpha", "strategy.alpha = 7: must be"),
        ({"alpha": "0.1", "set": "strategy.alhpa=1"}, "set", "alhpa"),
        ({"set": "trainer.threads=1"}, "set", "a replay can change only the strategy"),
        ({"set": "strategy.alpha"}, "set", "expected key=value"),
        ({"set": "strategy.alpha=0.1\n" * 51}, "set", "51 settings: at most 50"),
        ({"strategy": "fedasink"}, "strategy", "fedasync"),
        ({"strategy": "scaffold"}, "strategy", "control variates"),
        ({"staleness": "hinge", "set": "strategy.staleness.b=-1"}, "set", "staleness.b"),
    ],
)
def test_what_the_command_would_refuse_is_told_of_its_field(
    run: RecordedRun, asked: dict[str, str], field: str, text: str
) -> None:
    question, problems = other_rule(asked, run)
    assert question is None
    assert problems.keys() == {field}
    assert text in problems[field]


@pytest.mark.parametrize(
    "asked",
    [
        {"strategy": "FILE:Rule"},
        {"staleness": "FILE:Rule"},
        {"set": "strategy.name=FILE:Rule"},
        {"set": 'strategy.name="FILE\\u003aRule"'},
        {"set": "strategy.staleness={kind='FILE:Rule'}"},
        {"set": "strategy.staleness.kind='''FILE:Rule'''"},
    ],
)
def test_no_program_is_loaded_that_a_form_names(
    run: RecordedRun, tmp_path: Path, asked: dict[str, str]
) -> None:
    ran, program = tmp_path / "ran", tmp_path / "program.py"
    program.write_text(f"open({str(ran)!r}, 'w')\n")
    asked = {name: text.replace("FILE", str(program)) for name, text in asked.items()}
    question, problems = other_rule(asked, run)
    assert question is None
    assert "on this page, a rule is one of fedstream's" in " ".join(problems.values())
    assert not ran.exists()


def test_the_other_runs_rule_as_a_question(recorded: Path, other: Path, tmp_path: Path) -> None:
    a, b = RecordedRun(recorded), RecordedRun(other)
    assert rule_of(a, a) == ""
    asked = parse_qs(urlsplit(rule_of(a, b)).query)
    assert asked == {"set": ["strategy.alpha=0.25"]}
    question, _ = other_rule({name: text for name, [text] in asked.items()}, a)
    assert question == OtherRule(None, ("strategy.alpha=0.25",), frozenset(), None, 1)
