"""Devices' vectors when a journal is replayed, and in the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fedstream.journal import NotRecorded, Segment
from fedstream.journal.replay import Replayer
from fedstream.strategies import (
    AfaCdSettings,
    AfaCsSettings,
    FedAsyncSettings,
    FedBuffSettings,
    Strategy,
)
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, initial
from tests.journals import Scribe
from tests.support import model_of
from tests.updater.vectors.twin import AFA_CS, EACH, FIRST, SCAFFOLD, M, layout_for, two


@EACH
def test_replay_from_the_middle_is_identical(folder: Path, rule: Strategy) -> None:
    scribe = two(folder, rule)
    for begin in range(scribe.version + 1):
        with Replayer(folder, from_version=begin) as replayer:
            made = {m.version: m.model.digest() for m in replayer if m.identical}
        assert made == {n: scribe.digests[n] for n in range(begin + 1, scribe.version + 1)}


@EACH
@pytest.mark.parametrize("begin", [0, 2])
def test_other_rule_does_not_affect_the_recorded_one(
    begin: int, folder: Path, rule: Strategy
) -> None:
    """They share no vector: what one remembers of a device, the other does not."""
    scribe = two(folder, rule)
    before = {path.name: path.read_bytes() for path in folder.glob("*.journal")}
    faster = rule.model_copy(update={"server_lr": 3.0})
    alone: list[list[float]] = []
    for beside in (False, True):
        with Replayer(folder, strategy=faster, from_version=begin, beside=beside) as replayer:
            models = []
            for moment in replayer:
                models.append(moment.model.floats.tolist())
                if moment.original is None:
                    continue
                version = moment.original.state.version
                assert moment.original.state.model.digest() == scribe.digests[version]
        alone = alone or models
        assert models == alone
    without = frozenset({4})
    with Replayer(folder, without=without, from_version=begin, beside=True) as replayer:
        for moment in replayer:
            original = moment.original
            assert original
            assert original.state.memory.devices is not moment.step.after.state.memory.devices
            version = original.state.version
            assert original.state.model.digest() == scribe.digests[version]
    assert {path.name: path.read_bytes() for path in folder.glob("*.journal")} == before


def test_other_rule_does_not_inherit_an_incompatible_sum(folder: Path) -> None:
    """AFA-CS keeps the sum over all devices; FedBuff's begins with zero, from any version."""
    two(folder, AFA_CS)
    buffered = FedBuffSettings(buffer_size=2)
    with Replayer(folder, from_version=2) as replayer:
        updates = [moment.update() for moment in replayer]
        x = next(iter(Replayer(folder, from_version=2))).model
        before = {m.version: m.model.floats.copy() for m in Replayer(folder, until=2)}[2]
    assert x is not None
    with Replayer(folder, strategy=buffered, from_version=2) as replayer:
        found = {m.version: m.model.floats.copy() for m in replayer}
    wanted = before + (updates[0].floats + updates[1].floats) / 2
    assert found[3] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("recorded", "wanted", "said"),
    [
        (FedAsyncSettings(), SCAFFOLD, "scaffold also .* this fedasync run's devices did not"),
        (AFA_CS, SCAFFOLD, "scaffold also .* control variates, which this afa-cs run's"),
        (SCAFFOLD, AFA_CS, "this scaffold run's devices .* which afa-cs does not keep: change"),
    ],
)
def test_incompatible_rule_is_a_one_line_error(
    recorded: Strategy, wanted: Strategy, said: str, folder: Path
) -> None:
    scribe = Scribe(folder, recorded, layout=layout_for(recorded))
    scribe.update()
    scribe.close()
    with (
        pytest.raises(NotRecorded, match=said) as raised,
        Replayer(folder, strategy=wanted) as replayer,
    ):
        list(replayer)
    assert "\n" not in str(raised.value)


def test_other_rule_drops_updates_a_live_updater_would_refuse(folder: Path) -> None:
    scribe = Scribe(folder, FedBuffSettings(buffer_size=1))
    scribe.update(7)
    scribe.update(1, steps=0)
    scribe.update(2)
    scribe.close()
    for rule, used in (
        (AfaCdSettings(buffer_size=1), [7, 2]),  # it divides by the steps
        (AfaCsSettings(buffer_size=1, devices=5), [2]),  # it has no place for device 7
    ):
        with Replayer(folder, strategy=rule) as replayer:
            steps = [moment.step for moment in replayer]
        assert [one.device for step in steps for one in step.made or ()] == used


def test_servers_control_is_always_the_mean_of_the_devices(folder: Path) -> None:
    scribe = Scribe(folder, SCAFFOLD, layout=layout_for(SCAFFOLD))
    rng = np.random.default_rng(1)
    for n in range(40):
        scribe.update(int(rng.integers(M)), late=n % 3, sends="delta")
        if n % 9 == 8:
            scribe.segment()
    scribe.close()
    scribe_began = model_of(layout_for(SCAFFOLD))
    with Segment(folder / FIRST) as segment:
        segment.load(segment.standing_record, scribe_began)
    compared = 0
    with Replayer(folder) as replayer:
        for moment in replayer:
            vectors = moment.step.after.state.memory.devices
            if moment.step.made is None or vectors is None:
                continue
            mean = np.mean([vectors[device] for device in range(M)], axis=0)
            c = moment.model.controls - scribe_began.controls  # a scribe draws version 0
            assert c == pytest.approx(mean, abs=1e-5)
            compared += 1
    assert compared == 20


# the commands


Journal = Callable[..., tuple[int, str, str]]


@EACH
def test_export_contains_only_the_modules_tensors(
    journal: Journal, tmp_path: Path, rule: Strategy, folder: Path
) -> None:
    digits = initial(load_task("digits", TaskSettings()), 0).layout
    scribe = two(folder, rule, layout=digits)
    assert journal("export", folder, "--out", tmp_path / "x.safetensors")[0] == 0
    with safe_open(str(tmp_path / "x.safetensors"), framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {*tensors} == {tensor.name for tensor in digits.tensors}
    model = scribe.progress.state.model
    assert np.concatenate([tensors[t.name].ravel() for t in digits.tensors]).tobytes() == (
        model.parameters.tobytes()
    )


@EACH
def test_verify_finds_a_damaged_vector_and_continues(
    journal: Journal, folder: Path, rule: Strategy
) -> None:
    two(folder, rule)
    newest = folder / "00000001-000002.journal"
    with Segment(newest) as segment:
        record, message = next(segment.vectors())
    data = bytearray(newest.read_bytes())
    data[record.payload] ^= 1
    newest.write_bytes(data)
    code, out, error = journal("verify", folder)
    assert code == 1
    assert message.device == 4
    assert "the vector of device 4 does not match its digest" in " ".join((out + error).split())
