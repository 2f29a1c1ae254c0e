"""The pages as a browser gets them, and what a server on this machine refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.history.charts import of_device
from fedstream.history.model_stats import AHEAD
from fedstream.history.models import Unwanted
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import pages
from fedstream.history.ui.http import HEADERS
from fedstream.journal import opened
from fedstream.journal.contributions import stats
from tests.fedstream.conftest import Command
from tests.fedstream.history.conftest import CHANGED, VERSIONS, Page, pages_of
from tests.fedstream.history.scribes import FIRST, two_segments
from tests.journals import GOLDEN, Scribe
from tests.support import wait_until

Client: TypeAlias = TestClient[web.Request, web.Application]
Get = Callable[[str], Awaitable[tuple[int, str]]]


@pytest.fixture
async def client(recorded: Path) -> AsyncIterator[Client]:
    app = pages_of(RecordedRun(recorded)).application()
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.fixture
def get(client: Client) -> Get:
    async def ask(path: str) -> tuple[int, str]:
        answer = await client.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
        return answer.status, await answer.text()

    return ask


async def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(get: Get) -> None:
    """From the overview on, 150 pages far; no page has anything that the policy would refuse."""
    seen, todo = {"/"}, ["/"]
    while todo and len(seen) < 150:
        status, text = await get(todo[0])
        assert status == 200, todo[0]
        page = Page(text)
        assert page.inline == [], todo[0]
        for one in page.loaded:
            assert one.startswith("/static/"), one
            assert (await get(one))[0] == 200, one
        ours = [one for one in page.links if not one.startswith("#")]
        assert all(one.startswith("/") and not one.startswith("//") for one in ours), ours
        todo = [*todo[1:], *(one for one in dict.fromkeys(ours) if one not in seen)]
        seen |= {*ours}
    kinds = {re.sub(r"\d+", "N", path.partition("?")[0]) for path in seen}
    assert {"/", "/versions/N", "/updates", "/devices", "/devices/N"} <= kinds


async def test_a_version_with_its_updates_and_what_was_refused_meanwhile(get: Get) -> None:
    status, text = await get("/versions/13?to=10")
    page = Page(text)
    assert status == 200
    assert "refused: not finite" in page.cells
    assert "<dt>test accuracy, last measured</dt><dd>0.1000 at version 10</dd>" in text
    assert "cosine" not in page.cells  # no model was made
    assert "/versions/13?models=1&amp;to=10" in text
    _, text = await get("/versions/13?to=10&models=1")
    page = Page(text)
    assert {"cosine", "weight", "distance to version 10"} <= set(page.cells)
    assert Page((await get("/versions/13?to=10"))[1]).cells == page.cells  # it is remembered


async def test_the_next_version_is_ready_before_it_is_asked_for(recorded: Path) -> None:
    site = pages_of(RecordedRun(recorded))
    async with TestClient(TestServer(site.application())) as client:
        assert "cosine" not in Page(await _text(client, "/versions/30")).cells
        assert "cosine" in Page(await _text(client, "/versions/30?models=1")).cells
        await wait_until(lambda: site.run.knows(31), what="the next version")
        assert "cosine" in Page(await _text(client, "/versions/31")).cells
        assert "over the 10 versions after this one" in await _text(client, "/versions/30")
        last = await _text(client, f"/versions/{VERSIONS - 1}?models=1")
        assert "over the 1 version after this one" in last


async def test_the_newest_version_is_ready_before_anybody_looks(recorded: Path) -> None:
    site = pages_of(RecordedRun(recorded))
    async with TestClient(TestServer(site.application())):
        await wait_until(lambda: site.run.knows(VERSIONS), what="the newest version")
        assert not site.run.knows(30)


async def test_looking_ahead_gives_way_to_who_asks_and_to_the_end(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def forever(_run: RecordedRun, _version: int, _step: int, is_idle: Callable[[], bool]) -> None:
        asked.set()
        while is_idle():
            time.sleep(0.001)
        raise Unwanted

    monkeypatch.setattr(RecordedRun, "prepare_neighbours", forever)
    site = pages_of(RecordedRun(recorded))
    async with asyncio.timeout(60):
        async with TestClient(TestServer(site.application())) as client:
            for version in (30, 31, 32):
                assert "cosine" in await _text(client, f"/versions/{version}?models=1")
                await wait_until(asked.is_set)
                asked.clear()
    assert site.is_ending


async def test_curves_over_time(get: Get) -> None:
    """At each point the version to which it leads; the table has both."""
    _, text = await get("/?over=time")
    first = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', text)[0])
    assert first["leads"] == [0, 10, 20, 30, 40, 50, 60]
    assert first["unit"] == "seconds since the beginning"
    assert first["x"][1] > 10
    assert first["x"] == sorted(first["x"])
    assert Page(text).cells[:3] == ["seconds since the beginning", "version", "accuracy"]
    assert '<a href="/?over=time" aria-current="true">' in text
    _, text = await get("/devices/3?over=time")
    assert "seconds since the beginning" in Page(text).cells
    assert "seconds since the beginning" not in Page((await get("/devices/3"))[1]).cells


async def test_an_accuracy_that_fell_leads_to_bisect(recorded: Path, tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    rows = ("0,0,0,0,0.1", "20,1,20,20,0.9", "40,2,20,40,0.2")
    table.write_text("version,seconds,updates,total_updates,accuracy\n" + "\n".join(rows) + "\n")
    app = pages_of(RecordedRun(recorded, metrics=table)).application()
    async with TestClient(TestServer(app)) as client:
        text = await _text(client, "/")
        assert "accuracy was 0.9, and 0.2 afterwards" in text
        assert Page(text).links.count("/bisect") == 2  # in the navigation too
        assert 'name="bound" inputmode="decimal" size="8" required value="0.6"' in await _text(
            client, "/bisect"
        )


def test_models_take_less_memory_in_a_service(recorded: Path) -> None:
    run = RecordedRun(recorded, is_live=True)
    assert 4 * run.models.memory < RecordedRun(recorded).models.memory
    assert run.models.model(55).digest() == RecordedRun(recorded).models.model(55).digest()
    assert run.models.reopened().memory == run.models.memory


def test_curves_beside_the_live_page_lead_to_each_other(recorded: Path) -> None:
    links = Page(pages.overview(RecordedRun(recorded, is_live=True))).links
    assert {"/overview", "/overview?over=time"} <= set(links)


async def test_version_0_and_the_newest(get: Get) -> None:
    assert "no update made this version" in (await get("/versions/0"))[1]
    _, text = await get(f"/versions/{VERSIONS}")
    assert f'href="/versions/{VERSIONS + 1}"' not in text
    assert "refused: too stale" not in Page(text).cells  # that came after it


async def test_updates_by_device_outcome_reason_and_versions(get: Get) -> None:
    for query, count in (
        ("device=7", 7),
        ("device=7&outcome=refused", 1),
        ("reason=too%20stale", 1),
        ("from=10&until=19", 11),
        ("device=99", 0),
    ):
        status, text = await get(f"/updates?{query}")
        assert status == 200
        assert f"<p>{count} updates" in text
        assert text.count('<th scope="row">') == count


async def test_updates_go_on_on_the_next_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.history.ui.pages.PAGE", 10)
    two_segments(tmp_path / "journal")
    app = pages_of(RecordedRun(tmp_path)).application()
    async with TestClient(TestServer(app)) as client:
        text = await (await client.get("/updates?from=1")).text()
        assert "14 updates, of which 1 to 10 are shown" in text
        [after] = [one for one in Page(text).links if "page=1" in one]
        assert after == "/updates?from=1&page=1"
        assert "of which 11 to 14" in await (await client.get(after)).text()


async def test_outcomes_are_shown_in_words_and_asked_for_by_name(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update(1)
    scribe.refuse(2, "run finished", outcome="given_up")
    scribe.close()
    site = pages_of(RecordedRun(tmp_path))
    async with TestClient(TestServer(site.application())) as client:
        page = Page(await _text(client, "/"))
        assert "given up" in page.cells
        [given_up] = [one for one in page.links if "given_up" in one]
        text = await _text(client, given_up)
        assert "given up: run finished" in Page(text).cells
        assert '<option value="given_up" selected>given up</option>' in text


async def test_devices_are_sorted_and_the_outlier_is_marked(get: Get) -> None:
    _, text = await get("/devices?sort=-norm")
    first = re.search(r'<th scope="row" data-value="\d+"><a href="/devices/(\d+)">', text)
    assert first
    assert first[1] == "3"
    assert Page(text).cells.count("▲ 50") == 2  # the mean and the most
    assert 'aria-sort="descending"' in text
    assert re.search(
        r'<td data-value="50.0" class="heat above3 outlier" title="robust z-score [\d.]+">▲ 50<',
        text,
    )
    _, text = await get("/devices/3")
    assert "It stands out in" in text
    assert (await get("/devices?sort=nothing"))[0] == 404


async def test_distances_and_cosines_of_devices_are_measured_when_asked(tmp_path: Path) -> None:
    """Here no update's size was noted, as without the guard against unusual ones."""
    two_segments(tmp_path)
    run = RecordedRun(tmp_path)
    with opened(tmp_path) as chain:
        share = stats(chain, AHEAD)[1]
    site = pages_of(run)
    async with TestClient(TestServer(site.application())) as client:
        for path in ("/devices", "/devices/1"):
            text = await _text(client, path)
            assert "/distances" in Page(text).links
            assert "device-norm" not in text
        token = re.search('name="token" value="([^"]+)"', await _text(client, "/distances"))
        assert token
        form = {"token": token[1], "do": "begin"}
        await client.post("/distances", data=form, allow_redirects=False)
        await wait_until(lambda: site.jobs.current is None, 60, "the distances")
        device = await _text(client, "/devices/1")
        drift = {one.name: one for one in of_device(run, 1)}
        assert list(drift)[:3] == ["device-sent", "device-norm", "device-cosine"]
        assert all(f'data-chart="{name}"' in device for name in drift)
        assert drift["device-sent"].series[0].values == list(share.norm.values)
        cosines = drift["device-cosine"]
        assert cosines.series[0].values == list(share.cosine.values)
        assert cosines.x == drift["device-sent"].x[: len(cosines.x)]  # later ones wait for others
        assert len(cosines.x) < len(drift["device-sent"].x)
        text = await _text(client, "/devices")
        wanted = {f"{one.mean:.4g}" for one in (share.norm, share.distance, share.cosine)}
        assert wanted <= {cell.strip("▲▼ ") for cell in Page(text).cells}


@pytest.mark.parametrize(
    "name", ["fedavg", "fedbuff", "quarantine", "wire-scaffold", "models-int8"]
)
async def test_every_kind_of_recording_has_pages(tmp_path: Path, name: str) -> None:
    """Rounds, buffers, quarantines, encoded updates with control variates, encoded models."""
    for packed in (GOLDEN / name).glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    run = RecordedRun(tmp_path)
    made = json.loads((GOLDEN / f"{name}.json").read_text())
    async with TestClient(TestServer(pages_of(run).application())) as client:
        for version, digest in made.items():
            answer = await client.get(f"/versions/{version}?models=1&to=0")
            text = await answer.text()
            assert answer.status == 200
            assert digest[:16] in text
            assert {"norm", "cosine"} <= {cell.split()[0] for cell in Page(text).cells if cell}
        assert 'class="warning"' not in text
        for path in ("/", "/updates", "/devices"):
            assert (await client.get(path)).status == 200, path


async def _text(client: Client, path: str) -> str:
    return await (await client.get(path)).text()


async def test_an_unknown_address_is_answered_with_a_page(get: Get) -> None:
    for path in (
        "/versions/61",
        "/versions/-1",
        "/versions/9999999999999999999999",
        "/devices/99",
        "/devices/abc",
        "/updates?page=x",
        "/updates?outcome=eaten",
        "/static/../pages.py",
        "/static/x",
        "/etc",
    ):
        status, text = await get(path)
        assert (status, 'role="alert"' in text) == (404, True), path
        assert "<h1>Not found</h1>" in text


async def test_form_without_javascript(client: Client) -> None:
    """The field that was changed counts; a version that is not there leads to the nearest."""
    for asked, wanted in (
        ("version=5&at=5&number=7", "/versions/7"),
        ("version=9&at=5&number=5&to=2", "/versions/9?to=2"),
        ("version=5&at=5&number=9999", f"/versions/{VERSIONS}"),
        ("", f"/versions/{VERSIONS}"),
    ):
        answer = await client.get(f"/versions?{asked}", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, wanted)


@pytest.mark.parametrize(
    ("path", "heading", "wrong"),
    [
        ("/versions?version=5&at=5&number=abc", 5, {"number": "abc"}),
        ("/versions?version=9&at=5&number=5&to=x", 9, {"to": "x"}),
        ("/versions?number=-3&to=9999", VERSIONS, {"number": "-3", "to": "9999"}),
        ("/versions/7?to=9999", 7, {"to": "9999"}),
        ("/versions?version=abc&at=5", VERSIONS, {"version": "abc"}),
    ],
)
async def test_what_is_wrong_with_a_version_is_told_beside_the_form(
    get: Get, path: str, heading: int, wrong: dict[str, str]
) -> None:
    status, text = await get(path)
    assert (status, f"<h1>Version {heading}</h1>" in text) == (422, True)
    for name, value in wrong.items():
        if name != "version":  # a slider, which can't hold such a value
            field = re.search(f'<input name="{name}".*?>', text)
            assert field
            assert f'value="{value}"' in field[0]
            assert f'aria-describedby="{name}-problem"' in field[0]
        said = "is not in the journal" if value == "9999" else "give a whole number"
        assert re.search(f'id="{name}-problem" role="alert">[^<]*{said}', text)


async def test_two_runs_side_by_side_and_where_they_part(recorded: Path, other: Path) -> None:
    run = RecordedRun(recorded, other=RecordedRun(other))
    async with TestClient(TestServer(pages_of(run).application())) as client:
        text = " ".join((await (await client.get("/beside")).text()).split())
    assert f"They part with version {CHANGED + 1}: the same update of device 5 weighs" in text
    assert f"Version {CHANGED + 1} of A" in text
    assert {"/bisect", "/what-if?set=strategy.alpha%3D0.25"} <= set(Page(text).links)
    assert f"Version {CHANGED + 1} of B" in text
    charts = re.findall(r'data-chart="(.*?)"', text)
    assert charts == ["metric-accuracy", "metric-loss", "loss"]
    assert Page(text).cells[:4] == ["version", "A", "B", "0"]


async def test_a_run_beside_its_own_beginning(recorded: Path, tmp_path: Path) -> None:
    """The shorter one is being written."""
    scribe = Scribe(tmp_path / "journal")
    scribe.update()
    scribe.writer.sync()
    shutil.copytree(tmp_path / "journal", tmp_path / "was" / "journal")
    run = RecordedRun(tmp_path, other=RecordedRun(tmp_path / "was"))
    async with TestClient(TestServer(pages_of(run).application())) as client:
        assert "identical, versions 0 to 1" in await (await client.get("/beside")).text()
        scribe.update()
        scribe.close()
        text = await (await client.get("/beside")).text()
    assert "They part with version 2: identical up to version 1, where B ends" in text
    assert "Version 2 of A" in text
    assert "of B" not in text


async def test_runs_without_a_version_in_common(tmp_path: Path) -> None:
    two_segments(tmp_path / "a" / "journal")
    (tmp_path / "a" / "journal" / FIRST).unlink()
    scribe = Scribe(tmp_path / "b" / "journal")
    scribe.update()
    scribe.close()
    run = RecordedRun(tmp_path / "a", other=RecordedRun(tmp_path / "b"))
    async with TestClient(TestServer(pages_of(run).application())) as client:
        answer = await client.get("/beside")
        assert (answer.status, "no version in common" in await answer.text()) == (200, True)


async def test_without_another_run_there_is_nothing_beside(get: Get) -> None:
    status, text = await get("/beside")
    assert (status, "fedstream ui RUN OTHER" in text) == (404, True)
    assert "/beside" not in Page(text).links


async def test_a_run_that_goes_on_is_shown_as_it_stands(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal")
    scribe.update()
    scribe.writer.sync()
    app = pages_of(RecordedRun(tmp_path)).application()
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/versions/2")).status == 404
        scribe.update()
        scribe.close()
        assert (await client.get("/versions/2?models=1")).status == 200


async def test_models_stay_known_while_a_run_goes_on(tmp_path: Path) -> None:
    """But for those of the newest versions, which look at later ones; none of another run."""
    scribe = Scribe(tmp_path / "journal")
    for _ in range(40):
        scribe.update()
    scribe.writer.sync()
    run = RecordedRun(tmp_path)
    for version in (20, 35):
        run.version_stats.of(version)
    scribe.update()
    scribe.segment()
    scribe.update()
    scribe.writer.sync()
    again = run.refresh()
    assert again is not run
    assert again.version_stats.known(20) == RecordedRun(tmp_path).version_stats.of(20)
    assert again.version_stats.known(35) is None
    patience = iter([True, True])
    assert again.models.model(34, lambda: next(patience))  # from the copy that was left there
    for version in (35, 41, 42):
        assert again.version_stats.of(version) == RecordedRun(tmp_path).version_stats.of(version)
    scribe.close()
    shutil.rmtree(tmp_path / "journal")
    two_segments(tmp_path / "journal", seed=1)
    other = again.refresh()
    assert other.version_stats.known(20) is None
    assert other.version_stats.of(5) == RecordedRun(tmp_path).version_stats.of(5)


async def test_a_journal_that_is_gone_and_back_again(recorded: Path, tmp_path: Path) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    shutil.copytree(recorded, run)
    server = pages_of(RecordedRun(run))
    server.run.journal.rename(aside)  # before it is served: then it is read without being asked
    async with TestClient(TestServer(server.application())) as client:
        for kind in ("text/plain", "text/html"):  # nothing was read before, something was
            for path, status in (("/", 500), ("/versions/3?models=1", 500), ("/nowhere", 404)):
                answer = await client.get(path)
                assert (answer.status, answer.content_type) == (status, kind), path
            assert "no run with a journal there" in await (await client.get("/")).text()
            aside.rename(server.run.journal)
            assert (await client.get("/versions/3?models=1")).status == 200
            server.run.journal.rename(aside)


async def test_names_from_a_strangers_journal_do_no_harm(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal", run="<script>alert(1)</script>", task="a\u202eb\x1b[2J")
    scribe.update()
    scribe.refuse(1, "<b>bad</b>")
    scribe.close()
    app = pages_of(RecordedRun(tmp_path)).application()
    async with TestClient(TestServer(app)) as client:
        for path in ("/", "/updates", "/versions/1", "/updates?reason=%3Cb%3Ebad%3C/b%3E"):
            text = await (await client.get(path)).text()
            assert "<script>alert" not in text
            assert "<b>bad" not in text
            assert not {"\u202e", "\x1b"} & set(text)
            assert "&lt;script&gt;" in text


async def test_weights_that_were_not_recorded_are_named(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal", weights=False)
    scribe.update()
    scribe.close()
    app = pages_of(RecordedRun(tmp_path)).application()
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/versions/1?models=1")
        assert answer.status == 200
        assert "journal.weights = false" in await answer.text()


async def test_requests_at_the_same_time_do_not_disturb_each_other(client: Client) -> None:
    async def ask(version: int) -> str:
        return await (await client.get(f"/versions/{version}?models=1&to=5")).text()

    many = [*range(0, 60, 7), *range(59, 0, -9)]
    together = await asyncio.gather(*map(ask, many))
    assert [await ask(version) for version in many] == together


@pytest.mark.parametrize("content", [None, b"something else"])
def test_what_is_no_run_is_refused_in_one_line(
    tmp_path: Path, command: Command, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / FIRST).write_bytes(content)
    code, out, err = command("ui", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    ("query", "name", "typed"),
    [
        ("device=abc", "device", "abc"),
        ("device=-1", "device", "-1"),
        ("device=3&from=x%22%3Ey", "from", "x&#34;&gt;y"),
        ("until=1e3&outcome=refused", "until", "1e3"),
    ],
)
async def test_a_field_that_cant_be_read_is_told_beside_it(
    get: Get, query: str, name: str, typed: str
) -> None:
    status, text = await get(f"/updates?{query}")
    assert (status, "the filter can't be read" in text) == (422, True)
    field = f'value="{typed}" aria-invalid="true" aria-describedby="{name}-problem"'
    assert field in text
    assert re.search(f'id="{name}-problem" role="alert">[^<]* is not a', text)
    assert text.count("aria-invalid") == 1
    assert "In the order in which they were decided" not in text


async def test_what_was_typed_stays_in_the_form(get: Get) -> None:
    status, text = await get("/updates?device=3&from=2&until=40&outcome=refused")
    assert status == 200
    for name, value in (("device", 3), ("from", 2), ("until", 40)):
        assert f'name="{name}" inputmode="numeric"' in text
        assert f'value="{value}"' in text
    assert "aria-invalid" not in text


def distance_cell(run: RecordedRun, version: int, *, models: bool) -> str:
    """The cell of the only update that made a version."""
    page = Page(
        pages.version(
            run, version, None, models=models, is_waiting=lambda: True, fields={}, problems={}
        )
    )
    headers = page.cells.index("distance alone"), page.cells.index("waited")
    return page.cells[headers[1] + 1 + headers[0]]


def test_a_distance_that_the_updater_did_not_note_comes_from_the_models(tmp_path: Path) -> None:
    """As without the guard against unusual updates: with it, the guard's own figure is shown."""
    two_segments(tmp_path)
    run = RecordedRun(tmp_path)
    assert distance_cell(run, 5, models=False) == "–"  # noqa: RUF001  (a table's sign for no value)
    [push] = run.version_stats.of(5).pushes
    assert distance_cell(run, 5, models=False) == f"{push.distance:.4g}"  # the models are known now


def test_a_distance_that_the_updater_noted_is_shown_as_it_is(recorded: Path) -> None:
    assert distance_cell(RecordedRun(recorded), 34, models=True) == "50"


@pytest.mark.parametrize("runs", [1, 5, 7])
def test_a_folder_of_runs_names_the_newest(
    recorded: Path, tmp_path: Path, command: Command, runs: int
) -> None:
    for n in range(runs):
        shutil.copytree(recorded, tmp_path / f"run-{n}")
        os.utime(tmp_path / f"run-{n}", (n, n))
    (tmp_path / "sweep" / "journal").mkdir(parents=True)  # empty
    code, out, err = command("ui", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    newest = [str(tmp_path / f"run-{n}") for n in range(runs)][::-1][:5]
    assert f"not a run, but there are runs in it: name one of {', '.join(newest)}" in err
    assert ("and 2 older ones" in err) == (runs == 7)


def test_a_folder_without_any_says_what_to_name(tmp_path: Path, command: Command) -> None:
    code, _, err = command("ui", tmp_path)
    assert (code, "no run with a journal there: name a run's folder" in err) == (1, True)


# Of uPlot 1.6.32 on the npm registry: package/dist/, and package/LICENSE.
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
_STATIC = files("fedstream.history.ui") / "static"


@pytest.mark.parametrize("name", UPLOT)
def test_uplot_is_unchanged(name: str) -> None:
    assert sha256((_STATIC / name).read_bytes()).hexdigest() == UPLOT[name]


def test_all_else_is_ours() -> None:
    assert {one.name for one in _STATIC.iterdir()} == {
        *UPLOT,
        "page.css",
        "charts.js",
        "page.js",
        "question.js",
        "report.js",
        "live.js",
        "live-panels.js",
        "live.css",
    }
