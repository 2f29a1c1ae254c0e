"""Who may see the live page, who may act on it, and what each is told."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from pydantic import SecretStr
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.settings import PageSettings, has_page
from fedstream.core.errors import ConfigError
from fedstream.core.messages import Assignment
from fedstream.history.live.service import _local, live_page
from fedstream.history.live.sessions import Sessions
from fedstream.history.ui.http import HEADERS
from fedstream.runtime.config import load
from fedstream.runtime.http import HttpSettings, application
from fedstream.settings.config import Settings
from fedstream.settings.services import _coordinator
from tests.broker.guarded import KEYS, guarded, needs_7
from tests.fedstream.history.conftest import Page
from tests.fedstream.history.live.conftest import Browser, Serve, Served
from tests.support import EveryRole, Hand

TOKEN = "a-token-of-sixteen-or-more"  # noqa: S105
OPERATOR = "another-of-the-operator"
BOTH = (f"http.token={TOKEN}", f"page.operator_token={OPERATOR}")


@pytest.fixture
async def page(serve: Serve, hand: Hand) -> AsyncIterator[Served]:
    """A page with a token, and another for operators."""
    await hand.create()
    async with serve(*BOTH) as page:
        yield page


async def logged_in(http: Browser, token: str, to: str = "/") -> int:
    said = {"token": token, "to": to} | ({"as": "operator"} if to == "/operate" else {})
    answer = await http.post("/login", data=said, allow_redirects=False)
    return answer.status


async def form_of(http: Browser) -> str:
    text = await (await http.get("/operate")).text()
    found = re.search(r'name="form" value="([0-9a-f]+)"', text)
    assert found, text
    return found[1]


async def test_headers_are_those_of_all_pages(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve() as page:
        for path in ("/", "/live/stream", "/static/live.js", "/login", "/operate", "/devices"):
            async with page.http.get(path) as answer:
                assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
        found = Page(await (await page.http.get("/")).text())
        assert found.inline == []
        assert all(one.startswith("/static/") for one in found.loaded)


async def test_nothing_is_shown_without_the_token(page: Served) -> None:
    for path in ("/", "/live/stream", "/devices", "/overview", "/operate"):
        answer = await page.http.get(path)
        assert answer.status == 401, path
        assert "version" not in await answer.text()
    assert page.service._broadcast.picture is None
    for said in ("Bearer wrong", "Basic x", f"Bearer {TOKEN[:-1]}", "Bearer \udcff"):
        assert (await page.http.get("/", headers={"Authorization": said})).status == 401
    said = f"Bearer {TOKEN}"
    assert (await page.http.get("/", headers={"Authorization": said})).status == 200
    assert (await page.http.get("/operate", headers={"Authorization": said})).status == 401


async def test_login_and_logout(page: Served) -> None:
    http = page.http
    assert await logged_in(http, "not the token, but long") == 401
    answer = await http.post("/login", data={"token": TOKEN, "to": "/"}, allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    (cookie,) = answer.cookies.values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    assert TOKEN not in cookie.value
    assert (await http.get("/")).status == 200
    assert (await http.get("/operate")).status == 401  # another token
    await http.post("/logout", allow_redirects=False)
    assert (await http.get("/")).status == 401


async def test_who_guesses_tokens_has_to_wait(page: Served) -> None:
    """And so has the right one from there, or it could be told from the answer."""
    for _ in range(10):
        assert await logged_in(page.http, "not the token, but long") == 401
    for token in ("not the token, but long", TOKEN):
        answer = await page.http.post("/login", data={"token": token}, allow_redirects=False)
        assert answer.status == 429
        assert 0 < int(answer.headers["Retry-After"]) <= 6
        text = await answer.text()
        assert "another one is taken in" in text
        assert 'name="token"' in text  # the form is still there


async def test_who_guesses_shuts_out_nobody_who_is_let_in_already(page: Served) -> None:
    """A proxy with a login sends the right token for everybody, all from one address."""
    await logged_in(page.http, TOKEN)
    (cookie,) = page.http.session.cookie_jar
    page.http.session.cookie_jar.clear()
    for _ in range(10):
        assert await logged_in(page.http, "not the token, but long") == 401
    assert await logged_in(page.http, TOKEN) == 429
    for headers in (
        {"Authorization": f"Bearer {TOKEN}"},
        {"Cookie": f"{cookie.key}={cookie.value}"},
    ):
        assert (await page.http.get("/", headers=headers)).status == 200


async def test_an_unknown_address_is_a_page_for_a_browser(page: Served) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/not/there", "/v1/nowhere", "/nowhere"):
        answer = await page.http.get(path, headers=browser)
        assert (answer.status, answer.content_type) == (404, "text/html")
        assert f"no page {path}" in await answer.text()
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    answer = await page.http.get("/not/there", headers={"Accept": "*/*"})
    assert answer.status == 404
    assert (await answer.json())["reason"] == "no such route"


async def test_cookie_is_sent_over_tls_alone_behind_a_proxy_that_speaks_it(page: Served) -> None:
    for forwarded, is_secure in (("https", True), ("http", False)):
        answer = await page.http.post(
            "/login",
            data={"token": TOKEN},
            headers={"X-Forwarded-Proto": forwarded},
            allow_redirects=False,
        )
        (cookie,) = answer.cookies.values()
        assert bool(cookie["secure"]) is is_secure


@pytest.mark.parametrize(
    ("to", "where"),
    [
        ("/devices?sort=norm", "/devices?sort=norm"),
        ("//evil.example/", "/"),
        ("https://evil.example/", "/"),
        ("/\\evil.example", "/"),
        ("", "/"),
        ("/\n/x", "/"),
    ],
)
def test_login_leads_nowhere_else(to: str, where: str) -> None:
    assert _local(to) == where


async def test_forms_of_other_pages_are_refused(page: Served, hand: Hand) -> None:
    """By where they come from, by the cookie that isn't sent, and by what they don't know."""
    http = page.http
    assert await logged_in(http, OPERATOR, "/operate") == 303
    form = await form_of(http)
    stop = {"form": form, "sure": "yes"}
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
    ):
        answer = await http.post("/operate/stop", data=stop, headers=headers)
        assert answer.status == 403, headers
    for wrong in ({"sure": "yes"}, {"sure": "yes", "form": "0" * 64}):
        answer = await http.post("/operate/stop", data=wrong)
        assert answer.status == 403
        text = await answer.text()
        assert "earlier login" in text
        assert 'action="/operate/stop"' in text  # to send it once more
    assert (await http.post("/operate/stop", data={"form": form})).status == 200  # not sure
    assert (await hand.ledger.run()).state == "running"
    assert (await http.post("/operate/stop", data=stop | {"x": "y" * 5000})).status == 413
    answer = await http.post("/operate/stop", data=stop)
    assert "ends with its newest version" in await answer.text()
    run = await hand.ledger.run()
    assert (run.state, run.why) == ("finished", "stopped by an operator")
    again = await (await http.post("/operate/stop", data=stop)).text()
    assert "not going on" in again
    assert "It goes on no more: finished: stopped by an operator." in again
    assert "/operate/stop" not in again


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data", b"x", 415),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\n", 415),
        ("application/x-www-form-urlencoded; charset=none", b"token=a", 401),
        ("application/x-www-form-urlencoded; charset=utf-7", b"token=+2AA-", 401),
        ("application/x-www-form-urlencoded", b"token=\xff&to=%ed%a0%80", 401),
    ],
    ids=["boundary", "parts", "charset", "surrogate", "bytes"],
)
async def test_forms_that_no_browser_sends(
    page: Served, kind: str, body: bytes, status: int
) -> None:
    answer = await page.http.post("/login", data=body, headers={"Content-Type": kind})
    assert answer.status == status


async def test_operator_retries_a_dead_letter_once(page: Served, hand: Hand) -> None:
    http = page.http
    (trigger,) = await hand.open()
    ((entry, task),) = await hand.take()
    await hand.ledger.bury(
        hand.keys.tasks,
        TRAINERS,
        entry,
        "crashed <trainers>",
        task=Assignment.model_validate(task.__dict__),
        deliveries=3,
        found=None,
        site="pool",
    )
    await logged_in(http, OPERATOR, "/operate")
    text = await (await http.get("/operate")).text()
    assert "crashed &lt;trainers&gt;" in text
    letter = re.search(r'name="letter" value="([\d-]+)"', text)
    assert letter
    said = {"form": await form_of(http), "letter": letter[1]}
    told = await (await http.post("/operate/retry", data=said)).text()
    assert "is being retried" in told
    assert trigger.task not in {one.task for one in (await hand.ledger.look()).open}
    assert len((await hand.ledger.look()).open) == 1
    again = await (await http.post("/operate/retry", data=said)).text()
    assert "there is no dead letter" in again


async def test_without_an_operators_token_nobody_acts(serve: Serve, hand: Hand) -> None:
    await hand.create()
    async with serve() as page:
        for asked in (page.http.get("/operate"), page.http.post("/operate/stop", data={"x": "y"})):
            async with asked as answer:
                assert answer.status == 403
                assert "page.operator_token" in await answer.text()
        assert "/operate" not in await (await page.http.get("/")).text()


@needs_7
@pytest.mark.process
async def test_coordinator_may_not_do_what_an_operator_may(serve: Serve, tmp_path: Path) -> None:
    """Unless it has the password of the operators' user in Redis."""
    with guarded(tmp_path) as there:
        async with there.client("admin") as admin:
            hand = Hand(admin, KEYS, EveryRole(admin, KEYS, "test"))
            await hand.create()
            sets = (f"run.name={KEYS.name}", f"page.operator_token={OPERATOR}")
            own = there.settings("coordinator")
            async with serve(*sets, as_user=own) as page:
                await logged_in(page.http, OPERATOR, "/operate")
                said = {"form": await form_of(page.http), "sure": "yes"}
                told = await (await page.http.post("/operate/stop", data=said)).text()
                assert "page.operator_password" in told
            assert (await hand.ledger.run()).state == "running"
            async with serve(*sets, "page.operator_password=of-operator", as_user=own) as page:
                await logged_in(page.http, OPERATOR, "/operate")
                said = {"form": await form_of(page.http), "sure": "yes"}
                told = await (await page.http.post("/operate/stop", data=said)).text()
                assert "ends with its newest version" in told


def test_cookies_end_and_are_of_one_run_and_token() -> None:
    ours = Sessions("demo", Tokens(SecretStr(TOKEN)), SecretStr(OPERATOR))
    begun = ours.begun(TOKEN, 1000.0)
    assert begun is not None
    who, cookie = begun
    assert who == "viewer"
    assert ours.role(cookie, 1000.0 + 12 * 3600 - 1) == "viewer"
    assert ours.role(cookie, 1000.0 + 12 * 3600) is None
    assert ours.role(cookie.replace("viewer", "operator"), 1001.0) is None
    said, _, mac = cookie.rpartition(".")
    assert ours.role(f"{said}0.{mac}", 1001.0) is None
    for other in (
        Sessions("other", Tokens(SecretStr(TOKEN)), None),
        Sessions("demo", Tokens(SecretStr(OPERATOR)), None),
        Sessions("demo", None, None),
    ):
        assert other.role(cookie, 1001.0) is None
    renewed = Sessions("demo", Tokens(SecretStr(f"{OPERATOR}\n{TOKEN}")), None)
    assert renewed.role(cookie, 1001.0) == "viewer"
    begun = renewed.begun(TOKEN, 1000.0)
    assert begun is not None
    assert ours.role(begun[1], 1001.0) == "viewer"  # a replica that has the old token alone
    assert Sessions("demo", Tokens(SecretStr(OPERATOR)), None).role(begun[1], 1001.0) is None
    for junk in ("", ".", "..", "viewer.9.x", "viewer.99999999999999999999.x", "é.1.2"):
        assert ours.role(junk, 1001.0) is None


async def test_coordinator_and_its_page_have_the_same_tokens(
    redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    """So the log says once that the file can't be used: it has the operator's token."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    sets = (f"http.token_file={file}", f"page.operator_token={OPERATOR}")
    settings = load(Settings, path=None, environ={}, sets=sets)
    settings = settings.model_copy(update={"redis": redis})
    coordinator, _ = _coordinator(settings, keys, "c-0", live_page(settings))
    app = application(coordinator.routes(), lambda: False)
    file.write_text(OPERATOR)
    async with TestClient(TestServer(app)) as http:
        with capture_logs() as lines:
            for path in ("/", f"/v1/runs/{keys.name}"):
                assert (await http.get(path)).status == 401, path
                wrong = {"Authorization": f"Bearer {OPERATOR}"}
                assert (await http.get(path, headers=wrong)).status == 401, path
        assert [line["log_level"] for line in lines if "token file" in line["event"]] == ["warning"]


@pytest.mark.parametrize(
    ("page", "http", "found"),
    [
        ({}, {}, True),
        ({}, {"host": "localhost"}, True),
        ({}, {"host": "0.0.0.0"}, False),  # noqa: S104
        ({}, {"host": "::", "token": SecretStr(TOKEN)}, False),
        ({"enabled": True}, {"host": "::", "token": SecretStr(TOKEN)}, True),
        ({"enabled": False}, {}, False),
        ({"enabled": True}, {"host": "10.0.0.1"}, "set http.token"),
        (
            {"operator_token": SecretStr(f"{TOKEN}\n{OPERATOR}")},
            {"token": SecretStr(f"{'x' * 16}\n{OPERATOR}")},
            "^http.token: a token is the same as one of page.operator_token",
        ),
    ],
    ids=["here", "localhost", "all", "all-with-token", "asked-for", "off", "open", "same"],
)
def test_page_is_there_on_this_machine_and_elsewhere_with_a_token(
    page: dict[str, object], http: dict[str, object], found: bool | str
) -> None:
    settings = PageSettings.model_validate(page), HttpSettings.model_validate(http)
    if isinstance(found, bool):
        assert has_page(*settings) is found
    else:
        with pytest.raises(ConfigError, match=found):
            has_page(*settings)


async def test_page_waits_for_the_run(serve: Serve, hand: Hand) -> None:
    async with serve() as page:
        answer = await page.http.get("/")
        assert answer.status == 503
        text = await answer.text()
        assert "is being set up, unless there is none of that name: this page is loaded" in text
        assert 'http-equiv="refresh"' in text
        await hand.create()
        while (answer := await page.http.get("/")).status == 503:
            pass
        assert "of 100" in await answer.text()


async def test_past_is_there_if_its_journal_is(serve: Serve, hand: Hand, recorded: Path) -> None:
    await hand.create()
    async with serve(f"journal.dir={recorded / 'journal'}") as page:
        assert 'href="/versions"' in await (await page.http.get("/")).text()
        answer = await page.http.get("/versions/12")
        assert answer.status == 200
        assert '<a href="/">Live</a>' in await answer.text()
        assert (await page.http.get("/versions/999")).status == 404
        device = await (await page.http.get("/devices/3")).text()
        assert "/updates?device=3" in device
        assert "/what-if?without=3" in device
    async with serve(f"journal.dir={recorded / 'nowhere'}") as page:
        text = await (await page.http.get("/")).text()
        assert 'href="/versions"' not in text
        assert f"no journal that this coordinator could read ({recorded / 'nowhere'})" in text
        answer = await page.http.get("/versions/12")
        assert answer.status == 500
        assert "fedstream ui" in await answer.text()
