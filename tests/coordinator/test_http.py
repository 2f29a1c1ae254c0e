"""The coordinator's answers over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from pydantic import SecretStr
from safetensors.numpy import load
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.app import _ranges
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings, PageSettings
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Tensor
from fedstream.core.messages import Event, GiveUp
from fedstream.core.records import Best
from fedstream.runtime.http import HttpSettings, application
from fedstream.runtime.service import Context
from fedstream.runtime.task_settings import LeaseSettings
from tests.support import Hand, Proxy, context, wait_until

Http = TestClient[web.Request, web.Application]


def coordinator_of(redis: RedisSettings, keys: Keys) -> Coordinator:
    return Coordinator(
        CoordinatorSettings(), LeaseSettings(), keys=keys, redis=redis, name="coordinator-0"
    )


async def serving(coordinator: Coordinator, live: Context | None = None) -> Http:
    app = application(coordinator.routes(), (live or context()).stop.is_set)

    async def close(_app: web.Application) -> None:
        await coordinator._client.close()

    app.on_cleanup.append(close)
    client: Http = TestClient(TestServer(app))
    await client.start_server()
    return client


@pytest.fixture
async def http(redis: RedisSettings, keys: Keys) -> AsyncIterator[Http]:
    """The coordinator's routes."""
    client = await serving(coordinator_of(redis, keys))
    yield client
    await client.close()


async def test_status_describes_the_run(http: Http, hand: Hand) -> None:
    await hand.create(versions=5)
    await hand.announce("ann")
    upload = await hand.admitted()
    await hand.commit(1, upload)
    [trigger] = await hand.open()
    await hand.admit(
        GiveUp(
            task=trigger.task,
            attempt="1",
            device=trigger.device,
            trainer="t",
            reason="dropped out",
        )
    )
    await hand.admit(await hand.trained(hand.trigger()))
    answer = await http.get(f"/v1/runs/{hand.keys.name}")
    assert answer.status == 200
    status: dict[str, Any] = await answer.json()
    assert status["tasks"] == {
        "issued": 2,
        "applied": 1,
        "buffered": 0,
        "refused": 0,
        "given_up": 1,
        "dead": 0,
        "open": 0,
    }
    expected = {
        "run": hand.keys.name,
        "state": "running",
        "why": None,
        "version": 1,
        "versions": 5,
        "given_up": {"dropped out": 1},
        "strays": {"unknown task": 1},
        "refused": {},
        "trainers": 1,
        "parameters": 4,
        "kept_versions": 2,
        "triggers": 0,
        "queue": 0,
        "retained": 0,
        "published_as": "f32",
        "encoded": {"updates": 0, "bytes": 0, "smaller_by": None},
    }
    assert {key: status[key] for key in expected} == expected
    assert status["register"]["ann"]["owns"] == []


@pytest.mark.parametrize("path", ["", "/scaling"])
async def test_other_runs_are_not_served(http: Http, hand: Hand, path: str) -> None:
    await hand.create()
    answer = await http.get(f"/v1/runs/another{path}")
    assert answer.status == 404
    assert hand.keys.name in (await answer.json())["error"]


async def test_autoscaler_follows_open_tasks_from_zero_to_zero(http: Http, hand: Hand) -> None:
    async def scaling() -> Any:
        answer = await http.get(f"/v1/runs/{hand.keys.name}/scaling")
        assert answer.status == 200
        return await answer.json()

    assert await scaling() == {"open": 0, "trainers": 0, "state": "absent"}
    await hand.create()
    assert await scaling() == {"open": 0, "trainers": 0, "state": "running"}
    await hand.open(3)
    assert (await scaling())["open"] == 3
    await hand.announce("ann")
    upload = await hand.admitted()
    assert await scaling() == {"open": 4, "trainers": 1, "state": "running"}  # one is in the queue
    await hand.commit(1, upload)
    assert (await scaling())["open"] == 3
    await hand.ledger.finish("by hand")  # what is open now, nobody will answer any more
    assert await scaling() == {"open": 0, "trainers": 1, "state": "finished"}


async def test_model_is_served_as_safetensors_with_its_digest(http: Http, hand: Hand) -> None:
    hand.layout = Layout(
        (
            Tensor("linear.weight", (2, 3), "float32", "parameter"),
            Tensor("scale", (), "float16", "parameter"),
            Tensor("norm.mean", (1,), "float32", "buffer"),
            Tensor("norm.count", (), "int64", "integer"),
        )
    )
    await hand.create()
    await hand.commit(1)
    answer = await http.get("/v1/models/latest")
    assert answer.status == 200
    [_, version] = await hand.published()
    assert answer.headers["ETag"] == f'"{version.digest}"'
    assert answer.headers["X-Fedstream-Version"] == "1"
    tensors = load(await answer.read())
    expected = (await hand.model(version)).tensors()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert np.array_equal(tensor, expected[name])
    older = await http.get("/v1/models/0")
    assert (older.status, older.headers["X-Fedstream-Version"]) == (200, "0")


async def test_client_with_the_current_model_gets_304(http: Http, hand: Hand) -> None:
    await hand.create()
    await hand.commit(1)
    first = await http.get("/v1/models/latest")
    etag = first.headers["ETag"]
    again = await http.get("/v1/models/1", headers={"If-None-Match": f'"x", {etag}'})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["ETag"] == etag
    await hand.commit(2)
    latest = await http.get("/v1/models/latest", headers={"If-None-Match": etag})
    assert latest.status == 200


async def test_unavailable_version_is_404_and_lists_the_kept_ones(http: Http, hand: Hand) -> None:
    await hand.create()
    for number in range(1, 7):
        await hand.commit(number, retired=["2.1"] if number == 4 else [])
    for version in ("2", "7"):
        answer = await http.get(f"/v1/models/{version}")
        assert answer.status == 404
        assert (await answer.json())["error"] == (
            f"version {version} is not available; kept versions: 0-1, 3-6"
        )


@pytest.mark.parametrize("version", ["-1", "0x1", "9" * 5000])
async def test_invalid_version_is_a_bad_request(http: Http, hand: Hand, version: str) -> None:
    await hand.create()
    answer = await http.get(f"/v1/models/{version}")
    assert answer.status == 400
    assert "is not a version" in (await answer.json())["error"]


async def test_latest_model_without_a_blob_is_404(http: Http, hand: Hand) -> None:
    await hand.create()
    await hand.client.call("DEL", hand.keys.model("0.1"))
    assert (await http.get("/v1/models/latest")).status == 404
    await hand.client.call("ZREM", hand.keys.kept, "0.1")


async def test_latest_model_replaced_during_a_fetch_serves_the_next(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with Proxy(redis) as proxy:
        http = await serving(coordinator_of(proxy.settings, hand.keys))

        def hold_after_the_head(data: bytes) -> bool:
            if hand.keys.head.encode() in data:
                proxy.reading.clear()
                proxy.cut_reply_to = None
            return False

        proxy.cut_reply_to = hold_after_the_head
        fetching = asyncio.create_task(http.get("/v1/models/latest"))
        await wait_until(lambda: not proxy.reading.is_set())
        await hand.commit(1, retired=["0.1"])
        proxy.reading.set()
        answer = await fetching
        assert (answer.status, answer.headers["X-Fedstream-Version"]) == (200, "1")
        await answer.read()
        await http.close()


async def test_best_model_is_served_until_it_is_gone(http: Http, hand: Hand) -> None:
    async def best() -> tuple[int, str]:
        answer = await http.get("/v1/models/best")
        if answer.status == 200:
            return 200, answer.headers["X-Fedstream-Version"]
        return answer.status, (await answer.json())["error"]

    async def status() -> Any:
        return (await (await http.get(f"/v1/runs/{hand.keys.name}")).json())["best"]

    await hand.create()
    await hand.commit(1)
    assert await best() == (
        404,
        "no version is the best yet: none was measured by a metric with a goal (Task.goal)",
    )
    assert await status() is None
    [_, version] = await hand.published()
    event = Event(what="evaluation", service="evaluator", time=1.0, version=1)
    await hand.ledger.tell(event, Best("f1", 0.75, 1, version.digest, version.blob))
    await hand.commit(2, retired=["1.1"])
    assert await best() == (200, "1")
    answer = await http.get("/v1/models/best")
    assert load(await answer.read()).keys() == (await hand.model(version)).tensors().keys()
    assert answer.headers["ETag"] == f'"{version.digest}"'
    about = {"metric": "f1", "value": 0.75, "version": 1, "digest": version.digest}
    assert await status() == about | {"kept": True}
    await hand.ledger.retire(hand.updater.token, ["1.1"])
    assert await best() == (
        404,
        "version 1, the best, is no longer in Redis: make it again with fedstream journal export",
    )
    assert await status() == about | {"kept": False}


async def test_damaged_model_is_an_error(http: Http, hand: Hand) -> None:
    await hand.create()
    await hand.client.call("HSET", hand.keys.model("0.1"), "0", b"\1" * hand.layout.nbytes)
    answer = await http.get("/v1/models/latest")
    assert answer.status == 500
    assert "digest" in (await answer.json())["error"]


async def test_redis_outage_sets_retry_after(keys: Keys) -> None:
    http = await serving(coordinator_of(RedisSettings(url="redis://127.0.0.1:1/0"), keys))
    for path in (f"/v1/runs/{keys.name}", f"/v1/runs/{keys.name}/scaling", "/v1/models/latest"):
        assert (await http.get(path)).status == 503
    await http.close()


@pytest.mark.parametrize(
    ("versions", "text"),
    [([], "none"), ([3], "3"), ([5, 4], "4-5"), ([0, 1, 2, 7, 9, 10], "0-2, 7, 9-10")],
)
def test_version_ranges_are_compact(versions: list[int], text: str) -> None:
    assert _ranges(versions) == text


def test_tokens_are_those_that_the_file_has_now(tmp_path: Path) -> None:
    """One that can't be used changes nothing, and is logged once; at the start it is an error."""
    file, operator = tmp_path / "token", SecretStr("other" * 5 + "\n" + "operator" * 3)
    old, new = "old" * 6, "new" * 6
    file.write_text(old)
    tokens = Tokens(None, str(file), operator)
    assert tokens.has(old)
    file.write_text(f"{new}\r\n{old}\n")
    assert tokens.now() == [new, old]

    def stays(why: str) -> None:
        with capture_logs() as lines:
            assert tokens.now() == tokens.now() == [new, old]
        [line] = lines
        assert line["log_level"] == "warning"
        assert line["event"].startswith("unusable token file")
        assert re.search(f"^http.token_file: {file}: {why}", line["reason"])
        with pytest.raises(ConfigError, match=re.escape(line["reason"])):
            Tokens(None, str(file), operator)

    for number, (unusable, why) in enumerate(
        (
            ("", "expected tokens of at least 16 characters, one a line$"),
            ("too short", "expected"),
            (f"{new}\nshort", "expected"),
            (f"{new}\n{'operator' * 3}", "a token is the same as one of page.operator_token"),
        )
    ):
        file.write_text(unusable)
        stays(why)
        file.write_text(f"{new}\n{old}" + "\n" * number)  # of another length each time
        assert tokens.now() == [new, old]
    file.unlink()
    stays("No such file")
    file.write_text("short" + "\n" * 13)
    assert tokens.now() == [new, old]
    before = file.stat().st_mtime_ns
    file.write_text(old)
    os.utime(file, ns=(before, before))  # as after a chmod, nothing shows that it is usable now
    assert tokens.now() == [old]
    assert Tokens(SecretStr(new), str(file)).now() == [new]


def test_no_token_of_a_setting_is_too_short() -> None:
    """Each line is one."""
    for token in ("short", "\n" * 16, f"{'long' * 4}\nshort"):
        for made in (HttpSettings, PageSettings):
            key = "token" if made is HttpSettings else "operator_token"
            with pytest.raises(ValueError, match="expected tokens of at least 16 characters"):
                made.model_validate({key: SecretStr(token)})


async def test_token_is_required_if_configured(redis: RedisSettings, keys: Keys) -> None:
    """Of status and models, in no other form than it is; an autoscaler has none."""
    right = "0123456789abcdef-é"
    coordinator = Coordinator(
        CoordinatorSettings(),
        LeaseSettings(),
        keys=keys,
        redis=redis,
        name="coordinator-0",
        tokens=Tokens(SecretStr(right)),
    )
    http = await serving(coordinator)
    try:
        for path in (f"/v1/runs/{keys.name}", "/v1/models/latest", "/v1/models/0"):
            for said in (
                None,
                "",
                "Bearer",
                "Bearer ",
                f"Bearer {right[:-1]}",
                f"bearer {right}",
                f"Basic {right}",
                right,
                "Bearer \udcff",
            ):
                answer = await http.get(path, headers={"Authorization": said} if said else {})
                assert answer.status == 401, said
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert "token" in (await answer.json())["error"]
            answer = await http.get(path, headers={"Authorization": f"Bearer {right}"})
            assert answer.status == 404, "there is no run"
        assert (await http.get(f"/v1/runs/{keys.name}/scaling")).status == 200
    finally:
        await http.close()
