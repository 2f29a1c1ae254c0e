"""Who may have questions worked on beside the live page, and what that costs nobody else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fedstream.history.live.conftest import Browser, Serve, Served
from tests.fedstream.history.live.test_access import BOTH, OPERATOR, TOKEN, logged_in
from tests.integration.command import TEST_GUARD_S
from tests.support import Hand, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]
BELOW = {"metric": "accuracy", "side": "below", "bound": "0.9", "do": "begin"}


async def text_of(http: Browser, path: str) -> str:
    answer = await http.get(path)
    assert answer.status == 200, path
    return " ".join((await answer.text()).split())


async def asked(http: Browser, path: str, fields: dict[str, str]) -> tuple[int, str]:
    """Send a form with its page's token: the status, and where it leads or what it says."""
    token = re.search(r'name="token" value="(.+?)"', await text_of(http, path))
    assert token
    answer = await http.post(path, data=fields | {"token": token[1]}, allow_redirects=False)
    return answer.status, answer.headers.get("Location") or await answer.text()


async def answered(http: Browser, address: str) -> str:
    async def over() -> str:
        text = await text_of(http, address)
        return "" if "data-going" in text else text

    return str(await wait_until(over, TEST_GUARD_S, "an answer"))


def is_idle(page: Served) -> bool:
    """Whether nothing is being worked on."""
    return page.service._recorded_pages.jobs.current is None


async def test_where_others_can_look_only_an_operator_may_ask(
    serve: Serve, hand: Hand, poisoned: Path
) -> None:
    await hand.create()
    async with serve(f"journal.dir={poisoned / 'journal'}", *BOTH) as page:
        http = page.http
        assert (await http.get("/bisect")).status == 401
        assert (await http.post("/bisect", data=BELOW)).status == 401
        await logged_in(http, TOKEN)
        text = await text_of(http, "/bisect?metric=accuracy&bound=0.9")
        link = "/login?as=operator&amp;to=/bisect%3Fmetric%3Daccuracy%26bound%3D0.9"
        assert link in text
        assert re.search(r'value="begin" disabled', text)
        status, said = await asked(http, "/bisect", BELOW)
        assert status == 401
        assert "page.operator_token" in said
        assert is_idle(page)
        text = await (await http.get(link.replace("&amp;", "&"))).text()
        assert 'name="as" value="operator"' in text
        login = {"token": TOKEN, "to": "/bisect", "as": "operator"}
        assert (await http.post("/login", data=login)).status == 401  # a viewer's
        assert (await http.post("/login", data=login | {"token": OPERATOR})).status == 200
        status, address = await asked(http, "/bisect", BELOW)
        assert (status, address) == (
            303,
            "/bisect?metric=accuracy&side=below&bound=0.9&until=30",
        )
        text = await answered(http, address)
        assert "accuracy went below 0.9 with version 23" in text
        assert "It is of the versions up to 30." in text
        await http.post("/logout", allow_redirects=False)
        await logged_in(http, TOKEN)
        assert "went below 0.9 with version 23" in await text_of(http, address)  # all may read it


async def test_without_an_operators_token_nobody_asks_where_others_can_look(
    serve: Serve, hand: Hand, poisoned: Path
) -> None:
    await hand.create()
    async with serve(f"journal.dir={poisoned / 'journal'}", f"http.token={TOKEN}") as page:
        await logged_in(page.http, TOKEN)
        assert "there are none: no page.operator_token" in await text_of(page.http, "/what-if")
        status, said = await asked(page.http, "/what-if", {"without": "7", "do": "begin"})
        assert (status, "Nobody may" in said) == (403, True)
        assert is_idle(page)


async def test_on_this_machine_a_form_of_the_page_is_enough(
    serve: Serve, hand: Hand, poisoned: Path
) -> None:
    await hand.create()
    async with serve(f"journal.dir={poisoned / 'journal'}") as page:
        for headers in ({}, {"Origin": "https://evil.example"}):
            answer = await page.http.post("/bisect", data=BELOW, headers=headers)
            assert answer.status == 403
        await page.http.get("/bisect?metric=accuracy&bound=0.9&do=begin")
        assert is_idle(page)
        status, address = await asked(page.http, "/what-if", {"without": "7", "do": "begin"})
        assert (status, address) == (303, "/what-if?without=7&until=30")
        assert "used 29 of 30 updates" in await answered(page.http, address)


async def test_all_devices_are_measured_only_by_a_form(
    serve: Serve, hand: Hand, poisoned: Path
) -> None:
    """No link has all models made again."""
    await hand.create()
    async with serve(f"journal.dir={poisoned / 'journal'}") as page:
        for path in ("/devices", "/devices/7"):
            text = await text_of(page.http, path)
            assert 'href="/distances">Measure norms, distances and cosines' in text
        status, address = await asked(page.http, "/distances", {"do": "begin"})
        assert (status, address) == (303, "/distances?until=30")
        assert "It is of the versions up to 30." in await answered(page.http, address)
        text = await text_of(page.http, "/devices/7")
        assert "Norms, distances and cosines are of the versions up to 30." in text
        assert "device-norm" in text
        assert "/distances" in await text_of(page.http, "/devices?sort=cosine")


async def test_a_task_that_is_not_here_is_told(
    serve: Serve, hand: Hand, poisoned: Path, tmp_path: Path
) -> None:
    """As in a coordinator's pod, which has no task mounted."""
    await hand.create()
    sets = (f"journal.dir={poisoned / 'journal'}", f"task.name={tmp_path}/task.py:task")
    async with serve(*sets) as page:
        _, address = await asked(page.http, "/bisect", BELOW)
        text = await answered(page.http, address)
        assert re.search("No answer: .+ there is no file", text)
