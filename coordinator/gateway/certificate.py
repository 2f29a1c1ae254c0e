"""A gateway's certificate: whose names it is for, and until when. Nothing here trusts it."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography import x509

from fedstream.broker.errors import ConfigError


@dataclass(frozen=True)
class Certificate:
    """What devices look at. Times in seconds since 1970."""

    names: tuple[str, ...]  # hosts and addresses (subjectAltName), the only ones that count
    begins: float
    ends: float


def certificate_in(pem: bytes) -> Certificate:
    """The first certificate of a chain, which is the server's own. Raises ConfigError."""
    try:
        found = x509.load_pem_x509_certificates(pem)[0]
        names = _names(found)
    except ValueError as error:
        raise ConfigError(f"not a certificate in PEM: {error}") from error
    return Certificate(
        names,
        begins=found.not_valid_before_utc.timestamp(),
        ends=found.not_valid_after_utc.timestamp(),
    )


def _names(found: x509.Certificate) -> tuple[str, ...]:
    try:
        said = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    hosts = said.get_values_for_type(x509.DNSName)
    return (*hosts, *(str(one) for one in said.get_values_for_type(x509.IPAddress)))
