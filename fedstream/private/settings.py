"""The table ``[private]``: with it, the server gets sums of updates and no single one."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from fedstream.core.errors import ConfigError
from fedstream.core.words import WordBits
from fedstream.private import KemName, importing
from fedstream.runtime.config import Positive, Section

if TYPE_CHECKING:
    from fedstream.private.policy import PrivacyPolicy


class PolicyTerms(Section):
    """The table ``[private.terms]``: what a new policy is to say; see :class:`PrivacyPolicy`."""

    clip: Positive = 1.0
    min_batch: Annotated[int, Field(ge=2)] | None = None  # None: the strategy's batch
    weights: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(min_length=1)] = (
        1,
    ) * 20  # by staleness
    sigma: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    participations: Annotated[int, Field(ge=1)] = 1_000_000
    bands: Annotated[int, Field(ge=1)] = 1
    word_bits: WordBits = 32
    kem: KemName = "x25519"
    image: Annotated[str, Field(max_length=200)] = ""  # the helper's, by digest


class Buckets(Section):
    """How a private version's updates are split into sums, and what is made of these."""

    buckets: Annotated[int, Field(ge=1, le=100)] = 1  # sums in a version
    over: Literal["mean", "median", "geometric median"] = "mean"  # the buckets' means

    @model_validator(mode="after")
    def _resists(self) -> Self:
        if self.over != "mean" and self.buckets < 3:
            raise ValueError(
                f"private.over = {self.over!r} is the mean with private.buckets = {self.buckets}: "
                "set private.buckets to at least 3"
            )
        return self


class PrivateSettings(Buckets):
    """The table ``[private]``: the policy, and what each service needs to keep to it."""

    policy: str | None = None  # file: the policy, signed by the helper's owner; None: not private
    # The owner's Ed25519 public key.
    owner: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    # Updater: the helper.
    helper: str | None = None  # its URL
    token: Annotated[SecretStr | None, Field(exclude=True)] = None  # the helper's http.token
    ca: str | None = None  # PEM: authorities for the helper's certificate; None: the system's
    tls_cert: str | None = None  # PEM: the certificate that the helper asks for
    tls_key: str | None = None
    ask_s: Positive = 60.0  # time limit for an answer
    # Trainers: the folder with the private keys of their devices, DEVICE.pem.
    keys: str | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # at which epsilon is stated
    terms: PolicyTerms = PolicyTerms()  # of a policy that fedstream makes

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.policy is None) != (self.owner is None):
            raise ValueError("private.policy and private.owner go together: set both or none")
        if self.helper is not None and not re.match(r"https?://[^/\s]", self.helper):
            raise ValueError(
                f"private.helper = {self.helper!r} is not a URL: expected one such as "
                "https://helper.example.org:8443"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("private.tls_cert and private.tls_key go together: set both or none")
        return self

    def read(self) -> PrivacyPolicy | None:
        """Read the policy and check its signature; None: not private. Raises ConfigError."""
        if self.policy is None or self.owner is None:
            return None
        with importing("private.policy"):
            from fedstream.private.policy import public_key, read_policy

        at = f"private.policy = {self.policy!r}"
        return read_policy(Path(self.policy), public_key(self.owner), at)


def client_context(settings: PrivateSettings) -> ssl.SSLContext:
    """The TLS context for requests to the helper. Raises ConfigError for an unusable file."""
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.tls_cert is not None:
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"private.ca = {settings.ca!r}, private.tls_cert = {settings.tls_cert!r}, "
            f"private.tls_key = {settings.tls_key!r}: not readable as certificates in PEM and a "
            f"key without a password: {error}"
        ) from error
    return context
