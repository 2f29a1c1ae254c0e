"""The helper as a service: its files, its routes, and what it says of what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestClient
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from pydantic import SecretStr, ValidationError

from fedstream.core.errors import ConfigError
from fedstream.helper.service import HelperService
from fedstream.helper.settings import HelperSettings
from fedstream.helper.store import HelperStore, StoreFailed
from fedstream.private.masks import add_masked, unmasked, unpacked
from fedstream.private.policy import PrivacyPolicy, signed
from fedstream.private.sealing import EpochKey, Intent, SealedUpdate, seal
from fedstream.runtime.http import HttpSettings
from tests.helper.served import serving
from tests.private.enrolled import DEVICES, OWNER, ROSTER, files, hex_of, key_of, pem_of, policy_of
from tests.support import context, counted, wait_until

Http = TestClient[web.Request, web.Application]
Serving = Callable[..., AbstractAsyncContextManager[Http]]


def answers(key: EpochKey, policy: PrivacyPolicy, count: int) -> list[tuple[bytes, SealedUpdate]]:
    return [
        seal(
            np.full(policy.parameters, device),
            policy,
            key,
            DEVICES[device],
            run="r",
            task=f"task-{device}",
            attempt="1",
            device=device,
            tau=0,
            layout="l",
        )
        for device in range(count)
    ]


def intent_of(updates: list[SealedUpdate], policy: PrivacyPolicy) -> Intent:
    flat = (1,) * len(updates)
    digest = policy.digest
    return Intent(run="r", policy=digest, version=0, updates=tuple(updates), weights=flat)


async def test_a_batch_is_opened_over_http(tmp_path: Path) -> None:
    """From the policy and the key that devices fetch to the sum that the server decodes."""
    its = context()
    async with serving(tmp_path, its=its) as http:
        policy = policy_of()
        assert (await (await http.get("/v1/policy")).read()) == signed(policy, OWNER)
        key = EpochKey.decode(await (await http.get("/v1/key")).read())
        sent = answers(key, policy, 4)
        intent = intent_of([update for _, update in sent], policy)
        answer = await http.post("/v1/open", data=intent.encode())
        assert answer.status == 200
        assert answer.headers["Fedstream-Intent"] == intent.digest
        total = np.zeros(50, np.uint32)
        for data, _ in sent:
            add_masked(total, unpacked(data, policy), 1)
        masks = await answer.read()
        found = unmasked(total, unpacked(masks, policy), policy) - 6
        assert 0 < np.abs(found).mean() < 3 * policy.noise_sigma
        again = await http.post("/v1/open", data=intent.encode())
        assert await again.read() == masks
        assert counted(its, "fedstream_helper_opened_total") == 2

        other = intent_of([update for _, update in sent[:3]], policy)
        refused = await http.post("/v1/open", data=other.encode())
        assert refused.status == 409
        said = await refused.json()
        assert said["reason"] == "overlap"
        assert said["intent"] == intent.digest
        assert said["tasks"] == [f"task-{device}" for device in range(4)]
        assert counted(its, "fedstream_helper_refused_total", reason="overlap") == 1


async def test_the_key_comes_with_the_epochs_that_can_be_opened(tmp_path: Path) -> None:
    """So the server refuses what no batch could contain any more."""
    store = HelperStore(Path(files(tmp_path)["store"]), policy_of())
    store.rotate(time.time() - 100_000, every_s=1, keep_s=1)
    [old] = store.epochs()
    store.close()
    async with serving(tmp_path) as http:
        answer = await http.get("/v1/key")
        new = EpochKey.decode(await answer.read()).epoch
        assert answer.headers["Fedstream-Epochs"] == f"{old},{new}"


async def test_what_is_no_intent_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        for body, says in [
            (b"", "not msgpack"),
            (b"\x80", "not a message"),
            (bytes(41_000), "at most 40960 bytes"),
        ]:
            answer = await http.post("/v1/open", data=body)
            assert (answer.status, (await answer.json())["reason"]) == (409, "malformed")
            assert says in (await answer.json())["error"]


async def test_a_body_that_does_not_end_is_refused(tmp_path: Path) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    async with serving(tmp_path, body_s=0.05) as http:
        answer = await http.post("/v1/open", data=slow())
        assert "longer than 0.05 s" in (await answer.json())["error"]


async def test_more_intents_than_fit_in_memory_wait_outside(tmp_path: Path) -> None:
    end = asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b"begun"
        await end.wait()

    async with serving(tmp_path) as http:
        asked = [asyncio.create_task(http.post("/v1/open", data=held())) for _ in range(4)]
        busy = await wait_until(lambda: _is_busy(http))
        assert (busy["reason"], busy["error"]) == ("busy", "too many intents at once")
        end.set()
        assert {(await one).status for one in asked} == {409}
        assert (await http.post("/v1/open", data=b"")).status == 409


async def _is_busy(http: Http) -> Any:
    answer = await http.post("/v1/open", data=b"")
    return await answer.json() if answer.status == 503 else None


async def test_a_token_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    http = HttpSettings(token=SecretStr("a-secret-of-some-length"))
    async with serving(tmp_path, http) as client:
        for given, status in [
            ({}, 401),
            ({"Authorization": "Bearer another-secret-of-it"}, 401),
            ({"Authorization": "Bearer a-secret-of-some-length"}, 409),
        ]:
            answer = await client.post("/v1/open", data=b"", headers=given)
            assert answer.status == status
        assert (await client.get("/v1/key")).status == 200  # public


async def test_a_store_that_cannot_write_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_store: HelperStore, _intent: Intent) -> None:
        raise StoreFailed("helper.store: database or disk is full")

    async with serving(tmp_path) as http:
        policy = policy_of()
        key = EpochKey.decode(await (await http.get("/v1/key")).read())
        intent = intent_of([one for _, one in answers(key, policy, 4)], policy)
        with monkeypatch.context() as patched:
            patched.setattr(HelperStore, "take", full)
            answer = await http.post("/v1/open", data=intent.encode())
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert (await http.post("/v1/open", data=intent.encode())).status == 200


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no policy": ({"policy": None}, r"helper\.policy: name a file"),
    "no owner": ({"owner": None}, r"helper\.owner: name the Ed25519 public key"),
    "no store": ({"store": None}, r"helper\.store: name the file"),
    "no file": ({"roster": "/no/file"}, r"helper\.roster = '/no/file': No such file"),
    "another owner": ({"owner": hex_of(key_of(3))}, "the policy is not signed by the helper's"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_cannot_work_are_refused_by_key(tmp_path: Path, wrong: str) -> None:
    changes, says = WRONG[wrong]
    with pytest.raises(ConfigError, match=says):
        HelperService(HelperSettings(**files(tmp_path) | changes), HttpSettings())


def test_files_of_another_policy_are_refused(tmp_path: Path) -> None:
    given = files(tmp_path)
    for name, data, says in [
        ("roster.txt", ROSTER.text.partition(b"\n")[0] + b"\n", "is not the policy's: its digest"),
        ("helper.pem", pem_of(key_of(3)), "not the key that the policy names"),
        ("helper.pem", pem_of(generate_private_key(SECP256R1())), "not an Ed25519 private key"),
        ("helper.pem", b"nonsense", "not an Ed25519 private key"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=says):
            HelperService(HelperSettings(**given), HttpSettings())
        files(tmp_path)


def test_tls_settings_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="go together"):
        HelperSettings(tls_cert="a.pem")
    with pytest.raises(ValidationError, match=r"needs helper\.tls_cert"):
        HelperSettings(client_ca="a.pem")
    with pytest.raises(ConfigError, match="not readable as certificates"):
        HelperSettings(tls_cert="a.pem", tls_key="a.pem").tls()
    assert HelperSettings().tls() is None


def test_epochs_whose_ids_do_not_fit_a_header_are_refused() -> None:
    assert HelperSettings(epoch_s=1.0, keep_s=200.0).keep_s == 200
    with pytest.raises(ValidationError, match=r"helper\.keep_s must be at most 200 times"):
        HelperSettings(epoch_s=1.0, keep_s=201.0)


@pytest.mark.process
def test_a_killed_process_answers_as_before_over_tls(tmp_path: Path) -> None:
    """`fedstream helper` with its own authority, which knows the updater by its certificate."""
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost"), authority.issue_cert("updater")
    chain = tmp_path / "helper-chain.pem"
    server.private_key_and_cert_chain_pem.write_to_path(chain)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    given = files(tmp_path) | {
        "tls_cert": str(chain),
        "tls_key": str(chain),
        "client_ca": str(tmp_path / "ca.pem"),
    }
    sets = [f"--set=helper.{key}={value}" for key, value in given.items()]
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.configure_cert(trusting)

    def ask(port: int, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"https://localhost:{port}{path}", data)
        with urllib.request.urlopen(request, context=trusting, timeout=30) as answer:  # noqa: S310
            body: bytes = answer.read()
            return body

    found = []
    intent: Intent | None = None
    for end in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "fedstream", "helper", "--set=log.format=json", *sets],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            if '"serving"' in line:
                port = json.loads(line)["port"]
                break
        if intent is None:
            key = EpochKey.decode(ask(port, "/v1/key"))
            intent = intent_of([one for _, one in answers(key, policy_of(), 4)], policy_of())
        found.append(hashlib.sha256(ask(port, "/v1/open", intent.encode())).hexdigest())
        process.send_signal(end)
        process.communicate(timeout=30)
    assert found[0] == found[1]
    assert process.returncode == 0
