"""The table ``[helper]``."""

from __future__ import annotations

import ssl
from typing import Annotated

from pydantic import Field, model_validator

from fedstream.core.errors import ConfigError
from fedstream.runtime.config import Positive, Section

_MOST_EPOCHS = 200  # kept at once: their ids fit the header of an answer


class HelperSettings(Section):
    """The table ``[helper]``: files, epochs and TLS. Only the store is written."""

    policy: str | None = None  # file: the policy, signed by the helper's owner
    # The owner's Ed25519 public key.
    owner: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    roster: str | None = None  # file: the devices' public keys
    key: str | None = None  # PEM: the Ed25519 private key that the policy names
    store: str | None = None  # SQLite: keys and opened tasks; never restore it from a backup
    epoch_s: Positive = 86_400.0  # between two epochs, each with a key of its own
    keep_s: Positive = 86_400.0  # after it ended, an epoch's updates can still be opened
    body_s: Positive = 60.0  # time limit for an intent's body
    tls_cert: str | None = None  # PEM: the certificate and its chain
    tls_key: str | None = None  # PEM, without a password
    client_ca: str | None = None  # PEM: authorities for the updater's certificate; None: not asked
    drain_s: Positive = 20.0

    @model_validator(mode="after")
    def _agree(self) -> HelperSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("helper.tls_cert and helper.tls_key go together: set both or none")
        if self.keep_s > _MOST_EPOCHS * self.epoch_s:
            raise ValueError(
                f"helper.keep_s must be at most {_MOST_EPOCHS} times helper.epoch_s "
                f"({self.epoch_s:g}): GET /v1/key names all epochs that can be opened"
            )
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("helper.client_ca needs helper.tls_cert")
        return self

    def tls(self) -> ssl.SSLContext | None:
        """Make the TLS context; None: plain HTTP. Raises ConfigError for an unusable file."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            if self.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_ca)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"helper.tls_cert = {self.tls_cert!r}, helper.tls_key = {self.tls_key!r}, "
                f"helper.client_ca = {self.client_ca!r}: not readable as certificates in PEM and "
                f"a key without a password: {error}"
            ) from error
        return context
