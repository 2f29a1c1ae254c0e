"""A run whose devices come over HTTPS: real services, TLS and Redis, and kills meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.command import (
    BLOBS,
    FILES,
    TEST_GUARD_S,
    Command,
    adds_up,
    held,
    is_alive,
)

KILLED = ("device-0", "gateway", "coordinator")

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def pid_of(command: Command, name: str) -> int:
    """The process of a service or a device, by what only its command line has."""
    number = name.removeprefix("device-")
    key = f"{command.out}/devices/device-{number}.pem"
    found = command.pid(key if number != name else name)
    assert found is not None, name
    return found


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory, quick_programs: Path) -> Command:
    """A run of two devices, in which one of them, the gateway and the coordinator are killed."""
    folder = tmp_path_factory.mktemp("battered")
    (folder / "blobs.py").write_text(held(BLOBS, 40))
    command = Command(
        folder,
        "--task blobs.py:task --versions 60 --devices-over-http 2",
        sets=("devices.latency={kind='fixed', mean_s=0.05}", "wire.update=int8"),
        programs=quick_programs,
    )
    try:
        reached = 5
        for name in KILLED:
            command.reaches(reached)
            os.kill(pid_of(command, name), signal.SIGKILL)
            reached = min(command.version() + 5, 40)
        command.reaches(reached)
        processes = command.children()
        command.go()
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    assert not [one for one in processes if is_alive(one)]
    return command


def test_every_version_is_made_once_and_counts_add_up(battered: Command) -> None:
    summary = battered.summary
    assert adds_up(summary)
    assert summary["versions"] == summary["tasks"]["applied"] == 60
    assert summary["why"] == "version 60 reached"
    assert summary["refused"] == {}
    assert "nobody serves this device" not in summary["given_up"]
    assert {name: summary["restarts"][name] for name in KILLED} == dict.fromkeys(KILLED, 1)
    tasks = [row["task"] for row in battered.rows[1:]]
    assert len({*tasks}) == 60


def test_updates_came_from_the_devices_over_https(battered: Command) -> None:
    devices = Counter(row["device"] for row in battered.rows[1:])
    assert {*devices} == {"0", "1"}
    for device in ("0", "1"):
        said = (battered.out / "logs" / f"device-{device}.log").read_text().splitlines()
        assert said[0] == f"enrolled as device {device} of run demo"
        assert sum(": admitted: " in line for line in said) >= devices[device] - 1
    assert f"device 0 of run {'demo'}" in (battered.out / "logs" / "device-0.log").read_text()


def test_replay_makes_the_same_versions_bit_for_bit(
    battered: Command, quick_programs: Path
) -> None:
    done = subprocess.run(
        [quick_programs / "fedstream", "replay", battered.out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 of 60 versions identical" in done.stdout


def test_gateway_served_tls_and_logged_no_error(battered: Command) -> None:
    assert re.search(r"^gateway +https://127\.0\.0\.1:\d+$", battered.stdout, re.MULTILINE)
    log = (battered.out / "logs" / "gateway.log").read_text().splitlines()
    said = [json.loads(line) for line in log]
    assert [line for line in said if line["level"] in ("error", "critical")] == []
    assert sorted(one.name for one in battered.out.iterdir()) == sorted([*FILES, "devices"])
    kept = [one for one in (battered.out / "devices").iterdir() if one.is_file()]
    assert {one.stat().st_mode & 0o077 for one in kept} == {0}
