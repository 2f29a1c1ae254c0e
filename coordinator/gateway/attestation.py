"""Attestation: evidence that an enrolling device shows, and the plug-in that verifies it.

An invite proves that the operator wants a device, and the request's signature proves that the
device has its key. Only a third party (the maker, or hardware that keeps the key) can attest more,
each in a format of its own, so the verifier is a plug-in. The built-in verifier accepts every
device.

An attestation must cover the device's public key. The request is signed by that key, so a copied
attestation is useless to others.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from fedstream.core.errors import FedstreamError
from fedstream.runtime.config import NamedSettings
from fedstream.runtime.plugins import OneOf, PluginRegistry

if TYPE_CHECKING:
    from fedstream.protocol.messages import Attestation

Doubt: TypeAlias = Literal["missing", "format", "forged", "key", "expired", "denied"]

WORDS: Final[dict[Doubt, str]] = {
    "missing": "this gateway enrols only devices that are attested",
    "format": "this gateway can't read attestations of this format",
    "forged": "the attestation is not by whom this gateway trusts",
    "key": "the attestation is about another key",
    "expired": "the attestation has expired",
    "denied": "the attestation is genuine, and this gateway does not take such devices",
}


class NotAttested(FedstreamError):
    """The device may not enrol because of its attestation."""

    def __init__(self, why: Doubt) -> None:
        super().__init__(WORDS[why])
        self.why: Doubt = why


@dataclass(frozen=True, slots=True)
class Newcomer:
    """An enrolling device, whose signature is verified and whose invite is not checked yet."""

    device: int
    run: str
    public_key: str  # PEM, in canonical form


class AttestationVerifier(NamedSettings):
    """Base of all verifiers; a verifier's fields are the keys of ``gateway.attestation``."""

    kind: str = ""

    @abstractmethod
    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        """Raise NotAttested unless the device may enrol.

        ``attestation``: None if the device shows none. Any client of the gateway can cause this
        call, so it should be quick; after 10 s the device is told to try again later.
        """


class NoVerifier(AttestationVerifier):
    """Accepts every device."""

    kind: Literal["none"] = "none"

    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        """Accept the device."""


def _accept(value: object) -> type[AttestationVerifier] | None:
    return value if isinstance(value, type) and issubclass(value, AttestationVerifier) else None


VERIFIERS: PluginRegistry[type[AttestationVerifier]] = PluginRegistry(
    "fedstream.attestation",
    "verifier of attestations",
    {"none": NoVerifier},
    accept=_accept,
    expected="a class derived from fedstream.coordinator.gateway.attestation.AttestationVerifier",
)
VerifierSettings: TypeAlias = Annotated[AttestationVerifier, OneOf(VERIFIERS)]
