"""`fedstream journal`: what it says of journals that are whole, poisoned, torn and foreign."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedstream.broker.layout import Layout, Model, Tensor
from fedstream.cli import journal as journal_commands
from fedstream.journal import Segment, opened
from fedstream.journal.inspection import model_at, recorded_versions
from fedstream.journal.shares import stats
from fedstream.recordings import pages
from fedstream.recordings.bisect import search
from fedstream.recordings.pages import fitting
from fedstream.strategies import FedAsyncSettings, FedAvgSettings
from fedstream.trainer import vector
from fedstream.trainer.descent import solve
from fedstream.trainer.loading import load_task
from fedstream.trainer.solvers import Sgd, Work
from fedstream.trainer.task import Iid, TaskSettings, initial
from tests.journals import LAYOUT, Scribe
from tests.support import model_of

Command = Callable[..., tuple[int, str, str]]
FIRST, SECOND = "00000001-000000.journal", "00000001-000001.journal"


class By(Scribe):
    """A scribe to whom every model is told: ``coming`` is the next."""

    def __init__(self, folder: Path, coming: Model, **about: Any) -> None:
        self.coming = coming
        super().__init__(folder, layout=coming.layout, **about)

    def drawn(self) -> Model:
        return self.coming.copy()

    def brings(self, device: int, *floats: float, **about: Any) -> None:
        self.coming = model_of(self.layout, *floats)
        self.update(device, **about)


def two_segments(folder: Path, seed: int = 0, **about: Any) -> None:
    """Versions 0 to 6 and 6 to 12, with a refusal in each."""
    scribe = Scribe(folder, seed=seed, **about)
    for _ in range(2):
        for late in range(6):
            scribe.update(late=late % 2)
        scribe.refuse(3)
        if scribe.version == 6:
            scribe.segment()
    scribe.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# show


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


# verify


def test_verify_an_intact_journal(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    for options in ((), ("--no-models",)):
        code, out, said = journal("verify", tmp_path, *options)
        assert (code, said) == (0, "")
        first, second, end = out.splitlines()
        assert first.startswith(f"{FIRST}  versions 0 to 6, 7 records, ")
        assert second.startswith(f"{SECOND}  versions 6 to 12, 7 records, ")
        assert end == "14 records, 13 versions, all intact"


def test_verify_a_torn_tail_is_fine(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[:-5])
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "then a torn tail of" in out
    assert out.endswith("13 records, 13 versions, all intact\n")


@pytest.mark.parametrize("options", [(), ("--no-models",)])
def test_verify_locates_damage_and_continues(
    options: tuple[str, ...], journal: Command, tmp_path: Path
) -> None:
    two_segments(tmp_path)
    with Segment(tmp_path / FIRST) as segment:
        third = list(segment.records())[2]
    flip(tmp_path / FIRST, third.payload + 3)
    code, out, said = journal("verify", tmp_path, *options)
    place = f"{tmp_path / FIRST} at byte {third.place.offset}"
    assert code == 1
    assert out.splitlines()[0] == (
        f"{FIRST}  DAMAGED: {place}: the update does not match its digest"
    )
    assert out.splitlines()[1].startswith(f"{SECOND}  versions 6 to 12, 7 records, ")
    assert "all intact" not in out
    assert said == f"fedstream: {tmp_path}: 1 of 2 segments damaged\n"
    found = json.loads(journal("verify", tmp_path, "--json", *options)[1])
    assert found["whole"] is False
    assert place in found["segments"][0]["damage"]


def test_verify_a_damaged_record_and_a_damaged_checkpoint(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path)
    with Segment(tmp_path / FIRST) as segment:
        second = list(segment.records())[1]
    flip(tmp_path / FIRST, second.place.offset + 40)
    with Segment(tmp_path / SECOND) as segment:
        checkpoint = segment.standing_record
    flip(tmp_path / SECOND, checkpoint.payload)
    code, out, said = journal("verify", tmp_path)
    assert code == 1
    first, last = out.splitlines()
    assert f"damaged record: {tmp_path / FIRST} at byte {second.place.offset}" in first
    assert f"{SECOND} at byte {checkpoint.place.offset}: the checkpoint's model" in last
    assert "2 of 2 segments damaged" in said


def test_verify_compares_models_unless_told_not_to(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedAsyncSettings(alpha=0.3))
    scribe.strategy = FedAsyncSettings(alpha=0.2)  # not what the segment's head says
    scribe.update()
    scribe.close()
    code, out, _ = journal("verify", tmp_path)
    assert code == 1
    said = "version 1 is not reproduced: weight 0.3, the journal says weight 0.2"
    assert said in out
    assert journal("verify", tmp_path, "--no-models")[0] == 0


def test_verify_names_ignored_segments(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    fenced = tmp_path / "00000002-000000.journal"
    scribe.segment(epoch=2)
    scribe.update()
    scribe.close()
    # The third epoch never saw the second: it went on from the first, whose writer then woke up.
    data = fenced.read_bytes()
    fenced.unlink()
    with Segment(tmp_path / FIRST) as segment:
        *_, last = segment.records()
    again = Scribe(tmp_path, epoch=3, predecessor=FIRST, cut=last.end, follows=last.chain.hex())
    again.close()
    fenced.write_bytes(data)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(b"late words")
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "10 bytes after its successor's cut are ignored" in out
    assert f"{fenced.name}  ignored" in out


def test_verify_segments_must_join(journal: Command, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.digests[1] = model_of(scribe.layout, 1.0).digest()
    scribe.progress.state.model.floats[:] = 1.0
    scribe.segment()
    scribe.close()
    code, out, _ = journal("verify", tmp_path)
    assert code == 1
    assert f"{SECOND}" in out.splitlines()[1]
    assert "begins with version 1" in out


def test_verify_without_weights(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path, weights=False)
    code, out, _ = journal("verify", tmp_path)
    assert code == 0
    assert "updates without weights: not all models could be rebuilt" in out


# diff


def written(folder: Path, *updates: tuple[int, float], **about: Any) -> Path:
    """A journal of these updates: device and value."""
    scribe = By(folder, model_of(Layout((Tensor("w", (2,), "float32", "parameter"),)), 0.0),
                **about)  # fmt: skip
    for device, value in updates:
        scribe.brings(device, value)
    scribe.close()
    return folder


UPDATES = ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0))


@pytest.mark.parametrize(
    ("updates", "about", "version", "why", "said"),
    [
        (UPDATES, {}, None, "same", "identical, versions 0 to 4"),
        (UPDATES[:2], {}, 3, "prefix", "identical up to version 2, where B ends"),
        (
            ((1, 1.0), (2, 2.0), (3, 9.0), (4, 4.0)), {}, 3, "update",
            "different updates: device 3 (task task-2",
        ),
        (
            ((1, 1.0), (3, 3.0), (2, 2.0), (4, 4.0)), {}, 2, "order",
            "the same updates in a different order: device 2",
        ),
        (
            UPDATES, {"strategy": FedAsyncSettings(alpha=0.3)}, 1, "weight",
            "in A (staleness 0) and 0.3 in B (staleness 0); strategy.alpha is 0.4 in A, 0.3 in B",
        ),
    ],
)  # fmt: skip
def test_diff(
    updates: tuple[tuple[int, float], ...],
    about: dict[str, Any],
    version: int | None,
    why: str,
    said: str,
    journal: Command,
    tmp_path: Path,
) -> None:
    a, b = written(tmp_path / "a", *UPDATES), written(tmp_path / "b", *updates, **about)
    code, out, _ = journal("diff", a, b)
    assert code == (version is not None)
    assert said in out
    assert out.startswith(f"version {version}: " if version is not None else "identical")
    found = json.loads(journal("diff", a, b, "--json")[1])
    assert (found["why"], found["version"], found["first"]) == (why, version, 0)


def test_diff_of_different_starts(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "a")
    two_segments(tmp_path / "b", seed=1)
    code, out, _ = journal("diff", tmp_path / "a", tmp_path / "b")
    assert (code, out) == (1, "version 0: the initial models differ: seeds 0 and 1\n")


def test_diff_starts_at_the_first_common_version(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "a")
    two_segments(tmp_path / "b")
    (tmp_path / "b" / FIRST).unlink()  # retired
    assert journal("diff", tmp_path / "a", tmp_path / "b")[1] == "identical, versions 6 to 12\n"
    code, out, _ = journal("diff", tmp_path / "a" / FIRST, tmp_path / "b")
    assert (code, out) == (1, "version 7: identical up to version 6, where A ends\n")


def test_diff_without_a_version_in_common(journal: Command, tmp_path: Path) -> None:
    written(tmp_path / "a", UPDATES[0])
    two_segments(tmp_path / "b")
    (tmp_path / "b" / FIRST).unlink()
    code, _, said = journal("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "no version in common: 0..1 and 6..12" in said


def test_diff_where_one_continued_from_redis(journal: Command, tmp_path: Path) -> None:
    written(tmp_path / "a", *UPDATES)
    b = By(tmp_path / "b", model_of(Layout((Tensor("w", (2,), "float32", "parameter"),)), 0.0))
    b.brings(1, 1.0)
    b.adopt()
    b.close()
    found = json.loads(journal("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert (found["why"], found["version"]) == ("adopted", 2)


# bisect


class Digits(By):
    """Devices that learn the digits, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.task = load_task("digits", TaskSettings(partition=Iid()))
        self.module = self.task.model()
        super().__init__(folder, initial(self.task, 0))

    def learns(self, device: int, scale: float = 1.0) -> None:
        """The device trains from the newest model; scaled, it poisons the next."""
        vector.load(self.progress.state.model, self.module)
        work = Work(
            device=device, task="t", version=self.version, seed=self.version, steps=10, epochs=None,
            solver=Sgd(), cancelled=lambda: False,
        )  # fmt: skip
        solve(self.task, self.module, self.task.device_data(device), work)
        self.coming = Model(self.layout)
        vector.read(self.module, self.coming)
        self.coming.floats *= scale
        self.update(device)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Device 7 pushes a scaled model at version 23 of 30."""
    torch.set_num_threads(1)  # more would wait for each other on models as small as this
    folder = tmp_path_factory.mktemp("poisoned")
    scribe = Digits(folder / "journal")
    for version in range(1, 31):
        scribe.learns(7 if version == 23 else version % 5, -1000.0 if version == 23 else 1.0)
        if version == 20:
            scribe.segment()
    scribe.close()
    return folder


@pytest.mark.parametrize("every", [1, 5, 7])
def test_bisect_finds_the_poisoned_update(every: int, journal: Command, poisoned: Path) -> None:
    code, out, said = journal("bisect", poisoned, "--below", 0.9, "--every", every, "--json")
    assert (code, said) == (0, "")
    found = json.loads(out)
    [cause] = found["causes"]
    assert (found["found"], found["version"], cause["device"]) == (True, 23, 7)
    assert found["before"] > 0.9
    assert found["after"] < 0.5
    assert (cause["task"], cause["tau"], cause["staleness"]) == ("task-22", 22, 0)
    assert cause["weight"] == 0.4
    assert cause["distance"] > cause["norm"] > 0
    assert [23, found["after"]] in found["measured"]


def test_bisect_by_a_loss_as_text(journal: Command, poisoned: Path) -> None:
    code, out, _ = journal("bisect", poisoned, "--metric", "loss", "--above", 4.0)
    assert code == 0
    *_, found, cause = out.splitlines()
    assert found.startswith("loss went above 4 with version 23: ")
    assert cause.startswith("device 7, task task-22: trained from version 22 (staleness 0), weight")
    assert "version 1: loss" in out


def test_bisect_needs_a_number(journal: Command, poisoned: Path) -> None:
    code, out, said = journal("bisect", poisoned, "--above", "nan")
    assert (code, out, said) == (2, "", "fedstream: --above nan: must be a number\n")


def test_bisect_takes_the_task_of_the_runs_configuration(
    journal: Command, poisoned: Path, tmp_path: Path
) -> None:
    (poisoned / "run.toml").write_text("[task]\nname = 'nobody'\n")
    code, _, said = journal("bisect", poisoned, "--below", 0.5)
    assert code == 2
    assert "unknown task 'nobody'; choose one of digits, mnist" in said
    assert journal("bisect", poisoned, "--below", 0.5, "--task", "digits")[0] == 0
    config = tmp_path / "other.toml"
    config.write_text("[task]\nname = 'digits'\n")
    assert journal("bisect", poisoned, "--below", 0.5, "--config", config)[0] == 0
    (poisoned / "run.toml").unlink()


@pytest.mark.parametrize(
    ("bad", "every", "version", "measured"),
    [
        ({5, 6, 7, 8}, 4, 5, {0, 4, 5, 8}),
        ({5, 7, 8}, 4, 5, {0, 4, 5, 8}),  # the first crossing of the interval
        ({5}, 4, None, {0, 4, 8, 10}),  # a fall that recovers in between goes unseen
        ({5}, 1, 5, {0, 1, 2, 3, 4, 5}),
        ({0, 1, 2, 3, 10}, 4, 10, {0, 4, 8, 9, 10}),  # what was never good does not fall
    ],
)
def test_bisect_measures_the_named_versions(
    bad: set[int], every: int, version: int | None, measured: set[int], tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path)
    for number in range(10):
        scribe.update()
        if number == 5:
            scribe.segment()
    scribe.close()
    digests: dict[int, str] = {}

    def measure(number: int, model: Model) -> float:
        digests[number] = model.digest()
        return float(number not in bad)

    with opened(tmp_path) as chain:
        found = search(chain, measure, lambda value: value > 0.5, every)
    assert (found.crossing.version if found.crossing else None) == version
    assert found.measured.keys() == measured
    assert digests == {number: scribe.digests[number] for number in measured}


def test_bisect_names_every_update_of_a_round(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedAvgSettings(clients_per_round=2))
    for device in range(6):
        scribe.update(device)
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(chain, lambda version, _: -version, lambda value: value > -2, 3)
    assert found.crossing is not None
    assert (found.crossing.version, [one.device for one in found.crossing.causes]) == (2, [2, 3])


def test_bisect_blames_no_update_for_an_adopted_model(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.adopt()
    scribe.close()
    with opened(tmp_path) as chain:
        found = search(chain, lambda version, _: -version, lambda value: value > -2)
    assert found.crossing is not None
    assert (found.crossing.version, found.crossing.causes) == (4, ())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--below", 0.01), "accuracy never went below 0.01 in the 31 versions measured"),
        (("--below", 1.1), "accuracy was below 1.1 in all 31 versions measured"),
    ],
)
def test_bisect_finds_nothing(
    options: tuple[object, ...], said: str, journal: Command, poisoned: Path
) -> None:
    code, out, _ = journal("bisect", poisoned, *options)
    assert (code, out.splitlines()[-1]) == (1, said)
    code, out, _ = journal("bisect", poisoned, *options, "--json")
    assert (code, json.loads(out)["found"], json.loads(out)["text"]) == (1, False, said)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "give either --below X or --above X"),
        (("--below", 1, "--above", 1), 2, "give either --below X or --above X"),
        (("--below", 1, "--metric", "f1"), 1, "no metric 'f1'; it has accuracy, loss"),
    ],
)
def test_bisect_asked_wrongly(
    options: tuple[object, ...], code: int, said: str, journal: Command, poisoned: Path
) -> None:
    found, _, words = journal("bisect", poisoned, *options)
    assert found == code
    assert said in words
    assert words.count("\n") == 1


def test_bisect_with_a_task_that_raises(journal: Command, poisoned: Path, tmp_path: Path) -> None:
    program = tmp_path / "raising_task.py"
    program.write_text(
        "from fedstream import Task\n"
        "from fedstream.trainer.tasks import digits\n"
        "from fedstream.trainer.task import TaskSettings\n"
        "class Raising(Task):\n"
        "    model = device_data = digits(TaskSettings()).model\n"
        "    def test_data(self): print('words'); return [1]\n"
        "    def metrics(self, model, data): return {'accuracy': 1 / 0}\n"
        "class Untested(Raising):\n"
        "    def test_data(self): return None\n"
        "class Missing(Raising):\n"
        "    def test_data(self): raise OSError('no disk')\n"
    )
    for name, said in (
        ("Raising", "metrics() of version 0 raised ZeroDivisionError: division by zero"),
        ("Untested", "has no test data"),
        ("Missing", "raised OSError: no disk"),
    ):
        task = f"{program}:{name}"
        code, out, words = journal("bisect", poisoned, "--below", 0.5, "--task", task)
        assert (code, out) == (1, "")
        assert said in words.splitlines()[-1]


# export


def test_export_is_the_model_bit_for_bit(journal: Command, poisoned: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    code, out, _ = journal("export", poisoned, "--out", file)
    assert code == 0
    with opened(poisoned) as chain:
        model, digest = model_at(chain, 30)
    assert out == f"version 30 ({digest}) written to {file}\n"
    task = load_task("digits", TaskSettings())
    module = task.model()
    module.load_state_dict(load_file(file))
    again = Model(model.layout)
    vector.read(module, again)
    assert again.digest() == digest
    with safe_open(file, "pt") as opened_file:
        assert opened_file.metadata() == {
            "version": "30", "digest": digest, "run": "demo", "task": "digits"
        }  # fmt: skip
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("version", [0, 3, 6, 9, 12])
def test_export_any_version(version: int, journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    with opened(tmp_path) as chain:
        digest = next(one.digest for one in recorded_versions(chain) if one.version == version)
    file = tmp_path / "model.safetensors"
    assert journal("export", tmp_path, "--version", version, "--out", file)[0] == 0
    with safe_open(file, "pt") as found:
        assert found.metadata()["digest"] == digest
    model = Model(LAYOUT)
    model.floats[:] = load_file(file)["weight"].numpy()
    assert model.digest() == digest


def test_export_keeps_dtypes(journal: Command, tmp_path: Path) -> None:
    layout = Layout(
        (
            Tensor("half", (2, 1), "bfloat16", "parameter"),
            Tensor("wide", (), "float64", "buffer"),
            Tensor("seen", (), "int64", "integer"),
            Tensor("flag", (2,), "bool", "integer"),
        )
    )
    scribe = By(tmp_path, model_of(layout, 1.0, 2.0, 3.0, integers=(7, 0, 1)))
    scribe.close()
    file = tmp_path / "m.safetensors"
    assert journal("export", tmp_path, "--out", file)[0] == 0
    found = load_file(file)
    assert found["half"].dtype is torch.bfloat16
    assert found["half"].tolist() == [[1.0], [2.0]]
    assert (found["wide"].dtype, found["wide"].shape) == (torch.float64, ())
    assert found["seen"].item() == 7
    assert found["flag"].tolist() == [False, True]


def test_export_overwrites_only_with_force(journal: Command, tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    code, _, said = journal("export", tmp_path, "--out", file)
    assert (code, file.read_text()) == (2, "mine")
    assert "already exists" in said
    assert journal("export", tmp_path, "--out", file, "--force")[0] == 0
    assert load_file(file).keys() == {"weight"}
    before = contents(tmp_path)
    segment = tmp_path / "journal" / FIRST
    assert journal("export", tmp_path, "--out", segment, "--force")[0] == 2
    assert journal("export", tmp_path, "--out", tmp_path / "not" / "there.st")[0] == 1
    assert contents(tmp_path) == before


# stats


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


@pytest.mark.parametrize("width", [40, 80, 120, 400])
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


# what is wrong


def commands(tmp_path: Path, journal: Path) -> list[tuple[object, ...]]:
    return [
        ("show", journal), ("verify", journal), ("diff", journal, journal), ("stats", journal),
        ("export", journal, "--out", tmp_path / "x.safetensors"),
        ("bisect", journal, "--below", 0.5, "--task", "digits"),
    ]  # fmt: skip


def foreign(folder: Path) -> None:
    (folder / SECOND).write_text("something else")


def newer(folder: Path) -> None:
    flip(folder / SECOND, 9)  # format 258


def older(folder: Path) -> None:
    with (folder / SECOND).open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(4, "little"))


def missing(folder: Path) -> None:
    flip(folder / FIRST, 9)  # it is not even looked at
    (folder / FIRST).rename(folder / "00000000-000000.journal")


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (foreign, "is not a journal segment"),
        (newer, "format 258, but this release reads format 2: use the release that wrote it"),
        (older, "format 1, but this release reads format 2: use 0.1.0 to read it"),
        (missing, f"{FIRST}: is missing"),
        (emptied, "no journal there"),
    ],
)
def test_bad_input_is_a_one_line_error_and_changes_nothing(
    spoil: Callable[[Path], None], said: str, journal: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    two_segments(folder)
    spoil(folder)
    before = contents(tmp_path)
    for command in commands(tmp_path, folder):
        code, out, words = journal(*command)
        assert (code, out) == (1, ""), command
        assert said in words
        assert words.startswith("fedstream: ")
        assert words.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("show", "--version", "20"), 1, "version 20 does not exist yet: the newest is 12"),
        (("show", "--version", "3"), 1, "version 3 is no longer kept: the oldest is 6"),
        (("show", "--version", "x..3"), 2, "--version x..3: expected a version"),
        (
            ("show", "--outcome", "lost"),
            2,
            "--outcome lost: must be one of applied, buffered, refused, given_up",
        ),
        (("stats", "--sort", "norm"), 2, "--sort norm: must be one of device, applied"),
        (("export", "--out", "x", "--version", "3"), 1, "is no longer kept: the oldest is 6"),
        (("export", "--out", "x", "--version", "20"), 1, "version 20 is not in the journal"),
        (("export", "--out", "x"), 1, "the nearest checkpoint is version 6"),
        (("bisect", "--below", "0.5"), 1, "recorded without their weights"),
    ],
)
def test_missing_versions_and_files_are_reported(
    command: tuple[str, ...],
    code: int,
    said: str,
    journal: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "journal"
    two_segments(folder, weights=False, layout=initial(
        load_task("digits", TaskSettings()), 0).layout)  # fmt: skip
    (folder / FIRST).unlink()  # retired
    before = contents(tmp_path)
    name, *options = command
    found, _, words = journal(name, folder, *options)
    assert found == code
    assert said in words
    assert words.startswith("fedstream: ")
    assert words.count("\n") == 1
    assert contents(tmp_path) == before
