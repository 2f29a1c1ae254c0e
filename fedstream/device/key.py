"""The device's private key: a file that only its owner can read, made on first use."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedstream.core.errors import ConfigError
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:
    from fedstream.protocol.signatures import PrivateKey

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST = 1 << 16  # bytes of a file


def own_key(path: Path, *, ed25519: bool = False) -> PrivateKey:
    """Read a key of P-256 or Ed25519 (PEM, PKCS #8); without a file, make a new one.

    ``ed25519``: a new one is of Ed25519, else of P-256. Raises ConfigError if the file is unusable,
    or if other users can read or write it.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate() if ed25519 else ec.generate_private_key(ec.SECP256R1())
        return _make(path, key)
    except OSError as error:
        raise ConfigError(f"--key {path}: cannot be read: {error.strerror}") from error


def _read(path: Path) -> PrivateKey:
    with os.fdopen(open_regular(path), "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid not in (os.getuid(), 0) or about.st_mode & _OTHERS:
            raise ConfigError(
                f"--key {path}: other users may read or write this private key: it must be yours "
                "alone (chmod 600)"
            )
        data = file.read(_MOST)
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(
            f"--key {path}: the private key is encrypted, and nobody is there to type a password: "
            "store it unencrypted, readable by you alone"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"--key {path}: not a private key in PEM: name a file that doesn't exist to have one "
            "made"
        ) from None
    is_p256 = isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)
    if isinstance(key, Ed25519PrivateKey) or (
        is_p256 and isinstance(key, ec.EllipticCurvePrivateKey)
    ):
        return key
    raise ConfigError(f"--key {path}: the private key must be of P-256 or Ed25519")


def _make(path: Path, key: PrivateKey) -> PrivateKey:
    """Write a new key atomically, for this user alone."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            try:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
                os.link(aside, path)  # unlike a rename, it replaces no other process's key
            finally:
                aside.unlink()
    except OSError as error:
        raise ConfigError(f"--key {path}: cannot be written: {error.strerror}") from error
    return key
