"""What a run's record tells, of a bare journal and of a run's folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstream
from fedstream.cli.options import STRATEGIES
from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Layout, Tensor
from fedstream.history import record, table
from fedstream.journal import JournalError, NotRecorded, Taken
from fedstream.settings.config import read
from fedstream.settings.recording import settings_of
from fedstream.simulation import run as page
from fedstream.strategies import FedBuffSettings
from tests.journals import GOLDEN, Scribe

RULES = STRATEGIES


@pytest.mark.parametrize("rule", RULES)
def test_recorded_journals_give_their_versions_and_updates(rule: str, golden: Path) -> None:
    run = fedstream.open(golden / rule)
    digests = json.loads((GOLDEN / f"{rule}.json").read_text())
    versions, updates = run.versions, run.updates
    assert run.strategy == rule
    assert (run.name, run.task) == ("demo", "digits")
    assert dict(versions["digest"].iloc[1:]) == {int(n): digest for n, digest in digests.items()}
    used = updates[updates["outcome"].isin(["applied", "buffered"])]
    assert len(updates) == 13  # of which one was refused by hand
    assert list(updates.loc[updates["reason"] == "not finite", "outcome"]) == ["refused"]
    assert versions["updates"].sum() == len(used.dropna(subset="version"))
    assert (versions["total_updates"] == versions["updates"].cumsum()).all()
    for version, made in versions.iloc[1:].iterrows():
        of = used[used["version"] == version]
        assert made["updates"] == len(of)
        assert made["staleness"] == pytest.approx(of["staleness"].mean())
        assert made["samples"] == of["samples"].sum()
    assert versions["time"].iloc[0].timestamp() == 2.0
    assert versions["seconds"].iloc[0] == 1.0  # the run was created a second before


@pytest.mark.parametrize("rule", RULES)
def test_each_device_moved_from_x_tau_to_x_new(rule: str, golden: Path) -> None:
    """Models and deltas alike: x_tau plus the delta is x_new, as sent."""
    run = fedstream.open(golden / rule)
    updates = run.updates
    with run.replayer() as replayer:
        sent = {
            moment.message.upload.task: moment.update()
            for moment in replayer
            if isinstance(moment.message, Taken) and moment.message.outcome != "refused"
        }
    assert len(sent) > 5
    for number, task in enumerate(updates["task"]):
        if task not in sent:
            continue
        delta, x_tau = run.delta(number), run.x_tau(number)
        own = np.concatenate([part.numpy().ravel() for part in delta.values()])
        start = np.concatenate([x_tau[name].numpy().ravel() for name in delta])
        was_sent = sent[task].parameters
        if rule in ("fedasync", "fedavg"):  # models
            was_sent = was_sent - start
        np.testing.assert_array_equal(own, was_sent)
    refused = int(updates.index[updates["outcome"] == "refused"][0])
    with pytest.raises(NotRecorded, match="refused are not kept"):
        run.delta(refused)


def test_a_model_has_the_shapes_and_dtypes_of_its_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3).half(), torch.nn.BatchNorm1d(3))
    layout = Layout(
        (
            Tensor("0.weight", (3, 2), "float16", "parameter"),
            Tensor("0.bias", (3,), "float16", "parameter"),
            Tensor("1.weight", (3,), "float32", "parameter"),
            Tensor("1.bias", (3,), "float32", "parameter"),
            Tensor("1.running_mean", (3,), "float32", "buffer"),
            Tensor("1.running_var", (3,), "float32", "buffer"),
            Tensor("1.num_batches_tracked", (), "int64", "counter"),
        )
    )
    scribe = Scribe(tmp_path / "journal", layout=layout)
    scribe.update()
    newest = scribe.progress.state.model
    scribe.close()
    found = fedstream.open(tmp_path).model()
    module.load_state_dict(found)  # strict: every name is there
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in module.state_dict().items()
    }
    assert found["1.running_var"].tolist() == newest.buffers[3:].tolist()
    assert found["1.num_batches_tracked"].item() == newest.integers[0]


def test_an_update_waits_in_a_buffer_until_its_version_is_made(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal", FedBuffSettings(buffer_size=3))
    scribe.update()
    scribe.update()
    run = fedstream.open(tmp_path)
    assert run.updates["version"].isna().all()
    assert list(run.versions.index) == [0]
    scribe.update()  # the run goes on, and the same record shows it
    assert list(run.updates["version"]) == [1, 1, 1]
    assert list(run.versions["total_updates"]) == [0, 3]
    scribe.close()


def test_what_retention_deleted_is_named(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal")
    for _ in range(4):
        scribe.update()
    scribe.segment()
    scribe.update(late=3)
    scribe.close()
    (tmp_path / "journal" / "00000001-000000.journal").unlink()
    run = fedstream.open(tmp_path)
    assert list(run.versions.index) == [4, 5]
    with pytest.raises(JournalError, match="version 2 is no longer kept: the oldest is 4"):
        run.model(2)
    with pytest.raises(JournalError, match="version 1 is no longer kept"):
        run.x_tau(0)


def test_x_tau_of_another_past_is_not_invented(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal")
    scribe.update()
    scribe.update(base="of another past")
    scribe.close()
    with pytest.raises(NotRecorded, match="its version 1 is not the model from which task"):
        fedstream.open(tmp_path).delta(1)


def test_a_simulated_run_tells_its_measurements(simulated: Path) -> None:
    run = fedstream.open(simulated)
    history = run.history()
    assert list(history.index) == list(range(31))
    assert list(run.metrics.index) == [0, 10, 20, 30]
    assert history["accuracy"].dropna().tolist() == run.metrics["accuracy"].tolist()
    assert run.summary["accuracy"] == pytest.approx(run.metrics["accuracy"].iloc[-1], abs=1e-6)
    assert history["time"].isna().all()  # a virtual clock has no date
    assert history["total_updates"].iloc[-1] == 30
    assert run.settings["run"]["versions"] == 30
    assert math.isfinite(run.updates["norm"].iloc[0])


def test_devices_have_their_part_and_their_own_metrics(simulated: Path) -> None:
    run = fedstream.open(simulated)
    devices, updates, metrics = run.devices, run.updates, run.metrics
    assert list(devices.index) == list(range(10))
    assert devices["updates"].sum() == 30
    for device, part in devices.iterrows():
        of = updates[updates["device"] == device]
        assert part["updates"] == len(of)
        assert part["norm"] == pytest.approx(of["norm"].mean(), nan_ok=True)
    assert metrics["test_device_mean_accuracy"].notna().tolist() == [False, False, False, True]
    last = metrics.iloc[-1]
    mean, worst = devices["accuracy"].mean(), devices["accuracy"].min()  # of ten
    assert last["test_device_mean_accuracy"] == pytest.approx(mean, abs=1e-5)
    assert last["test_device_worst_tenth_accuracy"] == pytest.approx(worst, abs=1e-5)
    assert devices["accuracy"].nunique() > 1
    told = f"devices    accuracy mean {mean:.4f}, worst tenth {worst:.4f}, deviation "
    assert told in repr(run)


def test_a_simulation_without_a_journal_still_shows_its_measurements(tmp_path: Path) -> None:
    settings = read(None, ["run.versions=3", "simulation.threads=1"])
    page.run(settings, tmp_path / "run", journal=False, quiet=True)
    run = fedstream.open(tmp_path / "run")
    assert run.state == "finished"
    assert list(run.metrics.index) == [0, 3]
    assert len(run.picture().axes) == 3
    with pytest.raises(JournalError, match="no journal there"):
        _ = run.versions


def test_names_that_a_configuration_leaves_out_come_from_the_journal(
    golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden / "fedbuff", tmp_path / "run" / "journal")
    (tmp_path / "run" / "run.toml").write_text("[strategy]\nserver_lr = 0.5\n")
    run = fedstream.open(tmp_path / "run")
    assert (run.name, run.task, run.strategy) == ("demo", "digits", "fedbuff")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.toml").write_text("")
    with pytest.raises(JournalError, match="no journal there"):
        _ = fedstream.open(tmp_path / "bare").name


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedstreamError, match="no run there: name a run's folder"):
        fedstream.open(tmp_path)
    with pytest.raises(FedstreamError, match="no run there"):
        fedstream.open(tmp_path / "nowhere")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "read_it"),
    [
        ("journal/00000001-000000.journal", lambda out: fedstream.open(out).updates),
        ("run.toml", lambda out: fedstream.open(out).settings),
        ("run.toml", lambda out: settings_of(out, None, trusted=True)),
        ("metrics.csv", lambda out: fedstream.open(out).measurements),
        ("devices.csv", lambda out: fedstream.open(out).devices),
        ("summary.json", lambda out: fedstream.open(out).summary),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(
    name: str, read_it: Callable[[Path], object], simulated: Path, tmp_path: Path
) -> None:
    """Whoever opened it would wait for somebody who writes into it."""
    out = tmp_path / "run"
    shutil.copytree(simulated, out)
    (out / name).unlink(missing_ok=True)
    os.mkfifo(out / name)
    with pytest.raises(FedstreamError, match=rf"{name}.*: cannot be read: .*not a regular file"):
        read_it(out)


def test_without_pandas_the_error_says_what_to_install(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = fedstream.open(golden / "fedasync")
    with pytest.raises(FedstreamError, match=r"pip install 'fedstream\[notebook\]'"):
        _ = run.versions
    assert len(run.model(3)) == 3  # models need no pandas


def test_texts_are_read_once_and_fit_the_rows_though_the_journal_grows(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def grown(journal: Path) -> table.Texts:
        reads.append(journal)
        return table.Texts(*([*texts, "later"] for texts in table.texts(journal)))

    monkeypatch.setattr(record, "texts", grown)
    run = fedstream.open(golden / "fedasync")
    assert len(run.seen().versions) == len(run.versions)
    assert "later" not in [*run.versions["digest"], *run.updates["task"]]
    assert len(reads) == 1
