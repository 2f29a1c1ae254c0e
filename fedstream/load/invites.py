"""Invites from a file, and the keys that the laboratory's devices enrol with."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstream.broker.errors import ConfigError

_LINE = re.compile(r"device ([0-9]{1,10}): ([A-Za-z0-9_-]{22,64})")
_INVITE = re.compile(r"[A-Za-z0-9_-]{22,64}")


def read_invites(path: Path) -> dict[int, str]:
    """Invites by device, as `fedstream devices invite` prints them, with --json or without.

    Raises ConfigError, naming the file.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--invites {path}: cannot be read: {error}") from error
    found = _of_json(text) if text.lstrip().startswith("{") else _of_lines(text)
    if not found:
        raise ConfigError(
            f"--invites {path}: expected what `fedstream devices invite DEVICE... --json` prints"
        )
    return found


def _of_json(text: str) -> dict[int, str] | None:
    try:
        invites = json.loads(text)["invites"]
        found = {int(device): str(invite) for device, invite in invites.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if all(map(_INVITE.fullmatch, found.values())) else None


def _of_lines(text: str) -> dict[int, str] | None:
    matches = [_LINE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    return {int(one[1]): one[2] for one in matches if one} if all(matches) else None


def key_of(invite: str) -> Ed25519PrivateKey:
    """The key of the device that has this invite.

    It is derived from the invite, so that a second load with the same file finds its devices
    enrolled: the same invite and key again are no error.
    """
    derived = HKDF(SHA256(), 32, salt=None, info=b"fedstream load").derive(invite.encode())
    return Ed25519PrivateKey.from_private_bytes(derived)
