"""`fedstream devices invite`, `enrolled`, `revoke` and `admit`: who may come to a gateway."""

from __future__ import annotations

import json
import re

import pytest

from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.coordinator.gateway.auth import device_in, new_invite
from fedstream.core.digest import digest_of
from fedstream.core.errors import ConfigError
from fedstream.operate.enrolment import seconds_of
from tests.fedstream.operate.conftest import Command
from tests.support import Hand


async def enrol(hand: Hand, invite: str, key: str = "key", site: str = "gateway") -> str:
    gateway = GatewayLedger(hand.client, hand.keys, "gateway-0", site)
    device = device_in(invite)
    assert device is not None
    return await gateway.enrol(device, digest_of(invite.encode()), key, invite[:40], nonce_s=60)


async def test_an_invite_that_was_shown_enrols_its_device(hand: Hand, command: Command) -> None:
    await hand.create()
    code, out, err = await command("devices", "invite", "7", "3", "7")
    assert code == 0
    found = re.findall(r"^device (\d+): (\S+)$", out, re.MULTILINE)
    assert [device for device, _ in found] == ["3", "7"]
    assert "not shown again" in err
    assert [await enrol(hand, text) for _, text in found] == ["enrolled", "enrolled"]


async def test_invites_as_json(hand: Hand, command: Command) -> None:
    await hand.create()
    code, out, err = await command("devices", "invite", "3", "--expires", "12h", "--json")
    made = json.loads(out)
    assert (code, err) == (0, "")
    now = int((await hand.client.call("TIME"))[0])
    assert made["until"] - now == pytest.approx(12 * 3600, abs=60)
    assert await enrol(hand, made["invites"]["3"]) == "enrolled"


async def test_invites_are_for_the_gateway_of_a_site(hand: Hand, command: Command) -> None:
    await hand.create()
    _, out, _ = await command("devices", "invite", "3", "--site", "clinics", "--json")
    text = json.loads(out)["invites"]["3"]
    assert await enrol(hand, text) == "unknown"
    assert await enrol(hand, text, site="clinics") == "enrolled"
    assert "no device has enrolled" in (await command("devices", "enrolled"))[1]
    assert "enrolled" in (await command("devices", "enrolled", "--site", "clinics"))[1]


async def test_the_list_says_where_each_device_stands(hand: Hand, command: Command) -> None:
    await hand.create()
    assert (await command("devices", "enrolled"))[
        1
    ] == "no device has enrolled, and none is invited\n"
    _, out, _ = await command("devices", "invite", "1", "2", "3", "--json")
    invites = json.loads(out)["invites"]
    await enrol(hand, invites["2"], "its key")
    await enrol(hand, invites["3"])
    await command("devices", "revoke", "3", "4")
    await hand.ledger.invite("gateway", {5: "ab"}, seconds=0)
    code, out, _ = await command("devices", "enrolled")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        ["1", "invited"],
        ["2", "enrolled"],
        ["3", "revoked"],
        ["4", "revoked"],
        ["5", "invite"],
    ]
    assert digest_of(b"its key")[:16] in rows[1]
    listed = json.loads((await command("devices", "enrolled", "--json"))[1])["devices"]
    assert [one["state"] for one in listed] == [
        "invited",
        "enrolled",
        "revoked",
        "revoked",
        "invite expired",
    ]
    assert [one["key"] is None for one in listed] == [True, False, False, True, True]
    assert set(listed[0]) == {"device", "state", "enrolled", "key", "invited_until", "revoked"}
    assert invites["1"] not in out


async def test_revoke_and_admit_say_what_they_changed(hand: Hand, command: Command) -> None:
    await hand.create()
    assert await command("devices", "revoke", "3", "4") == (0, "revoked: devices 3, 4\n", "")
    assert await command("devices", "revoke", "4", "5") == (
        0,
        "revoked: device 5\nalready revoked: device 4\n",
        "",
    )
    code, _, err = await command("devices", "invite", "3")
    assert (code, "device 3 is revoked" in err, "devices admit 3" in err) == (1, True, True)
    assert await command("devices", "admit", "3", "9") == (
        0,
        "admitted: device 3\nnot revoked: device 9\n",
        "",
    )
    assert (await command("devices", "invite", "3"))[0] == 0


@pytest.mark.parametrize("name", ["invite", "revoke", "admit"])
async def test_what_is_not_there_is_named(hand: Hand, command: Command, name: str) -> None:
    code, _, err = await command("devices", name, "3")
    assert (code, "there is no run" in err, "its updater creates it" in err) == (1, True, True)
    await hand.create()
    code, _, err = await command("devices", name, "10")
    assert (code, "device 10 is not in this run" in err) == (1, True)


async def test_a_finished_run_invites_nobody(hand: Hand, command: Command) -> None:
    await hand.create()
    await hand.ledger.finish("enough")
    code, _, err = await command("devices", "invite", "3")
    assert (code, "the run is finished" in err) == (1, True)


async def test_a_wrong_duration_or_site_is_named(hand: Hand, command: Command) -> None:
    await hand.create()
    code, _, err = await command("devices", "invite", "3", "--expires", "tomorrow")
    assert (code, "--expires tomorrow: expected" in err) == (2, True)
    code, _, err = await command("devices", "invite", "3", "--site", "a b")
    assert (code, "--site: 'a b' is not a valid name" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("1.5h", 5400), ("7d", 604_800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "7", "d", "0s", "-1h", "1w", "366d", "1e3s", "7 d", "\u0661d"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number and s, m, h or d"):
        seconds_of(text)


def test_an_invite_names_its_device_and_is_not_guessed() -> None:
    texts = {new_invite(17) for _ in range(100)}
    assert len(texts) == 100
    assert {device_in(text) for text in texts} == {17}
    assert {len(text) for text in texts} == {3 + 32}
    for wrong in ("", "17", "17-", "17-short", "x-" + "i" * 32, "1" * 11 + "-" + "i" * 32):
        assert device_in(wrong) is None
