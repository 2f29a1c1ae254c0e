"""`fedstream doctor` on a gateway: what would keep devices out is found before they come."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import trustme

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway.certificate import authorities_in
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.doctor import checkup as doctor
from fedstream.doctor import gateway
from fedstream.doctor.findings import Finding
from fedstream.settings.config import Settings, read
from tests.support import snapshot

DAY = 86_400


SITES = 'coordinator.sites=["pool","gateway"]'


def issued(folder: Path, *hosts: str, days: float = 90, **about: Any) -> GatewaySettings:
    """Settings with a certificate for these hosts that ends in so many days."""
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, minutes=1)
    made = trustme.CA().issue_cert(*hosts, not_after=ends, **about)
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return GatewaySettings(
        tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"), connections=10
    )


def certificate(settings: GatewaySettings, now: float | None = None) -> tuple[str, str]:
    """What is said about the certificate."""
    [found] = [
        one
        for one in gateway.here(settings, now=now or time.time())
        if one.about == "gateway certificate"
    ]
    return found.level, str(found)


def test_certificate_that_devices_will_accept(tmp_path: Path) -> None:
    level, said = certificate(issued(tmp_path, "gw.example.org", "192.0.2.7"))
    assert (level, said) == ("ok", "for gw.example.org, 192.0.2.7; ends in 90 days")


def test_gateway_behind_a_proxy_needs_its_names() -> None:
    """With neither a certificate nor names, a signature for any host would be good here."""
    assert certificate(GatewaySettings(names=("gw.example.org",)))[0] == "ok"
    level, said = certificate(GatewaySettings())
    assert level == "warning"
    assert said.endswith("set gateway.names to the host in the devices' URL")


@pytest.mark.parametrize(
    ("days", "level", "words"),
    [
        (13, "warning", "ends in 13 days -> renew it: gateways serve it"),
        (15, "ok", "ends in 15 days"),
        (-3, "problem", "ended 3 days ago"),
    ],
)
def test_certificate_that_ends(tmp_path: Path, days: int, level: str, words: str) -> None:
    settings = issued(tmp_path, "gw.example.org", days=90)
    found = certificate(settings, now=time.time() + (90 - days) * DAY)
    assert found[0] == level
    assert words in found[1]


def test_certificate_that_no_device_accepts(tmp_path: Path) -> None:
    settings = issued(tmp_path, "gw.example.org")
    level, said = certificate(settings, now=1.0)
    assert (level, "is not valid yet" in said) == ("problem", True)
    nameless = issued(tmp_path, common_name="gw.example.org")
    level, said = certificate(nameless)
    assert (level, "no subjectAltName" in said) == ("problem", True)


def test_files_that_the_gateway_could_not_use(tmp_path: Path) -> None:
    settings = issued(tmp_path, "gw.example.org")
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("gw.example.org").private_key_pem.write_to_path(other)
    for key, words in ((other, "not a certificate in PEM and its key"), ("no.pem", "No such file")):
        level, said = certificate(settings.model_copy(update={"tls_key": str(key)}))
        assert level == "problem"
        assert words in said


def authorities(settings: GatewaySettings, file: Path, now: float = 0.0) -> tuple[str, str]:
    """What is said about who signs devices' certificates."""
    asking = settings.model_copy(update={"client_ca": str(file)})
    [found] = [
        one
        for one in gateway.here(asking, now=now or time.time())
        if one.about == "gateway client_ca"
    ]
    return found.level, str(found)


def test_authority_of_devices_certificates(tmp_path: Path) -> None:
    settings, file = issued(tmp_path, "gw.example.org"), tmp_path / "devices.pem"
    authority = trustme.CA(organization_name="Clinics")
    authority.cert_pem.write_to_path(str(file))
    level, said = authorities(settings, file)
    assert level == "ok"
    assert "devices need a certificate of" in said
    assert "O=Clinics" in said
    ends = authorities_in(file.read_bytes())[0].ends
    level, said = authorities(settings, file, now=ends - 3.5 * DAY)
    assert (level, "ends in 4 days -> add its successor" in said) == ("warning", True)
    level, said = authorities(settings, file, now=ends + 2.6 * DAY)
    assert (level, "ended 3 days ago" in said) == ("problem", True)


def test_authority_that_lets_no_device_in(tmp_path: Path) -> None:
    settings, file = issued(tmp_path, "gw.example.org"), tmp_path / "devices.pem"
    trustme.CA().issue_cert("device-3").cert_chain_pems[0].write_to_path(str(file))
    level, said = authorities(settings, file)
    assert (level, "may not sign certificates" in said) == ("problem", True)
    file.write_text("junk")
    level, said = authorities(settings, file)
    assert (level, "no certificates in PEM" in said) == ("problem", True)
    level, said = authorities(settings, tmp_path / "none.pem")
    assert (level, "No such file" in said) == ("problem", True)


@pytest.mark.parametrize(("files", "level"), [(1279, "warning"), (1280, "ok"), (None, "ok")])
def test_connections_need_open_files(files: int | None, level: str) -> None:
    found = gateway.open_files(GatewaySettings(connections=1024), files)
    assert found.level == level
    assert ("raise the limit (ulimit -Hn) to 1280" in str(found)) == (level == "warning")


@pytest.mark.parametrize(
    ("sets", "user", "expected"),
    [
        ([], "default", False),
        ([], "gateway", True),
        ([], "gateway-clinics", True),
        ([SITES], "default", True),
        (["gateway.away_s=90"], "default", True),
    ],
)
def test_nothing_is_said_of_a_gateway_that_nobody_wants(
    sets: list[str], user: str, expected: bool
) -> None:
    assert gateway.is_meant(read(None, sets), user) is expected


def settings_with(*sets: str) -> Settings:
    return read(None, [*sets])


def test_its_site_has_to_be_served() -> None:
    assert gateway.site(settings_with(SITES), "default").level == "ok"
    forgotten = settings_with("gateway.site=clinics", SITES)
    found = gateway.site(forgotten, "default")
    assert found.level == "problem"
    assert found.change == 'set coordinator.sites = ["pool", "gateway", "clinics"]'
    assert gateway.site(forgotten, "gateway-clinics").level == "not checked"


@pytest.mark.parametrize(
    ("sets", "user", "level"),
    [
        ([], "default", "warning"),
        (["coordinator.trainer_silence_s=60"], "coordinator", "ok"),
        ([], "gateway-clinics", "not checked"),
    ],
)
def test_gateway_may_take_a_while_to_start_again(sets: list[str], user: str, level: str) -> None:
    found = gateway.silence(settings_with(*sets), user)
    assert found.level == level
    assert (found.change == "set coordinator.trainer_silence_s = 60") == (level == "warning")


async def test_doctor_examines_a_configured_gateway_and_touches_nothing(
    redis: RedisSettings, keys: Keys, client: Client, tmp_path: Path
) -> None:
    theirs = issued(tmp_path, "127.0.0.1")
    sets = [
        f"redis.url={redis.url}",
        f"run.name={keys.name}",
        f"journal.dir={tmp_path / 'journal'}",
    ]
    more = [
        SITES,
        "coordinator.trainer_silence_s=60",
        "gateway.connections=10",
        f"gateway.tls_cert={theirs.tls_cert}",
        f"gateway.tls_key={theirs.tls_key}",
    ]

    async def found(*given: str, **how: Any) -> dict[str, Finding]:
        findings = await doctor.examine(read(None, [*sets, *given]), **how)
        return {one.about: one for one in findings if one.about.startswith("gateway")}

    assert await found() == {}
    healthy = await found(*more)
    assert {about: one.level for about, one in healthy.items()} == {
        "gateway site": "ok",
        "gateway restarts": "ok",
        "gateway certificate": "ok",
        "gateway open files": "ok",
    }
    assert "for 127.0.0.1; ends in" in healthy["gateway certificate"].text
    assert await snapshot(client, keys) == {}
