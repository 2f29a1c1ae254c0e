"""The operator's files for supernodes: their Flower app and their public keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.errors import ConfigError
from fedstream.protocol.signatures import WINDOW_S

KEY: Final = "flwr-public-key"
TIME: Final = "flwr-timestamp"
SIGNATURE: Final = "flwr-signature"

ConfigScalar = bool | int | float | str


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app bundle (FAB), which every supernode gets."""

    content: bytes
    digest: str
    name: str  # PUBLISHER/PROJECT
    version: str
    config: Mapping[str, ConfigScalar]  # the app's run configuration

    @classmethod
    def read(cls, file: str) -> FlowerApp:
        """Read a bundle made by `flwr build`. Raises ConfigError."""
        try:
            content = Path(file).read_bytes()
            with zipfile.ZipFile(io.BytesIO(content)) as packed:
                project = tomllib.loads(packed.read("pyproject.toml").decode())
            app = project["tool"]["flwr"]["app"]
            name = f"{app['publisher']}/{project['project']['name']}"
            version, config = str(project["project"]["version"]), _flat(app.get("config", {}))
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"gateway.flower_app = {file!r}: not a Flower app as `flwr build` makes it: "
                f"{type(error).__name__}: {error}"
            ) from error
        return cls(content, hashlib.sha256(content).hexdigest(), name, version, config)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, ConfigScalar]:
    """Flatten a table in Flower's way: ``a.b`` is key b of table a."""
    found: dict[str, ConfigScalar] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{key}"] = value
        else:
            raise TypeError(f"{prefix}{key} = {value!r}: Flower knows only single values")
    return found


class Roster:
    """The device of each supernode, by its public key, as listed by the operator."""

    def __init__(self, devices: Mapping[bytes, tuple[int, ec.EllipticCurvePublicKey]]) -> None:
        """``devices``: each device's number and public key, by the key in PEM."""
        self._devices = devices

    @classmethod
    def read(cls, file: str) -> Roster:
        """Read a list of keys: per line a device's number and a key in ssh-keygen's format.

        Raises ConfigError.
        """
        where = f"gateway.flower_keys = {file!r}"
        try:
            lines = Path(file).read_text().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error
        devices: dict[bytes, tuple[int, ec.EllipticCurvePublicKey]] = {}
        taken: set[int] = set()
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            wanted = f"{where}, line {number}: expected DEVICE ecdsa-sha2-nistp256 KEY"
            first, _, rest = line.strip().partition(" ")
            try:
                device, key = int(first), serialization.load_ssh_public_key(rest.encode())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigError(f"{wanted}: {error}") from error
            if not isinstance(key, ec.EllipticCurvePublicKey) or device < 0:
                raise ConfigError(f"{wanted}: Flower takes keys of `ssh-keygen -t ecdsa` only")
            pem = key.public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            if device in taken or pem in devices:
                raise ConfigError(f"{wanted}: this device or this key is there twice")
            taken.add(device)
            devices[pem] = device, key
        if not devices:
            raise ConfigError(f"{where}: no keys: expected lines DEVICE ecdsa-sha2-nistp256 KEY")
        return cls(devices)

    def device_of(self, headers: Mapping[str, str], now: float) -> tuple[int, bytes]:
        """The device of a request, and its key; Flower signs the time. Raises Refusal (401).

        ``now``: seconds since 1970.
        """
        try:
            pem = base64.b64decode(headers[KEY], validate=True)
            signature = base64.b64decode(headers[SIGNATURE], validate=True)
            said = headers[TIME]
            at = datetime.fromisoformat(said).timestamp()
        except (KeyError, ValueError, OverflowError, binascii.Error) as error:
            raise Refusal(
                401, "signature", f"expected the headers {KEY}, {TIME} and {SIGNATURE} of Flower"
            ) from error
        device, key = self._devices.get(pem, (None, None))
        if device is None or key is None:
            raise Refusal(
                401,
                "key",
                "this key is not listed in gateway.flower_keys; start the supernode "
                "with --auth-supernode-private-key",
            )
        if not abs(now - at) <= WINDOW_S:
            raise Refusal(401, "clock", f"signed at {said}: more than {WINDOW_S} s from our clock")
        try:
            key.verify(signature, said.encode(), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature as error:
            raise Refusal(401, "signature", "the signature is not this key's") from error
        return device, pem
