"""`fedstream load` as it is typed: a process, its tables, its JSON and its exit codes."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fedstream.broker.digest import digest_of
from fedstream.broker.errors import FedstreamError
from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.cli.app import main
from fedstream.cli.load import invited
from fedstream.trainer.vector import layout_of
from tests.coordinator.gateway.places import SITE
from tests.device.fake import FakeGateway
from tests.support import Hand, wait_until
from tests.trainer.stepping import Steps

pytestmark = pytest.mark.process
COMMAND = (sys.executable, "-P", "-m", "fedstream", "load")


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[FakeGateway, str]]:
    """A gateway without tasks, and its URL."""
    gateway = FakeGateway(layout_of(Steps().model()))
    server = gateway.server()
    await server.start_server()
    yield gateway, str(server.make_url("/"))
    await server.close()


@pytest.fixture
def invites(gateway: tuple[FakeGateway, str], tmp_path: Path) -> Path:
    """Invites for two devices, as `fedstream devices invite` prints them."""
    file = tmp_path / "invites"
    made = {device: f"{device}-{secrets.token_urlsafe(24)}" for device in (3, 4)}
    gateway[0].invites |= {text: device for device, text in made.items()}
    file.write_text("".join(f"device {device}: {text}\n" for device, text in made.items()))
    return file


async def start(*words: object) -> Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND, *map(str, words), stdout=PIPE, stderr=PIPE
    )


async def test_load_ends_by_itself_and_reports(
    gateway: tuple[FakeGateway, str], invites: Path
) -> None:
    _, url = gateway
    process = await start(
        "--url", url, "--devices", 2, "--invites", invites, "--seconds", 1, "--json"
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["devices"] == 2
    assert found["answers"]["enrol"] == {"201": 2}
    assert found["answers"]["check-in"].keys() == {"204"}
    assert found["latency_ms"]["token"]["count"] == 2
    assert found["laboratory"]["memory"] > 1e6


async def test_interrupted_load_reports_all_the_same(
    gateway: tuple[FakeGateway, str], invites: Path
) -> None:
    it, url = gateway
    process = await start("--url", url, "--devices", 1, "--invites", invites, "--seconds", 600)
    await wait_until(lambda: len(it.check_ins) > 0)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err
    text = out.decode()
    assert "offer to receipt" in text
    assert "1 device, " in text
    assert b"SIGINT: ending" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--url", "https://gateway.example", "--devices", 1), "--yes-elsewhere"),
        (("--url", "https://127.0.0.1:1", "--devices", 1, "--cuts", 2), "--cuts 2: must be"),
        (("--url", "https://127.0.0.1:1", "--devices", 3, "--invites", "FILE"), "2 invites for 3"),
    ],
)
async def test_wrong_command_lines_say_what_is_wrong(
    words: tuple[object, ...], text: str, invites: Path
) -> None:
    process = await start(*(invites if word == "FILE" else word for word in words))
    _, err = await process.communicate()
    assert process.returncode == 2
    assert text in err.decode()


async def test_devices_that_have_enrolled_are_not_replaced_without_consent(hand: Hand) -> None:
    await hand.create()
    client, keys = hand.client, hand.keys
    first = await invited(client, keys, SITE, 3, replace=False)
    assert [*first] == [0, 1, 2]
    again = await invited(client, keys, SITE, 3, replace=False)
    assert again != first, "invites that nobody has used are replaced"
    ledger = GatewayLedger(client, keys, "gw", SITE)
    digest = digest_of(again[1].encode())
    assert await ledger.enrol(1, digest, "a key", "n" * 22, nonce_s=60.0) == "enrolled"
    with pytest.raises(FedstreamError, match="1 device of 0 to 2 enrolled before"):
        await invited(client, keys, SITE, 3, replace=False)
    assert [*await invited(client, keys, SITE, 1, replace=False)] == [0]
    assert [*await invited(client, keys, SITE, 3, replace=True)] == [0, 1, 2]


@pytest.mark.parametrize("needed", ["cryptography", "httptools"])
def test_missing_extra_is_named(
    needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "fedstream.cli.load.find_spec", lambda name: None if name == needed else object()
    )
    with pytest.raises(SystemExit) as ended:
        main(["load", "--url", "https://gateway.example", "--devices", "1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{needed} is not installed: pip install 'fedstream[load]'" in said
