"""The device's key: made once, for its owner alone; any other file is refused with its reason."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from fedstream.core.errors import ConfigError
from fedstream.device.key import own_key
from fedstream.protocol.signatures import pem_of

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


def write(
    path: Path, key: PrivateKey, encryption: KeySerializationEncryption | None = None
) -> None:
    how = encryption or NoEncryption()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    path.chmod(0o600)


def test_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "device.pem"
    umask = os.umask(0)
    try:
        key = own_key(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----")  # PKCS #8
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert pem_of(own_key(path).public_key()) == pem_of(key.public_key())
    assert [one.name for one in tmp_path.iterdir()] == ["device.pem"]


def test_key_of_ed25519_is_used(tmp_path: Path) -> None:
    path, key = tmp_path / "device.pem", Ed25519PrivateKey.generate()
    write(path, key)
    assert pem_of(own_key(path).public_key()) == pem_of(key.public_key())


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o604])
def test_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "device.pem"
    own_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="other users may read or write this private key"):
        own_key(path)


def test_other_keys_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "device.pem"
    write(path, ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(ConfigError, match="must be of P-256 or Ed25519"):
        own_key(path)
    write(path, Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret"))
    with pytest.raises(ConfigError, match="the private key is encrypted"):
        own_key(path)
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="not a private key in PEM"):
        own_key(path)


def test_key_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Not even for the next process of the same number, as in a container."""
    path, limits = tmp_path / "device.pem", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large"):
            own_key(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/device.pem: cannot be written: No such file"):
        own_key(tmp_path / "none" / "device.pem")
