"""What a device keeps: its memory, whole or missing and never another device's; and its key."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
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
from fedstream.device.folder import DeviceFolder, FinishedUpdate, Identity
from fedstream.device.key import own_key
from fedstream.protocol.messages import UpdateReport
from fedstream.protocol.signatures import pem_of

ME = Identity(7, "demo", "https://gateway.example", "a key")
UNSENT = np.array([0.5, -1.0, 2.0], np.float32)
REPORT = UpdateReport(
    digest="1" * 64, samples=5, steps=2, lr=0.1, tau=3, base="2" * 64, layout="3" * 64
)
UPDATE = FinishedUpdate(
    "task-1",
    "0" * 12,
    "/v1/tasks/task-1/updates/000000000000",
    REPORT,
    np.arange(12, dtype=np.uint8),
    UNSENT,
)


@pytest.fixture
def folder(tmp_path: Path) -> DeviceFolder:
    folder = DeviceFolder(tmp_path / "state")
    folder.path.mkdir()
    folder.enrolled(ME)
    return folder


def test_everything_is_read_as_it_was_written(folder: DeviceFolder) -> None:
    assert folder.identity() == ME
    folder.keep_update(UPDATE)
    found = folder.update()
    assert found is not None
    assert (found.task, found.attempt, found.url) == (UPDATE.task, UPDATE.attempt, UPDATE.url)
    assert found.report == REPORT
    np.testing.assert_array_equal(found.data, UPDATE.data)
    np.testing.assert_array_equal(found.unsent, UNSENT)
    folder.delivered(found, known=True, counts=True)
    np.testing.assert_array_equal(folder.unsent(3), UNSENT)
    assert folder.update() is None


def test_update_without_feedback_leaves_none(folder: DeviceFolder) -> None:
    plain = replace(UPDATE, unsent=None)
    folder.keep_update(plain)
    found = folder.update()
    assert found is not None
    assert found.unsent is None
    folder.delivered(found, known=True, counts=True)
    assert folder.unsent(3) is None


@pytest.mark.parametrize("name", ["update", "unsent"])
def test_what_is_damaged_counts_as_missing(folder: DeviceFolder, name: str) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    folder.keep_update(UPDATE)
    data = bytearray((folder.path / name).read_bytes())
    for at in (0, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (folder.path / name).write_bytes(damaged)
        assert (folder.update() if name == "update" else folder.unsent(3)) is None
    (folder.path / name).write_bytes(data[:10])
    assert (folder.update() if name == "update" else folder.unsent(3)) is None


def test_feedback_of_another_model_is_not_used(folder: DeviceFolder) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    assert folder.unsent(4) is None


def test_another_devices_memory_is_deleted(folder: DeviceFolder) -> None:
    folder.keep_update(UPDATE)
    folder.delivered(UPDATE, known=True, counts=True)
    folder.enrolled(replace(ME, run="another"))
    assert folder.unsent(3) is None


def test_damaged_identity_says_what_to_do(folder: DeviceFolder) -> None:
    for text in ("", "[]", "{}", '{"device": "x", "run": "", "url": "", "key": ""}'):
        (folder.path / "device.json").write_text(text)
        with pytest.raises(ConfigError, match=r"device.json: damaged: delete it, and enrol again"):
            folder.identity()


# the device's key

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
