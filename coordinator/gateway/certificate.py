"""A gateway's certificate: its names and expiry, and its renewal at run time.

Reads certificates without trusting any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509

from fedstream.core.errors import ConfigError
from fedstream.runtime import logging
from fedstream.runtime.tls import Certificate, RenewedFiles

if TYPE_CHECKING:
    import ssl

    from structlog.typing import FilteringBoundLogger

    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.runtime.tls import CurrentTls


def certificate_in(pem: bytes) -> Certificate:
    """The first certificate of a chain, the server's own. Raises ConfigError."""
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


@dataclass(frozen=True)
class Authority:
    """An authority for devices' certificates."""

    subject: str  # as in RFC 4514
    ends: float  # seconds since 1970
    may_sign: bool  # whether it may sign certificates


def authorities_in(pem: bytes) -> list[Authority]:
    """All certificates in a file. Raises ConfigError."""
    try:
        return [
            Authority(
                one.subject.rfc4514_string(), one.not_valid_after_utc.timestamp(), _may_sign(one)
            )
            for one in x509.load_pem_x509_certificates(pem)
        ]
    except ValueError as error:
        raise ConfigError(f"no certificates in PEM: {error}") from error


def _may_sign(found: x509.Certificate) -> bool:
    try:
        return found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _names(found: x509.Certificate) -> tuple[str, ...]:
    try:
        said = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    hosts = (host.lower() for host in said.get_values_for_type(x509.DNSName))
    return (*hosts, *(str(one) for one in said.get_values_for_type(x509.IPAddress)))


@dataclass(frozen=True)
class _Loaded:
    context: ssl.SSLContext | None
    certificate: Certificate
    authorities_end: float | None  # earliest expiry of the authorities for devices' certificates


class ServedCertificate:
    """The certificate for new connections, reloaded when its files change."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Read the certificate of settings with ``tls_cert``. Raises ConfigError.

        Create this object before ``settings.tls()`` reads the files: the object then notices any
        later replacement.
        """
        self._settings = settings
        named = (settings.tls_cert, settings.tls_key, settings.client_ca)
        self._files = RenewedFiles([Path(one) for one in named if one is not None], self._read)

    @property
    def certificate(self) -> Certificate:
        """The certificate in use."""
        return self._files.value.certificate

    def ends(self) -> dict[str, float]:
        """The expiry of each certificate in use, in seconds since 1970, by setting."""
        newest = self._files.value
        found = {"gateway.tls_cert": newest.certificate.ends}
        if newest.authorities_end is not None:
            found["gateway.client_ca"] = newest.authorities_end
        return found

    def look(self, current: CurrentTls, log: FilteringBoundLogger) -> None:
        """If the files have changed, use them from the next handshake on.

        ``current``: the TLS context of new connections. Unusable files are reported once, and the
        previous certificate stays in use.
        """
        before = self._files.value
        newest = self._files.look(
            lambda error: log.error(
                "the new certificate can't be used: the one before stays", reason=str(error)
            )
        )
        if newest is not before and newest.context is not None:
            current.context = newest.context
            ends, names = newest.certificate.ends, newest.certificate.names
            log.info("certificate renewed", ends=logging.stamp(ends), names=names)

    def _read(self) -> _Loaded:
        # A new context, as mismatched files would spoil the one in use.
        context, file = self._settings.tls(), str(self._settings.tls_cert)
        try:
            certificate = certificate_in(Path(file).read_bytes())
        except (OSError, ConfigError) as error:
            raise ConfigError(f"gateway.tls_cert = {file!r}: {error}") from error
        return _Loaded(context, certificate, self._read_authorities())

    def _read_authorities(self) -> float | None:
        """The earliest expiry of the authorities for devices' certificates."""
        file = self._settings.client_ca
        if file is None:
            return None
        try:
            return min(one.ends for one in authorities_in(Path(file).read_bytes()))
        except (OSError, ConfigError) as error:
            raise ConfigError(f"gateway.client_ca = {file!r}: {error}") from error
