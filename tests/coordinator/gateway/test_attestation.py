"""Attestation of devices: the operator's verifier, and the answers that devices get."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway import auth
from fedstream.coordinator.gateway.attestation import (
    WORDS,
    AttestationVerifier,
    Doubt,
    Newcomer,
    NotAttested,
    NoVerifier,
)
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.errors import ConfigError
from fedstream.device.process import attestation_in
from fedstream.protocol.messages import ATTESTATION, ENROL_ROUTE, Attestation, Enrolment
from fedstream.protocol.signatures import pem_of
from fedstream.settings.config import read
from tests.coordinator.gateway.phones import INVITE, Phone, Replica, invite, said
from tests.coordinator.gateway.places import serving
from tests.docs.pages import blocks
from tests.support import Hand

PAGE = "docs/how-to/attest-devices.md"


class Saying(AttestationVerifier):
    """Refuses everybody for the reason that the test names."""

    why: str

    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        if self.why == "hang":
            await asyncio.Event().wait()
        if self.why not in WORDS:
            raise RuntimeError(self.why)
        doubt: Doubt = self.why
        raise NotAttested(doubt)


class Noting(AttestationVerifier):
    """Lets everybody in, and notes who it was."""

    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        SEEN.append((attestation, newcomer))


SEEN: list[tuple[Attestation | None, Newcomer]] = []


def enrolment(phone: Phone, shown: Attestation | None) -> bytes:
    pem = pem_of(phone.key.public_key())
    return Enrolment(invite=INVITE, public_key=pem, attestation=shown).encode()


async def enrolled(phone: Phone, shown: Attestation | None = None) -> tuple[int, str]:
    """Status, and the reason of a refusal."""
    answer = await phone.signed(ENROL_ROUTE, enrolment(phone, shown), keyid="new")
    return (answer.status, "") if answer.status in (200, 201) else await said(answer)


def signed_by(key: Ed25519PrivateKey, phone: Phone, format_: str = "manufacturer") -> Attestation:
    data = key.sign(pem_of(phone.key.public_key()).encode())
    return Attestation(format=format_, data=base64.b64encode(data).decode())


@pytest.fixture
def by_manufacturer(tmp_path: Path) -> tuple[Ed25519PrivateKey, dict[str, Any]]:
    """The manufacturer's key, and the settings by which the page's own verifier takes it."""
    key = Ed25519PrivateKey.generate()
    program, public = tmp_path / f"{tmp_path.name}.py", tmp_path / "manufacturer.pem"
    program.write_text(next(one.text for one in blocks(PAGE) if one.language == "python"))
    public.write_text(pem_of(key.public_key()))
    table = {"kind": f"{program}:ByManufacturer", "key": str(public)}
    return key, {"attestation": table}


async def test_only_what_the_manufacturer_signed_enrols(
    replica: Replica, hand: Hand, by_manufacturer: tuple[Ed25519PrivateKey, dict[str, Any]]
) -> None:
    key, settings = by_manufacturer
    phone, other = await replica(**settings), await replica(**settings)
    await invite(hand)
    assert await enrolled(phone) == (403, "attestation missing")
    assert await enrolled(phone, signed_by(key, phone, "tpm")) == (403, "attestation format")
    stranger = Ed25519PrivateKey.generate()
    assert await enrolled(phone, signed_by(stranger, phone)) == (403, "attestation forged")
    copied = signed_by(key, other)
    assert await enrolled(phone, copied) == (403, "attestation forged")
    assert await enrolled(phone, signed_by(key, phone)) == (201, "")
    assert await enrolled(phone, signed_by(key, phone)) == (200, ""), "the answer was lost"


async def test_gateway_without_a_verifier_says_so_once(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    for verifier, times in ((NoVerifier(), 1), (Noting(), 0)):
        with capture_logs() as lines:
            async with serving(hand, redis, attestation=verifier):
                pass
        said = [line for line in lines if "attestation is not checked" in line["event"]]
        assert len(said) == times, verifier


async def test_each_doubt_has_its_reason(replica: Replica, hand: Hand) -> None:
    await invite(hand)
    for why in WORDS:
        phone = await replica(attestation=Saying(why=why))
        assert await enrolled(phone) == (403, f"attestation {why}")


async def test_verifier_learns_who_enrols(replica: Replica, hand: Hand) -> None:
    SEEN.clear()
    phone = await replica(attestation=Noting())
    await invite(hand)
    shown = Attestation(format="any", data="AAEC")
    assert await enrolled(phone, shown) == (201, "")
    pem = pem_of(phone.key.public_key())
    assert [(shown, Newcomer(3, hand.keys.name, pem))] == SEEN
    assert shown.evidence == b"\0\1\2"


async def test_verifier_is_not_asked_about_what_nobody_signed(replica: Replica, hand: Hand) -> None:
    SEEN.clear()
    phone, other = await replica(attestation=Noting()), Phone(None)  # type: ignore[arg-type]
    await invite(hand)
    body = enrolment(other, None)
    assert await said(await phone.signed(ENROL_ROUTE, body, keyid="new")) == (401, "signature")
    assert SEEN == []


@pytest.mark.parametrize("why", ["broken", "hang"])
async def test_verifier_that_fails_lets_nobody_in(
    replica: Replica,
    hand: Hand,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(auth, "_VERIFY_S", 0.05)
    phone = await replica(attestation=Saying(why=why))
    await invite(hand)
    assert await enrolled(phone) == (503, "unavailable")
    assert "the verifier of attestations failed for device 3" in caplog.text
    assert ("RuntimeError: broken" in caplog.text) == (why == "broken")
    assert await hand.client.call("EXISTS", hand.keys.secret("gateway")) == 0


@pytest.mark.parametrize("data", ["AAE", "A" * (4 * -(-ATTESTATION // 3) + 4), "AA-_", "AA\n=="])
def test_data_that_is_not_base64_or_too_long_is_refused(data: str) -> None:
    with pytest.raises(ValidationError):
        Attestation(format="any", data=data)


def test_verifiers_are_named_like_other_plug_ins(tmp_path: Path) -> None:
    program = tmp_path / "half_verifier.py"
    program.write_text(
        "from fedstream.coordinator.gateway.attestation import AttestationVerifier\n"
        "class Half(AttestationVerifier):\n    pass\n"
    )
    assert GatewaySettings().attestation.kind == "none"
    with pytest.raises(ConfigError, match=r"the class does not define verify\(\)"):
        read(None, [f"gateway.attestation.kind={program}:Half"])
    with pytest.raises(ConfigError, match="did you mean 'none'"):
        read(None, ["gateway.attestation.kind=non"])


def test_device_reads_its_attestation_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "quote"
    file.write_bytes(b"\0\1")
    shown = attestation_in(f"tpm2:{file}")
    assert shown is not None
    assert (shown.format, shown.evidence) == ("tpm2", b"\0\1")
    assert attestation_in(None) is None
    with pytest.raises(ConfigError, match="expected FORMAT:FILE"):
        attestation_in("tpm2")
    with pytest.raises(ConfigError, match="No such file"):
        attestation_in(f"tpm2:{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="format's name has"):
        attestation_in(f"t p m:{file}")
    file.write_bytes(bytes(ATTESTATION + 1))
    with pytest.raises(ConfigError, match=f"{ATTESTATION + 1} bytes: at most {ATTESTATION}"):
        attestation_in(f"tpm2:{file}")
