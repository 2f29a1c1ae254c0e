"""`fedstream gateway` as an operator runs it: a process, TLS, and a Redis user of its own."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.coordinator.gateway.auth import DEVICES, TOKEN
from fedstream.core.digest import digest_of
from fedstream.core.errors import ConfigError
from fedstream.protocol.messages import Access, Enrolment, Offer
from fedstream.protocol.signatures import pem_of, sign
from fedstream.settings import services
from fedstream.settings.config import read
from tests.broker.guarded import KEYS, RUN, Guarded, guarded, needs_7
from tests.coordinator.gateway.places import SITE, ends, owned_by
from tests.support import EveryRole, Hand, context, running, wait_until

pytestmark = [needs_7, pytest.mark.process]
ROOT = Path(__file__).parents[3]
INVITE = "3-" + "i" * 32


@asynccontextmanager
async def process(
    server: Guarded, folder: Path, *sets: str
) -> AsyncIterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A gateway, and the line of its log that says where it listens."""
    flags = [part for one in sets for part in ("--set", one)]
    running_ = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "fedstream", "gateway", "--name", "gw-0", *flags],
        env=os.environ
        | {
            "FEDSTREAM_RUN__NAME": RUN,
            "FEDSTREAM_LOG__FORMAT": "json",
            "FEDSTREAM_REDIS__URL": f"redis://127.0.0.1:{server.port}/0",
            "FEDSTREAM_REDIS__USERNAME": "gateway",
            "FEDSTREAM_REDIS__PASSWORD": "of-gateway",
        },
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running_.stderr
        line: dict[str, Any] = {}
        while line.get("event") != "serving":
            text = running_.stderr.readline()
            assert text, "it ended"
            line = json.loads(text)
        yield running_, line
    finally:
        running_.kill()
        running_.wait()
        if running_.stderr:
            running_.stderr.close()


async def test_device_enrols_and_takes_part_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    key = Ed25519PrivateKey.generate()
    with guarded(tmp_path) as server:
        async with server.client("admin") as admin:
            hand = Hand(admin, KEYS, EveryRole(admin, KEYS, "test"))
            version = await hand.create()
            settings = read(None, [f"run.name={RUN}", f'coordinator.sites=["pool","{SITE}"]'])
            settings = settings.model_copy(update={"redis": server.settings("coordinator")})
            coordinator, _ = services._BUILDERS["coordinator"](settings, KEYS, "c-0")
            tls = (
                f"gateway.tls_cert={tmp_path / 'cert.pem'}",
                f"gateway.tls_key={tmp_path / 'key.pem'}",
            )
            async with (
                running(coordinator, context()),
                process(server, tmp_path, *tls) as (gateway, line),
                aiohttp.ClientSession(
                    f"https://127.0.0.1:{line['port']}",
                    connector=aiohttp.TCPConnector(ssl=trusting),
                ) as session,
            ):
                verdict, _ = await hand.ledger.invite(
                    SITE, {3: digest_of(INVITE.encode())}, seconds=60
                )
                assert verdict == "invited"

                async def signed(path: str, body: bytes, keyid: str) -> bytes:
                    about = sign(
                        key,
                        method="POST",
                        authority=f"127.0.0.1:{line['port']}",
                        path=path,
                        body=body,
                        keyid=keyid,
                        created=int(time.time()),
                    )
                    async with session.post(path, data=body, headers=about) as answer:
                        said = await answer.read()
                        assert answer.status in (200, 201), said
                        return said

                pem = pem_of(key.public_key())
                await signed(DEVICES, Enrolment(invite=INVITE, public_key=pem).encode(), "new")
                token = Access.decode(await signed(TOKEN, b"{}", "3")).token
                bearer = {"Authorization": f"Bearer {token}"}

                async def check_in(nonce: str, wait_s: float) -> tuple[int, bytes]:
                    said = {"nonce": nonce * 22, "wait_s": wait_s}
                    async with session.post("/v1/check-in", json=said, headers=bearer) as answer:
                        return answer.status, await answer.read()

                async def is_open() -> bool:
                    return (await check_in(f"{time.monotonic_ns() % 10}", 0))[0] == 204

                await wait_until(is_open)
                await owned_by(hand, 3, "gw-0")
                [trigger] = await hand.open(device=3)
                status, said = await check_in("w", 50)
                assert status == 200
                offer = Offer.decode(said)
                assert offer.task.id == trigger.task
                async with session.get(offer.model.url, headers=bearer) as answer:
                    assert answer.status == 200
                    assert digest_of(await answer.read()) == version.digest
                about = {"attempt": offer.attempt}
                beat = f"/v1/tasks/{offer.task.id}/heartbeat"
                async with session.post(beat, json=about, headers=bearer) as answer:
                    assert (await answer.json())["go_on"] is True
                about["reason"] = "dropped out"
                give_up = f"/v1/tasks/{offer.task.id}/give-up"
                async with session.post(give_up, json=about, headers=bearer) as answer:
                    assert answer.status == 200
                await ends(hand, "given_up", "dropped out")
                gateway.send_signal(signal.SIGTERM)
                assert gateway.wait(30) == 0
                denied = await admin.call("ACL", "LOG")
                assert denied == []


def test_gateway_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("fedstream.coordinator.gateway.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstream\[gateway\]'"):
        services._BUILDERS["gateway"](read(None, []), KEYS, "gw-0")
