"""A local run whose devices come over HTTPS: what it changes, and what can't work."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from fedstream.coordinator.policies import InFlight
from fedstream.core.errors import ConfigError
from fedstream.device.connection import GatewayAddress
from fedstream.local import preflight, request
from fedstream.local.preflight import Subject
from fedstream.local.request import OverHttp, RunRequest, configured
from fedstream.settings.config import Settings, read
from tests.trainer.adding import Adds, Point


def test_gateway_gets_a_site_and_a_certificate(tmp_path: Path) -> None:
    settings = configured(Settings(), 3, tmp_path)
    assert settings.coordinator.sites == ("pool", "gateway")
    assert settings.gateway.tls_cert == settings.gateway.tls_key
    assert settings.gateway.tls_cert == str(tmp_path / "devices" / "gateway.pem")
    assert (settings.gateway.device_rate, settings.gateway.address_rate) == (10_000, 10_000)
    again = configured(settings, 3, tmp_path)
    assert again == settings, "such as when it is resumed"


def test_what_is_configured_stays(tmp_path: Path) -> None:
    sets = [
        "gateway.site=phones",
        'coordinator.sites=["pool", "phones:0-9"]',
        "scheduler.policy.kind=in_flight",
        "scheduler.policy.n=7",
        "gateway.device_rate=5",
    ]
    settings = configured(read(None, sets), 3, tmp_path)
    assert settings.coordinator.sites == ("pool", "phones:0-9")
    assert isinstance(settings.scheduler.policy, InFlight)
    assert settings.scheduler.policy.n == 7
    assert settings.gateway.device_rate == 5


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["strategy.name=scaffold", "solver.kind=scaffold"], "get no control variates"),
        (["strategy.name=fedavg"], "a round takes 10 devices"),
        (["scheduler.policy.kind=none", "trainer.anarchic.rate=1"], "wait to be asked"),
    ],
)
def test_what_devices_over_https_cannot_do_is_refused(
    sets: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^--devices-over-http 3: .*{why}"):
        configured(read(None, sets), 3, tmp_path)


def test_rounds_work_if_all_of_their_devices_come(tmp_path: Path) -> None:
    configured(read(None, ["strategy.name=fedavg"]), 10, tmp_path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: None if name == "trustme" else name)
    with pytest.raises(ConfigError, match=r"trustme not installed: .*'fedstream\[demo\]'"):
        configured(Settings(), 3, tmp_path)


def test_more_devices_than_the_run_has_are_refused(asked: RunRequest) -> None:
    ten = Subject(Adds(), Point(), 10, True, "2")
    preflight.check_devices(replace(asked, devices_over_http=10), ten)
    with pytest.raises(ConfigError, match="--devices-over-http 11: the run has 10 devices"):
        preflight.check_devices(replace(asked, devices_over_http=11), ten)


def test_certificate_is_for_this_machine_and_its_key_for_this_user(tmp_path: Path) -> None:
    devices = OverHttp(1, tmp_path / "devices", 1)
    for _ in range(2):
        devices.prepare()  # the second time in place of what is there
    pair = tmp_path / "devices" / "gateway.pem"
    assert pair.stat().st_mode & 0o777 == 0o600
    settings = configured(Settings(), 1, tmp_path)
    server = settings.gateway.tls()
    assert server is not None
    client = GatewayAddress("https://127.0.0.1", ca=tmp_path / "devices" / "ca.pem").tls()
    assert shakes_hands(server, client, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shakes_hands(server, client, "127.0.0.2")


def shakes_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bool:
    """Whether two ends agree on a connection, in memory. Raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(there, back, server_side=True),
        client.wrap_bio(back, there, server_hostname=name),
    ]
    for end in (1, 0, 1, 0, 1):
        try:
            ends[end].do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[0].version() is not None and ends[1].getpeercert() is not None
