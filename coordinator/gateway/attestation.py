"""Attestation: what a device that enrols shows besides its invite, and who judges that.

An invite says that the operator wants this device, its signature that it has the key. What kind of
device it is (who made it, whether its key is in hardware) only somebody else can say, in a form of
his own; so who judges that is a plug-in. The built-in one judges nothing.

Whatever is shown must be about the device's public key. The request is signed by that key, so an
attestation that somebody else has copied is worth nothing to him.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from fedstream.core.errors import FedstreamError
from fedstream.runtime.config import NamedSettings
from fedstream.runtime.plugins import OneOf, Registry

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
    """A device may not enrol, because of its attestation."""

    def __init__(self, why: Doubt) -> None:
        super().__init__(WORDS[why])
        self.why: Doubt = why


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A device that enrols. Its request is signed by its key; its invite is yet to be checked."""

    device: int
    run: str
    public_key: str  # PEM; a key has one text


class AttestationVerifier(NamedSettings):
    """Base of all verifiers: its fields are keys of ``gateway.attestation``."""

    kind: str = ""

    @abstractmethod
    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        """Raise NotAttested unless the device may enrol.

        ``attestation``: None if it shows none. Anybody who can reach the gateway can make it ask,
        so it should be quick; after 10 s the device is told to try again later.
        """


class NoVerifier(AttestationVerifier):
    """Every device may enrol, whatever it shows."""

    kind: Literal["none"] = "none"

    async def verify(self, attestation: Attestation | None, newcomer: Newcomer) -> None:
        """Nothing is judged."""


def _accept(value: object) -> type[AttestationVerifier] | None:
    return value if isinstance(value, type) and issubclass(value, AttestationVerifier) else None


VERIFIERS: Registry[type[AttestationVerifier]] = Registry(
    "fedstream.attestation",
    "verifier of attestations",
    {"none": NoVerifier},
    accept=_accept,
    expected="a class derived from fedstream.coordinator.gateway.attestation.AttestationVerifier",
)
VerifierSettings: TypeAlias = Annotated[AttestationVerifier, OneOf(VERIFIERS)]
