"""What a device shows when it enrols, from a file that somebody else has made."""

from __future__ import annotations

import base64
from pathlib import Path

from pydantic import ValidationError

from fedstream.core.errors import ConfigError
from fedstream.protocol.messages import ATTESTATION, Attestation


def attestation_in(named: str | None) -> Attestation | None:
    """The attestation that ``FORMAT:FILE`` names. Raises ConfigError."""
    if named is None:
        return None
    format_, _, file = named.partition(":")
    if not file:
        raise ConfigError(f"--attestation {named}: expected FORMAT:FILE, as in tpm:device.quote")
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--attestation {named}: {error.strerror}") from error
    if len(data) > ATTESTATION:
        raise ConfigError(f"--attestation {named}: {len(data)} bytes: at most {ATTESTATION}")
    try:
        return Attestation(format=format_, data=base64.b64encode(data).decode())
    except ValidationError:
        raise ConfigError(
            f"--attestation {named}: the format's name has letters, digits and ._+-, at most 40"
        ) from None
