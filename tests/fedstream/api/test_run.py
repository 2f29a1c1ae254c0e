"""A live run from Python: real processes, a real Redis, and a caller that is left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import fedstream
from fedstream.api import progress
from fedstream.journal import SUFFIX
from tests.preloaded import descendants
from tests.support import wait_until

pytestmark = pytest.mark.process

SCRIPT = """
    import asyncio
    import sys

    import torch
    from torch.utils.data import TensorDataset

    import fedstream

    SHIFT = 3.0  # a global of this script, which the services need


    class Mine(fedstream.Task):
        devices = 4

        def model(self):
            print("a task may print")
            return torch.nn.Linear(2, 2)

        def device_data(self, device):
            y = torch.arange(40) % 2
            return TensorDataset(torch.randn(40, 2) + SHIFT * y[:, None], y)

        test_data = lambda self: self.device_data(0)


    async def main():
        return fedstream.run(Mine(), versions=int(sys.argv[1]), trainers=1, out=sys.argv[2])


    run = asyncio.run(main())
    print(run.path, run.summary["state"], list(run.history().index)[-1])
"""


@pytest.fixture
def script(tmp_path: Path, python: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script that is not guarded by ``if __name__ == "__main__"``."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(SCRIPT))
    with ExitStack() as processes:

        def start(*arguments: object) -> subprocess.Popen[str]:
            process = processes.enter_context(
                subprocess.Popen(
                    [python, "mine.py", *map(str, arguments)],
                    cwd=tmp_path,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            processes.callback(process.kill)
            return process

        yield start


def test_an_unguarded_script_with_a_task_of_its_own_and_an_event_loop(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    started = script(12, "out")
    out, err = started.communicate(timeout=120)
    assert started.returncode == 0, err
    assert out == "out finished 12\n"  # and nothing else on stdout
    file = tmp_path / "out" / "task.pickle"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    config = (tmp_path / "out" / "run.toml").read_text()
    assert f'name = "{file}:Mine"' in config


async def test_a_caller_that_is_killed_leaves_results_and_no_process(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path, python: Path
) -> None:
    started = script(100_000, "killed")
    journal = tmp_path / "killed" / "journal"
    await wait_until(
        lambda: any(file.stat().st_size > 100_000 for file in journal.glob(f"*{SUFFIX}")), 60
    )
    family = descendants(psutil.Process(started.pid), python.parent)
    assert family
    started.kill()
    started.communicate()
    await wait_until((tmp_path / "killed" / "summary.json").exists, 30)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    run = fedstream.open(tmp_path / "killed")
    assert run.summary["state"] == "interrupted"


@pytest.fixture
def at_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Does something to this process when the progress reaches a version."""

    def when(version: int, act: Callable[[], object]) -> None:
        class ProgressDisplay(progress._Silent):
            done = False

            def update(self, done: int, text: str) -> None:
                if done >= version and not ProgressDisplay.done:
                    ProgressDisplay.done = True
                    act()

        monkeypatch.setattr(progress, "_Silent", ProgressDisplay)

    return when


@pytest.mark.usefixtures("quick")
def test_an_interruption_stops_the_run_in_order(
    tmp_path: Path, at_version: Callable[[int, Callable[[], object]], None]
) -> None:
    processes = set(psutil.Process().children(recursive=True))
    at_version(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(fedstream.Interrupted, match=r"fedstream\.open\('.*/out'\)") as caught:
        fedstream.run(versions=100_000, trainers=1, out=tmp_path / "out", progress=False)
    run = caught.value.run
    assert run.summary["why"] == "by SIGINT"
    assert run.versions.index[-1] >= 3
    assert signal.getsignal(signal.SIGINT) is before
    assert set(psutil.Process().children(recursive=True)) <= processes
