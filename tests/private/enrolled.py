"""Devices that are enrolled in a policy, for the tests of what is private."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedstream.private.policy import KeyRoster, PrivacyPolicy, signed
from fedstream.private.sealing import EpochKey, EpochSecret


def key_of(number: int) -> Ed25519PrivateKey:
    """The same key for the same number."""
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32))


def hex_of(key: Ed25519PrivateKey) -> str:
    """The public half, as policies name it."""
    return key.public_key().public_bytes_raw().hex()


OWNER, HELPER = key_of(1 << 200), key_of(1 << 201)
DEVICES = [key_of(1 + device) for device in range(40)]
ROSTER = KeyRoster.of([key.public_key() for key in DEVICES])


def policy_of(**changes: Any) -> PrivacyPolicy:
    """A valid policy with some other keys."""
    table = {
        "roster": ROSTER.digest,
        "helper": hex_of(HELPER),
        "parameters": 50,
        "clip": 1.0,
        "min_batch": 3,
        "max_batch": 10,
        "weights": (1,) * 10,
        "sigma": 1.0,
        "participations": 5,
        **changes,
    }
    if "scale_bits" in table:
        return PrivacyPolicy(**table)
    return PrivacyPolicy.finest(**table)


def pem_of(key: Any) -> bytes:
    data: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return data


def epoch_of(policy: PrivacyPolicy, until: int = 1 << 40) -> tuple[EpochSecret, EpochKey]:
    """A helper's epoch: its secret, and the key to which devices seal."""
    secret = EpochSecret.new(policy.kem)
    return secret, secret.announced(policy, HELPER, until)


def files(folder: Path, policy: PrivacyPolicy | None = None) -> dict[str, Any]:
    """Writes a helper's files, and returns its settings."""
    policy = policy or policy_of()
    for name, data in {
        "policy.json": signed(policy, OWNER),
        "roster.txt": ROSTER.text,
        "helper.pem": pem_of(HELPER),
    }.items():
        (folder / name).write_bytes(data)
    return {
        "policy": str(folder / "policy.json"),
        "owner": hex_of(OWNER),
        "roster": str(folder / "roster.txt"),
        "key": str(folder / "helper.pem"),
        "store": str(folder / "helper.sqlite"),
    }
