"""A simulation in the caller's process, which it leaves as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedstream
from fedstream.trainer.solvers import Trained, Work


class Blobs(fedstream.Task):
    """Two classes of points; device 0 may raise signals when it trains."""

    devices = 3

    def __init__(self, signals: int = 0, failing: bool = False) -> None:
        self.signals = signals
        self.failing = failing
        self.trained = 0
        draw = torch.Generator().manual_seed(1)
        y = torch.arange(60) % 2
        self.data = TensorDataset(torch.randn(60, 2, generator=draw) + y[:, None], y)

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def device_data(self, device: int) -> Dataset[object]:
        return self.data

    def test_data(self) -> Dataset[object]:
        return self.data

    def train(self, model: nn.Module, data: Dataset[object], work: Work) -> Trained:
        self.trained += 1
        if self.trained == 4:
            for _ in range(self.signals):
                signal.raise_signal(signal.SIGINT)
        if self.failing and self.trained >= 4:
            raise RuntimeError("no more")
        return super().train(model, data, work)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [Blobs, f"{__name__}:Blobs"])
def test_arguments_reach_the_task(name: object) -> None:
    failing = {"name": name, "args": {"failing": True}}
    with pytest.raises(fedstream.DataError, match="no more"):
        fedstream.simulate(failing, versions=50, progress=False)


def test_two_in_a_second_have_folders_of_their_own() -> None:
    runs = [fedstream.simulate(Blobs, versions=3, progress=False) for _ in range(2)]
    assert len({run.path for run in runs}) == 2
    for run in runs:
        assert run.path.parent == Path("runs")
        assert run.path.stat().st_mode & 0o777 == 0o700
    first, second = (list(run.versions["digest"]) for run in runs)
    assert first == second  # the same parameters, the same run


def test_the_process_is_left_as_it_was() -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    mask = os.umask(0o022)
    os.umask(mask)
    fedstream.simulate(Blobs(), versions=3, simulation={"threads": 2}, progress=False)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    assert os.umask(mask) == mask


def test_it_runs_inside_an_event_loop_and_in_another_thread() -> None:
    async def inside() -> list[fedstream.RunRecord]:
        here = fedstream.simulate(Blobs, versions=2, out="a", progress=False)
        return [here, await asyncio.to_thread(fedstream.simulate, Blobs, versions=2, out="b")]

    assert [len(run.versions) for run in asyncio.run(inside())] == [3, 3]


def test_the_first_interruption_leaves_the_results_so_far() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(fedstream.Interrupted, match=r"fedstream.open\('stopped'\)") as caught:
        fedstream.simulate(Blobs(signals=1), versions=50, out="stopped", progress=False)
    run = caught.value.run
    assert run.summary["state"] == "interrupted"
    assert 0 < run.versions.index[-1] < 50
    assert set(run.model()) == {"weight", "bias"}
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interruption_ends_it_at_once() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fedstream.simulate(Blobs(signals=2), versions=50, progress=False)
    assert not isinstance(caught.value, fedstream.Interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_keeps_its_hands_off_signals() -> None:
    ended: list[object] = []
    before = signal.getsignal(signal.SIGINT)

    def run() -> None:
        fedstream.simulate(Blobs(), versions=2, out="thread", progress=False)
        ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [before]


def test_an_error_in_the_task_names_the_device() -> None:
    said = r"^no device works: .*: device \d at version \d: RuntimeError: no more"
    with pytest.raises(fedstream.DataError, match=said) as caught:
        fedstream.simulate(Blobs(failing=True), versions=50, progress=False)
    first, frame, *_, last = caught.value.trace.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "test_simulate.py" in frame, "the user's first frame"
    assert last == "RuntimeError: no more"
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == __file__
    assert len(files) == 2, "of ours only the frame that raises"
    assert caught.value.__suppress_context__
