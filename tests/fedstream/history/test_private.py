"""Commands and pages on a private journal: what sums tell, and never a number of masked words."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from fedstream.core.layout import Model
from fedstream.history import journal_text
from fedstream.history.bisect import search
from fedstream.history.index import columns_of, index_of
from fedstream.history.models import JournalModels
from fedstream.history.privacy import statement
from fedstream.history.record import open_run
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.questions import distances, other_rule, rule_of
from fedstream.history.ui.templating import LACKING
from fedstream.journal import NotRecorded, opened
from fedstream.journal.errors import ONLY_SUMS
from fedstream.journal.inspection import divergence, model_at, recorded_versions
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedBuffSettings
from tests.fedstream.history.conftest import Page, pages_of
from tests.fedstream.history.scribes import Command
from tests.private.journalled import EACH, private_run, run_in_buckets

MADE = [[0, 1, 2], [8, 9, 0], [2, 3, 4], [0, 1, 2], [4, 5, 6]]  # devices of versions 1 to 5
_COLUMNS = 13  # of a table of updates


@pytest.fixture
def run(tmp_path: Path) -> Path:
    private_run(tmp_path / "run" / "journal")
    return tmp_path / "run"


def test_show_tells_of_sums(journal: Command, run: Path) -> None:
    """Who took part is no secret; how long an update is would be, and isn't known."""
    code, out, said = journal("show", run)
    assert (code, said) == (0, "")
    assert "private buckets 1 (over mean, policy min_batch 3 (clip 1.0, sigma 0.0" in out
    assert out.count("opened") == out.count("sum of 3") == 5
    assert out.count("dropped") == out.count("overlap") + out.count("sum out of range") == 2
    code, out, said = journal("show", run, "--norms", "--json")
    assert (code, said) == (0, f"{ONLY_SUMS}: a single one has no norm and no distance\n")
    assert all("norm" not in json.loads(one) for one in out.splitlines())


def test_show_names_buckets(journal: Command, tmp_path: Path) -> None:
    run_in_buckets(tmp_path)
    _, out, _ = journal("show", tmp_path)
    assert (out.count("bucket of 3"), out.count("sum of 3")) == (5, 2)


def test_stats_say_what_is_lost(journal: Command, run: Path) -> None:
    code, out, _ = journal("stats", run)
    assert code == 0
    assert out.splitlines()[-1] == f"{ONLY_SUMS}: a single one has no norm, distance and cosine"
    _, out, _ = journal("stats", run, "--json")
    first = json.loads(out)["devices"][0]
    assert (first["buffered"], first["mean_norm"], first["mean_cosine"]) == (3, None, None)


def test_bisect_finds_the_version_and_its_sum(run: Path) -> None:
    """By models that are the recorded ones, bit for bit."""
    digests: dict[int, str] = {}

    def measure(version: int, model: Model) -> float:
        digests[version] = model.digest()
        return float(version < 2)

    with opened(run) as chain:
        found = search(chain, measure, lambda value: value > 0.5, 2)
        assert digests.items() <= {v.version: v.digest for v in recorded_versions(chain)}.items()
    assert found.crossing is not None
    assert found.crossing.version == 2
    assert [one.device for one in found.crossing.causes] == MADE[1]  # not those that were dropped
    said = journal_text.cause(found.crossing.causes[0])
    assert said.endswith("(staleness 0), weight 2, masked, in a sum with the others")


def test_rows_have_the_updates_that_each_version_has(run: Path) -> None:
    """Of the index and of a reader record by record; a dropped sum's updates are in none."""
    for _ in range(2):  # the second time from the index
        columns = columns_of(run / "journal")
        devices = columns.updates["device"]
        found = [devices[columns.contained == version].tolist() for version in range(1, 6)]
        assert found == MADE
        assert not np.isfinite(columns.updates["norm"]).any()
    assert index_of(run / "journal").exists()
    with opened(run) as chain:
        versions = [[one.upload.device for one in v.updates] for v in recorded_versions(chain)]
    assert versions == [[], *MADE]


def test_rows_of_a_version_of_buckets(tmp_path: Path) -> None:
    """A dropped bucket takes none of the others along."""
    run_in_buckets(tmp_path)
    columns = columns_of(tmp_path)
    devices = columns.updates["device"]
    assert [devices[columns.contained == version].tolist() for version in (1, 2)] == [
        list(range(9)),
        list(range(9, 18)),
    ]


def test_statement_of_a_journal_that_begins_between_buckets(tmp_path: Path) -> None:
    """Each device's sums are counted once, also where the first bucket is in no record."""
    scribe = run_in_buckets(tmp_path)
    for _ in range(2):
        with opened(tmp_path) as chain:
            found = statement(chain, 1e-5)
        assert dict(found.accounts) == scribe.progress.accounts
        assert found.opened == 7
        min(tmp_path.glob("*.journal")).unlink()


def test_diff_names_the_first_other_update(tmp_path: Path, run: Path) -> None:
    private_run(tmp_path / "again", FedBuffSettings(buffer_size=EACH, server_lr=0.5))
    with opened(run) as a, opened(tmp_path / "again") as b, opened(run) as same:
        assert divergence(a, same).why == "same"
        assert divergence(a, b).version == 1


def test_models_come_from_copies_as_from_checkpoints(run: Path) -> None:
    with JournalModels(run / "journal") as models, opened(run) as chain:
        models.fill(3, lambda: True)
        for version in (5, 1, 4, 2, 0, 3):
            assert models.model(version).digest() == model_at(chain, version)[1]


def test_no_update_of_it_is_given_out(run: Path) -> None:
    with Replayer(run / "journal") as replayer:
        moment = next(iter(replayer))
        with pytest.raises(NotRecorded, match=ONLY_SUMS):
            moment.update()
    with pytest.raises(NotRecorded, match=ONLY_SUMS):
        open_run(run).delta(0)


async def test_pages_have_no_number_of_masked_words(run: Path) -> None:
    """A masked update's words look like floats, most of them absurd ones: no page shows any."""
    app = pages_of(RecordedRun(run)).application()
    async with TestClient(TestServer(app)) as client:

        async def cells(path: str) -> list[str]:
            answer = await client.get(path)
            assert answer.status == 200, path
            return Page(await answer.text()).cells

        for path in ("/updates", "/versions/2", "/versions/2?to=1"):
            shown = np.array(await cells(path)).reshape(-1, _COLUMNS)
            assert set(shown[:, 6]) == {"distance alone", LACKING}
            assert set(shown[:, 7]) == {"loss", LACKING}
        shown_of_devices = {one.partition(" ")[0] for one in await cells("/devices")}
        assert not {"norm", "distance", "cosine", "loss"} & shown_of_devices
        for path in ("/devices", "/devices/0"):
            text = await (await client.get(path)).text()
            assert "what-if?without" not in text
            assert "only their sums were opened" in text
        for path in ("/overview", "/devices/0"):
            assert "norm" not in {one.partition(" ")[0] for one in await cells(path)}


def test_questions_about_single_devices_are_refused_in_the_form(run: Path, tmp_path: Path) -> None:
    """And another rule on the same sums may be asked for, also that of another private run."""
    mine = RecordedRun(run)
    assert distances({}, mine) == (None, {"until": f"{ONLY_SUMS}: a single one has no distance"})
    _, problems = other_rule({"without": "3"}, mine)
    assert problems == {"without": f"{ONLY_SUMS}: no device can be left out of a sum"}
    _, problems = other_rule({"staleness": "polynomial"}, mine)
    assert "the privacy policy has weights by staleness" in problems["staleness"]
    asked, problems = other_rule({"set": "strategy.server_lr=0.5"}, mine)
    assert (asked is not None, problems) == (True, {})
    private_run(tmp_path / "slow" / "journal", FedBuffSettings(buffer_size=EACH, server_lr=0.5))
    link = parse_qs(urlsplit(rule_of(mine, RecordedRun(tmp_path / "slow"))).query)
    assert link == {"set": ["strategy.server_lr=0.5"]}
