"""Bisection and 'what if' over HTTP: what a form starts, and who may."""

from __future__ import annotations

import errno
import multiprocessing.context
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.history.bisect import Search
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import question_pages
from fedstream.history.ui.http import HEADERS
from fedstream.history.ui.jobs import PageJob, PageJobs, Workplace
from fedstream.history.ui.questions import OtherRule, keys_in
from fedstream.history.ui.server import PageServer
from fedstream.history.ui.work import TaskAccess, WorkBounds
from tests.fedstream.history.browsing import waiting_task
from tests.fedstream.history.conftest import Page, pages_of
from tests.integration.command import TEST_GUARD_S
from tests.support import wait_until

Client: TypeAlias = TestClient[web.Request, web.Application]

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]
BELOW = {"metric": "accuracy", "side": "below", "bound": "0.9"}


class Site:
    """A client of a run's pages."""

    def __init__(self, client: Client, server: PageServer) -> None:
        self.client = client
        self.server = server

    async def get(self, path: str) -> str:
        answer = await self.client.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert answer.status == 200, path
        return " ".join((await answer.text()).split())

    async def token(self) -> str:
        found = re.search(r'name="token" value="(.+?)"', await self.get("/bisect"))
        assert found
        return found[1]

    async def post(self, path: str, fields: dict[str, str], do: str = "begin") -> tuple[int, str]:
        """The status, and where it leads or what it says."""
        data = fields | {"token": await self.token(), "do": do}
        answer = await self.client.post(path, data=data, allow_redirects=False)
        return answer.status, answer.headers.get("Location") or await answer.text()

    async def answered(self, address: str) -> str:
        """The page at an address, once the work is over."""

        async def over() -> str:
            text = await self.get(address)
            return "" if "data-going" in text else text

        return str(await wait_until(over, TEST_GUARD_S, "an answer"))


def dying(run: Path, folder: Path) -> PageJobs:
    """A task that ends the process that loads it."""
    (folder / "dies.py").write_text("import os\nos._exit(7)\n")
    return PageJobs(Workplace(run, TaskAccess(task=f"{folder}/dies.py:task")))


@pytest.fixture
async def site(poisoned: Path) -> AsyncIterator[Site]:
    server = pages_of(RecordedRun(poisoned))
    async with TestClient(TestServer(server.application())) as client:
        yield Site(client, server)
    server.jobs.end()


async def test_a_bisection_is_started_and_its_culprit_shown_at_its_address(site: Site) -> None:
    status, address = await site.post("/bisect", BELOW | {"every": "5"})
    assert (status, address) == (303, "/bisect?metric=accuracy&side=below&bound=0.9&every=5")
    text = await site.answered(address)
    assert "accuracy went below 0.9 with version 23: 0." in text
    page = Page(text)
    assert {"7", "23", "22", "task-22"} <= set(page.cells)
    links = ("/versions/23?models=1", "/devices/7", "/what-if?without=7")
    assert set(links) <= set(page.links)
    for link in links:
        await site.get(link)
    assert "&#34;limit&#34;" in text or '"limit"' in text  # in its chart
    assert await site.get(address) == text  # it stays there


async def test_another_rule_is_laid_over_the_original(site: Site) -> None:
    status, address = await site.post("/what-if", {"without": "7", "every": "10"})
    assert (status, address) == (303, "/what-if?without=7&every=10")
    text = await site.answered(address)
    assert re.search(r"accuracy 0\.\d+, originally 0\.\d+ \(\+0\.\d+\); distance", text)
    assert "used 29 of 30 updates, 1 left out" in text
    page = Page(text)
    assert page.cells[:5] == ["metric", "original", "changed", "difference", "accuracy"]
    assert re.findall(r'data-chart="(.*?)"', text) == ["what-if-0", "what-if-1", "what-if-apart"]


async def test_nothing_is_started_by_a_page_elsewhere_or_a_link(site: Site) -> None:
    """A form elsewhere can't know the token; a link, a picture or a script can only GET."""
    for token in ({}, {"token": ""}, {"token": "x" * 32}, {"token": "\u00e9"}):
        answer = await site.client.post(
            "/bisect", data=BELOW | {"do": "begin"} | token, allow_redirects=False
        )
        assert (answer.status, "send it once more" in await answer.text()) == (403, True)
    for query in ("metric=accuracy&side=below&bound=0.9", "metric=accuracy&bound=0.9&do=begin"):
        assert "data-going" not in await site.get(f"/bisect?{query}")
    assert site.server.jobs.current is None


async def test_what_is_wrong_is_shown_beside_its_field(site: Site) -> None:
    status, text = await site.post("/what-if", {"without": "99", "alpha": "7"})
    assert status == 422
    for name, said in (("without", "device 99 never took part"), ("alpha", "strategy.alpha")):
        assert re.search(f'name="{name}"[^>]*aria-describedby="{name}-problem"', text)
        assert re.search(f'id="{name}-problem" role="alert">[^<]*{said}', text)
    assert 'value="99"' in text
    assert site.server.jobs.current is None


async def test_one_question_at_a_time_and_it_can_be_cancelled(
    poisoned: Path, tmp_path: Path
) -> None:
    """The other pages answer meanwhile."""
    access = TaskAccess(task=waiting_task(tmp_path))
    server = PageServer(lambda: RecordedRun(poisoned), PageJobs(Workplace(poisoned, access)))
    async with TestClient(TestServer(server.application())) as client:
        site = Site(client, server)
        _, address = await site.post("/bisect", BELOW)
        assert "data-going" in await site.get(address)
        assert (await site.post("/bisect", BELOW))[0] == 303  # it is the same one
        status, text = await site.post("/what-if", {"without": "7"})
        assert status == 409
        assert address.replace("&", "&amp;") in text
        assert "30" in await site.get("/versions/30?models=1")
        assert await site.post("/bisect", BELOW, "cancel") == (303, address)
        assert "No answer: cancelled" in await site.answered(address)
        (tmp_path / "go").touch()
        _, address = await site.post("/what-if", {"without": "7"})
        assert "used 29 of 30 updates" in await site.answered(address)


async def test_answer_that_comes_while_its_page_is_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is on the next page as a whole, not on this one in part."""
    address = "/what-if?without=7"
    job = PageJob(OtherRule(None, (), frozenset({7}), None, 1), address)
    site.server.jobs._jobs[address] = job

    def answered(recorded: Mapping[str, Any]) -> dict[str, Any]:
        job.answer = Search(1)
        return keys_in(recorded)

    monkeypatch.setattr(question_pages, "keys_in", answered)
    text = await site.get(address)
    assert "data-going" in text
    assert "Answered" not in text


async def test_a_task_that_only_the_recording_names_is_not_loaded(
    poisoned: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(poisoned, tmp_path / "run")
    (run / "run.toml").write_text(f"[task]\nname = {waiting_task(tmp_path)!r}\n")
    server = pages_of(RecordedRun(run))
    async with TestClient(TestServer(server.application())) as client:
        site = Site(client, server)
        _, address = await site.post("/bisect", BELOW)
        assert "--trust-recorded-code if you trust this one" in await site.answered(address)


async def test_of_many_answers_the_newest_are_kept(
    poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.history.ui.jobs.KEPT", 1)
    server = PageServer(lambda: RecordedRun(poisoned), dying(poisoned, tmp_path))
    async with TestClient(TestServer(server.application())) as client:
        site = Site(client, server)
        _, first = await site.post("/bisect", BELOW)
        await site.answered(first)
        _, second = await site.post("/bisect", BELOW | {"bound": "0.8"})
        await site.answered(second)
        text = await site.get(first)
        assert "ended with" not in text
        assert 'value="0.9"' in text  # the form is filled in
        assert "ended with" in await site.get(second)


async def test_only_the_versions_that_are_asked_about_count(site: Site) -> None:
    _, address = await site.post("/bisect", BELOW | {"until": "20"})
    assert address.endswith("&until=20")
    assert (
        "accuracy never went below 0.9 after a better value, in the 21 versions"
        in await site.answered(address)
    )
    _, address = await site.post("/what-if", {"without": "2", "until": "20"})
    text = await site.answered(address)
    assert re.search(r"used \d+ of 20 updates", text)
    status, text = await site.post("/what-if", {"without": "2", "until": "31"})
    assert status == 422
    assert re.search('id="until-problem" role="alert">version 31 is not in the journal', text)


async def test_work_that_takes_too_much_memory_is_ended(poisoned: Path, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "from time import sleep\nheld = bytearray(1 << 31)\nsleep(600)\n"
    )
    access = TaskAccess(task=f"{tmp_path}/greedy.py:task")
    where = Workplace(poisoned, access, WorkBounds(memory=1 << 30), preloads=False)
    server = PageServer(lambda: RecordedRun(poisoned), PageJobs(where))
    async with TestClient(TestServer(server.application())) as client:
        site = Site(client, server)
        _, address = await site.post("/bisect", BELOW)
        told = "it took more than 1,024 MiB (page.question_bytes)"
        assert told in await site.answered(address)
        assert server.jobs.current is None


async def test_work_that_cannot_be_started_is_over(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the place to the next question."""

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Pipe", none_left)
    server = PageServer(lambda: RecordedRun(poisoned), PageJobs(Workplace(poisoned, TaskAccess())))
    async with TestClient(TestServer(server.application())) as client:
        site = Site(client, server)
        _, address = await site.post("/bisect", BELOW)
        assert "it can&#39;t be started: Too many open files" in await site.answered(address)
        assert server.jobs.current is None


async def test_a_package_that_is_missing_is_named(poisoned: Path, tmp_path: Path) -> None:
    """As where only services are installed that do not train."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    sys.path.insert(0, str(tmp_path))  # a spawned process has it too
    try:
        jobs = PageJobs(Workplace(poisoned, TaskAccess(), preloads=False))
        server = PageServer(lambda: RecordedRun(poisoned), jobs)
        async with TestClient(TestServer(server.application())) as client:
            site = Site(client, server)
            _, address = await site.post("/bisect", BELOW)
            assert "this takes the package torch" in await site.answered(address)
    finally:
        sys.path.remove(str(tmp_path))
