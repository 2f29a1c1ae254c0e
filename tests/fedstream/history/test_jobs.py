"""The process that answers a question: what it may not hold up, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from fedstream.history.bisect import Limit, Search
from fedstream.history.model_stats import MeasuredShares
from fedstream.history.ui import jobs
from fedstream.history.ui.jobs import Occupied, PageJob, PageJobs, Workplace
from fedstream.history.ui.questions import Bisection, Distances
from fedstream.history.ui.work import TaskAccess, WorkBounds
from tests.integration.command import TEST_GUARD_S
from tests.support import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]
QUESTION = Bisection("accuracy", Limit(0.9))


def is_there(pid: int) -> bool:
    """Whether a process lives: one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(params=[True, False], ids=["forked", "spawned"])
def place(request: pytest.FixtureRequest, poisoned: Path, tmp_path: Path) -> Workplace:
    """Where a question is worked on by ``task.py`` in the folder."""
    access = TaskAccess(task=f"{tmp_path}/task.py:task")
    return Workplace(poisoned, access, preloads=request.param)


def begun(place: Workplace, folder: Path, source: str) -> PageJob:
    """A question whose task begins a process that would go on, and writes its number to a file."""
    (folder / "task.py").write_text(f"""
import os
import time
from pathlib import Path

if not (pid := os.fork()):  # it has our end of the channel, too
    time.sleep(600)
    os._exit(0)
Path({str(folder / "new")!r}).write_text(str(pid))
Path({str(folder / "new")!r}).rename({str(folder / "pid")!r})
{source}
""")
    job = PageJob(QUESTION, "/bisect")
    job.begin(place)
    return job


async def test_cancelling_ends_what_the_task_has_started(place: Workplace, tmp_path: Path) -> None:
    job = begun(place, tmp_path, "time.sleep(600)")
    await wait_until((tmp_path / "pid").exists, TEST_GUARD_S, "the task")
    pid = int((tmp_path / "pid").read_text())
    assert is_there(pid)
    job.cancel()
    assert job.problem == "cancelled"
    await wait_until(lambda: not is_there(pid), TEST_GUARD_S, "the end of its process")


HALF = """
import gc
from multiprocessing.connection import Connection

for one in gc.get_objects():
    if isinstance(one, Connection) and one.writable and not one.readable:
        os.write(one.fileno(), bytes([0, 0, 1, 0]) + b"half")  # of 256 bytes
"""


@pytest.mark.parametrize(
    ("place", "end", "problem"),
    [
        (True, "os._exit(7)", "exit code 7"),
        (False, "os._exit(7)", "exit code 7"),
        (True, "time.sleep(600)", f"longer than {TEST_GUARD_S:g} s"),
    ],
    ids=["forked-dies", "spawned-dies", "forked-hangs"],
    indirect=["place"],
)
async def test_half_an_answer_is_not_waited_for(
    place: Workplace, tmp_path: Path, end: str, problem: str
) -> None:
    """What the task started holds the channel, so that reading alone would never end."""
    source = f"{HALF}\nPath({str(tmp_path / 'sent')!r}).touch()\n{end}"
    job = begun(replace(place, bounds=WorkBounds(TEST_GUARD_S)), tmp_path, source)
    await wait_until((tmp_path / "sent").exists, TEST_GUARD_S / 2, "half an answer")
    if "longer" in problem:
        job._began -= TEST_GUARD_S  # the limit passes now, however long the task took to begin
    await wait_until(lambda: not job.is_going_on, TEST_GUARD_S / 4, "a problem")
    assert problem in job.problem
    pid = int((tmp_path / "pid").read_text())
    await wait_until(lambda: not is_there(pid), TEST_GUARD_S, "the end of its process")


async def test_an_answer_that_cannot_be_taken_in_is_told(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(PageJob, "_take", too_large)
    job = PageJob(Distances(), "/distances")
    job.begin(Workplace(poisoned, TaskAccess()))
    await wait_until(lambda: not job.is_going_on, TEST_GUARD_S, "a problem")
    assert job.problem == "its answer can't be read: MemoryError: no room"


def test_the_newest_answers_are_kept_and_of_distances_one(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageJob, "begin", lambda *_: None)
    monkeypatch.setattr(jobs, "KEPT", 3)
    asked = PageJobs(Workplace(poisoned, TaskAccess()))
    for version in range(4):
        for address, answer in (("distances", MeasuredShares({}, version)), ("b", Search(version))):
            asked.begin(QUESTION, f"/{address}?until={version}")
            asked._jobs[f"/{address}?until={version}"]._take(answer)
    assert [*asked._jobs] == ["/b?until=2", "/distances?until=3", "/b?until=3"]
    assert asked.shares == MeasuredShares({}, 3)


def test_no_question_begins_after_the_end(poisoned: Path) -> None:
    asked = PageJobs(Workplace(poisoned, TaskAccess()))
    asked.end()
    with pytest.raises(Occupied, match="the server is stopping"):
        asked.begin(QUESTION, "/bisect")


def test_while_torch_is_imported_pages_answer_and_ctrl_c_ends_at_once(
    poisoned: Path, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all its processes, also to the one that imports."""
    (tmp_path / "torch.py").write_text(f"""
from pathlib import Path
from time import sleep

Path({str(tmp_path / "begun")!r}).touch()
while not Path({str(tmp_path / "go")!r}).exists():
    sleep(0.02)
raise ImportError("this was enough")
""")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [sys.executable, "-m", "fedstream", "ui", poisoned],
        text=True,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert server.stdout
        link = re.match(r"(http://127\.0\.0\.1:\d+)/ ", server.stdout.readline())
        assert link

        def read(address: str, data: bytes | None = None) -> str:
            asked = Request(link[1] + address, data)  # noqa: S310  (ours)
            with urlopen(asked, timeout=TEST_GUARD_S / 4) as answer:  # noqa: S310
                return str(answer.read().decode())

        token = re.search(r'name="token" value="(.+?)"', read("/bisect"))
        assert token
        fields = {"metric": "accuracy", "bound": "0.9", "token": token[1], "do": "begin"}
        assert "data-going" in read("/bisect", data=urlencode(fields).encode())
        while not (tmp_path / "begun").exists():
            assert "<h1>Version 3</h1>" in read("/versions/3")
        assert "<h1>Devices</h1>" in read("/devices")
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(TEST_GUARD_S / 4) == 0
    finally:
        (tmp_path / "go").touch()
        if server.returncode is None:
            server.kill()
    assert server.communicate() == ("", "")
