"""What is known of a run from what its streams said."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.errors import NoRun
from fedstream.core.records import Best
from fedstream.history import report
from fedstream.history.measurements import measurements, recall
from fedstream.history.observer import Observer
from fedstream.history.timeline import History
from fedstream.strategies import FedAvgSettings
from tests.fedstream.views import CREATED, event, update, version
from tests.journals import Scribe
from tests.support import Hand


def test_republished_version_keeps_its_data() -> None:
    history = History()
    history.publish(version(0))
    history.publish(version(1, update("a")))
    history.publish(version(1))
    assert history.newest == 1
    assert [u.task for u in history.versions[1].updates] == ["a"]


def test_metrics_and_best_values() -> None:
    assert (History().measured, History().best) == (None, {})
    history = History()
    for number, accuracy in ((0, 0.1), (5, 0.9), (10, 0.9), (15, 0.8)):
        history.tell(event("evaluation", version=number, metrics={"accuracy": accuracy}))
    assert history.measured == (15, {"accuracy": 0.8})
    assert history.best["accuracy"] == (5, 0.9)


def test_devices_measure_a_version_beside_the_evaluator(tmp_path: Path) -> None:
    """Before it, after it, or when it has gone on: the table gets every number."""
    history, table = History(), report.Table(tmp_path, 0.0)
    for number in range(21):
        history.publish(version(number))
    steps = [
        ("devices_evaluated", 0, {"devices_loss": 1.0}),
        ("evaluation", 0, {"accuracy": 0.1}),
        ("evaluation", 10, {"accuracy": 0.2}),
        ("devices_evaluated", 10, {"devices_loss": 0.5}),
        ("evaluation", 20, {"accuracy": 0.3}),
        ("devices_evaluated", 15, {"devices_loss": 0.7}),
    ]
    for what, number, metrics in steps:
        history.tell(event(what, version=number, metrics=metrics))
        table.follow(history)
    assert history.measured == (20, {"accuracy": 0.3})
    assert history.evaluations[10] == {"accuracy": 0.2, "devices_loss": 0.5}
    assert history.best == {"devices_loss": (10, 0.5), "accuracy": (20, 0.3)}
    found = {one.version: one.metrics for one in measurements(tmp_path / report.METRICS)}
    assert found == history.evaluations


def test_the_main_metric_stays_when_the_newest_version_lacks_it() -> None:
    """The one that may stop the run, which devices measure less often."""
    history = History()
    history.stop_metric = "devices_loss"
    history.tell(event("evaluation", version=9, metrics={"accuracy": 0.5}))
    history.tell(event("devices_evaluated", version=9, metrics={"devices_loss": 2.0}))
    history.tell(event("evaluation", version=10, metrics={"accuracy": 0.6}))
    assert history.measured == (10, {"accuracy": 0.6})
    assert history.main == "devices_loss"
    assert history.newest_of_main == (9, 2.0)


def test_the_best_value_is_on_the_side_that_the_goal_says() -> None:
    history = History()
    history.goal["score"] = "min"
    for number in range(3):
        metrics = {"rmse": 2.0 + number, "score": 2.0 + number, "unheard": 2.0}
        history.tell(event("evaluation", version=number, metrics=metrics))
    assert history.best == {"rmse": (0, 2.0), "score": (0, 2.0)}
    assert history.main == "rmse"


def test_a_metric_that_is_no_number_is_told_at_once_and_at_the_end() -> None:
    history = History()
    for number, loss in enumerate((math.nan, 1.0, math.nan)):
        metrics = {"mse": math.nan, "loss": loss, "device_mean_mse": math.nan}
        history.tell(event("evaluation", version=number, metrics=metrics))
        told = dict(history.notices(journal=True))
        assert told["nan mse"] == f"mse is not a number at version {number}: see metrics()"
        assert "nan device_mean_mse" not in told
        assert ("nan loss" in told) is (number != 1)
    assert history.never_finite == ["mse", "device_mean_mse"]
    history.forget_measurements()
    assert (history.never_finite, history.best, dict(history.notices(journal=True))) == ([], {}, {})


def test_a_swinging_metric_is_told_once_it_swings_again() -> None:
    history, told = History(), []
    for number, rmse in enumerate((6.0, 1.0, 6.0, 1.0, 6.0)):
        history.tell(event("evaluation", version=number, metrics={"rmse": rmse}))
        told.append(dict(history.notices(journal=True)).get("swings", ""))
    assert told[:4] == [""] * 4
    assert told[4] == "rmse fell back 2 times in 5 measurements: see fedstream journal bisect"
    assert dict(history.notices(journal=False))["swings"] == told[4].partition(":")[0]


def test_staleness_and_devices_are_counted_by_update() -> None:
    history = History()
    history.publish(version(0))
    history.publish(version(1, update("a", staleness=2), update("b", device=3)))
    assert dict(history.staleness()) == {0: 1, 2: 1}
    assert dict(history.updates_by_device()) == {0: 1, 3: 1}
    assert history.mean_staleness == history.recent_staleness() == 1.0


def test_tasks_that_fail_in_a_row() -> None:
    history = History()
    raised = {"reason": "ValueError at x.py:1", "device": 3}
    history.tell(event("error", **raised, text="first"))
    history.tell(event("error", **raised, text="second"))
    history.tell(event("error", reason="ValueError at x.py:1"))  # the evaluator's: no task failed
    history.tell(event("outcome", outcome="given_up"))  # the task of an error ends so: counted once
    history.tell(event("outcome", outcome="dead"))
    assert history.failed == 3
    assert [error.text for error in history.errors.values()] == ["first"]
    history.tell(event("outcome", outcome="refused"))
    assert history.refused == 1
    history.tell(event("outcome", outcome="applied"))
    assert (history.failed, history.refused) == (0, 0)


def test_sites_failures_do_not_count_for_the_pool() -> None:
    history = History()
    for n in range(50):
        raised = event("error", reason=f"ValueError at x.py:{n}", device=3, site="north", text="no")
        history.tell(raised)
        history.tell(event("outcome", outcome="dead", site="north"))
        history.tell(event("outcome", outcome="refused", site="north"))
    assert (history.failed, history.refused) == (0, 0)
    assert len(history.errors) == 20  # a site may call them what it likes
    for site in (None, "pool"):
        history.tell(event("error", reason="ValueError at x.py:1", device=3, site=site, text="yes"))
        history.tell(event("outcome", outcome="dead", site=site))
        history.tell(event("outcome", outcome="refused", site=site))
    assert (history.failed, history.refused) == (4, 2)
    assert history.errors["pool", "ValueError at x.py:1"].text == "yes"


def test_failures_before_resuming_do_not_count() -> None:
    history = History()
    history.tell(event("error", reason="ValueError at x.py:1", device=3))
    history.tell(event("outcome", outcome="refused"))
    history.forget_failures()
    assert (history.failed, history.refused, history.errors) == (0, 0, {})


def test_failed_measurement_counts_as_tried() -> None:
    history = History()
    history.tell(event("evaluation", version=1, metrics={"accuracy": 0.5}))
    history.tell(event("error", version=2, device=7))  # a trainer's
    assert history.tried == 1
    history.tell(event("error", version=2))
    assert history.tried == 2
    history.tell(event("evaluation", version=3, metrics={}))
    assert (history.tried, history.measured) == (3, (1, {"accuracy": 0.5}))


def test_measurement_after_a_failed_one_counts() -> None:
    history = History()
    history.tell(event("error", version=3, reason="metrics: ZeroDivisionError"))
    history.tell(event("evaluation", version=4, metrics={"accuracy": 0.5}))
    assert history.unmeasured is None
    assert history.tried == 4


def test_nan_accuracy_is_never_the_best() -> None:
    history = History()
    for number, accuracy in enumerate((float("nan"), 0.3, float("nan"))):
        history.tell(event("evaluation", version=number, metrics={"accuracy": accuracy}))
    assert history.best["accuracy"] == (1, 0.3)


def test_history_is_bounded() -> None:
    history = History(most=3)
    for number in range(10):
        history.publish(version(number, update(f"t{number}", staleness=number)))
        history.tell(event("evaluation", version=number, metrics={"accuracy": 1 - number / 10}))
    assert list(history.versions) == list(history.evaluations) == [7, 8, 9]
    assert history.newest == 9
    assert (history.mean_staleness, history.recent_staleness(2)) == (8.0, 8.5)
    assert history.best["accuracy"] == (0, 1.0)


def test_rate_falls_while_nothing_arrives() -> None:
    history = History()
    assert history.rate(CREATED) == 0.0
    for number in range(5):
        history.publish(version(number))
    assert history.rate(CREATED + 4) == pytest.approx(1.0)
    assert history.rate(CREATED + 400) == pytest.approx(0.01)


@pytest.mark.parametrize("rule", [None, FedAvgSettings(clients_per_round=2)])
def test_versions_come_from_the_journal_and_measurements_from_the_table(
    rule: FedAvgSettings | None, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "journal", rule)
    for n in range(6):
        scribe.update(n)
        if n == 2:
            scribe.refuse()
            scribe.segment()
    scribe.close()
    history = History()
    recall(history, tmp_path / "journal", tmp_path / report.METRICS)
    assert list(history.versions) == list(range(scribe.version + 1))
    assert [u.device for made in history.versions.values() for u in made.updates] == [*range(6)]
    assert history.measured is None
    history.measure(1, {"accuracy": 0.75, "loss": 0.5, "f1": 0.25})
    history.measure(2, {"accuracy": 0.5, "loss": 1.5})
    history.measure(99, {"accuracy": 1.0})  # the journal does not have it
    history.recall(99, history.versions[1])
    report.Table(tmp_path, created=1.0).write(history)
    again = History()
    recall(again, tmp_path / "journal", tmp_path / report.METRICS)
    assert again.evaluations == {
        1: {"accuracy": 0.75, "loss": 0.5, "f1": 0.25},
        2: {"accuracy": 0.5, "loss": 1.5},
    }
    assert again.best["accuracy"] == (1, 0.75)
    assert again.measured == (2, {"accuracy": 0.5, "loss": 1.5})


async def test_shown_state_is_at_least_as_new_as_the_measurements(hand: Hand) -> None:
    """A display says both in one line."""
    await hand.create()
    observer = Observer(hand.client, hand.keys, look_s=1e9)  # it is never time to look again
    await observer.look()
    await hand.commit(1, await hand.admitted())
    await hand.ledger.tell(event("evaluation", version=1, metrics={"accuracy": 0.5}))
    await observer.catch_up()
    assert observer.history.measured == (1, {"accuracy": 0.5})
    assert observer.view is not None
    assert observer.view.head.version == 1


async def test_the_first_measurement_is_judged_by_the_runs_goals(hand: Hand) -> None:
    await hand.create(goal={"bits": "min"})
    await hand.commit(1, await hand.admitted())
    for number, bits in ((0, 3.0), (1, 5.0)):
        metrics = {"bits": bits}
        await hand.ledger.tell(event("evaluation", version=number, metrics=metrics))
    observer = Observer(hand.client, hand.keys)
    await observer.catch_up()
    assert observer.history.best == {"bits": (0, 3.0)}


async def test_the_best_version_is_known_though_its_event_is_gone(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    for value in (0.9, 0.5):
        told = event("evaluation", version=0, metrics={"accuracy": value})
        await hand.ledger.tell(told, Best("accuracy", value, 0, "digest", "0.1"))
        await client.call("XTRIM", keys.events, "MAXLEN", 1)
    observer = Observer(client, keys)
    await observer.catch_up()
    assert observer.history.evaluations == {0: {"accuracy": 0.5}}
    assert observer.history.best == {"accuracy": (0, 0.9)}


async def test_observer_reads_past_and_new_events(client: Client, keys: Keys, hand: Hand) -> None:
    observer = Observer(client, keys)
    with pytest.raises(NoRun):
        await observer.step(block_ms=0)
    await hand.create()
    await client.call("XADD", keys.models, "*", "m", b"no message")  # nothing to fail about
    await observer.catch_up()
    assert observer.history.newest == 0
    await hand.ledger.tell(event("evaluation", version=0, metrics={"accuracy": 0.5}))
    await observer.catch_up()
    assert observer.history.measured == (0, {"accuracy": 0.5})
    view = await observer.look()
    assert observer.view is view
    assert view.head.version == 0
