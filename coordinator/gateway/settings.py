"""The table ``[gateway]``."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from fedstream.broker.keys import GATEWAY, check_name
from fedstream.coordinator.gateway.attestation import NoVerifier, VerifierSettings
from fedstream.core.errors import ConfigError
from fedstream.core.messages import OWNED, POOL
from fedstream.protocol.messages import WAIT_S, UrlHost
from fedstream.runtime.config import Positive, Section

OTHER_FILES = 256  # that a gateway opens besides its devices' connections


class GatewaySettings(Section):
    """Whom a gateway serves, for how long it waits for devices, and its limits on them."""

    site: str = GATEWAY  # its replicas share a Redis user; not the pool
    devices: Annotated[int, Field(ge=1, le=OWNED)] = 20_000  # present at once, at this replica
    away_s: Positive = 60.0  # without a request, a device without a task is no longer present
    lease_s: Positive = 120.0  # without a request, a device's tasks are given up
    poll_s: Annotated[float, Field(ge=0, le=WAIT_S)] = (
        WAIT_S  # longest that a check-in waits for a task
    )
    retry_s: tuple[Positive, Positive] = (1.0, 10.0)  # when to check in again: between these
    heartbeat_s: Positive = 5.0  # between two heartbeats of a device that trains
    connections: Annotated[int, Field(ge=1)] = 25_000  # simultaneous; each waiting device has one
    # Of these, from one address, which may be that of a whole network; not with ``proxies``.
    address_connections: Annotated[int, Field(ge=1)] = 10_000
    # New ones per second from an address, beyond as many at once; likewise. Each costs a handshake.
    address_arrivals: Positive = 200.0
    downloads: Annotated[int, Field(ge=1)] = 256  # simultaneous, of models
    redis_downloads: Annotated[int, Field(ge=1)] = 64  # of these, that find no room in memory
    model_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # of models kept in memory
    # Of changes between models kept in memory; 0: devices get whole models.
    changes_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    uploads: Annotated[int, Field(ge=1)] = 256  # simultaneous, of updates; each takes 2 MiB
    chunk_s: Positive = 60.0  # in which 1 MiB of a model or an update, or its end, must pass
    # What tokens are signed with; None: the replicas agree on one in Redis.
    secret: Annotated[Annotated[SecretStr, Field(min_length=32)] | None, Field(exclude=True)] = None
    body_s: Positive = 15.0  # in which a JSON body must arrive
    device_rate: Positive = 20.0  # requests per second of a device
    address_rate: Positive = 500.0  # requests per second from an address
    proxies: Annotated[int, Field(ge=0)] = 0  # ours, in front, that add to X-Forwarded-For
    tls_cert: str | None = None  # PEM: the certificate and those that signed it
    tls_key: str | None = None  # PEM, without a password
    client_ca: str | None = None  # PEM: who signs devices' certificates; None: they need none
    attestation: VerifierSettings = NoVerifier()  # who judges what devices that enrol show
    # Host, or host:port, of the URLs that devices have for it; none: the certificate's names.
    names: Annotated[tuple[UrlHost, ...], Field(max_length=16)] = ()
    flower_app: str | None = None  # FAB that Flower's supernodes run; None: there are none
    flower_keys: str | None = None  # file: the supernodes' public keys, by device
    drain_s: Positive = 20.0

    @model_validator(mode="after")
    def _agree(self) -> GatewaySettings:
        try:
            check_name("gateway.site", self.site)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.site == POOL:
            raise ValueError(
                f"gateway.site = {POOL!r}: devices are not trusted as the operator's own trainers "
                "are; name another site, and list it in coordinator.sites"
            )
        least, most = self.retry_s
        if least > most:
            raise ValueError(f"gateway.retry_s = [{least:g}, {most:g}]: the first is the shorter")
        if self.away_s <= most:
            raise ValueError(
                f"gateway.away_s = {self.away_s:g} must be above gateway.retry_s = "
                f"[{least:g}, {most:g}]: a device that waits to check in again is not away"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("gateway.tls_cert and gateway.tls_key go together: set both or none")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "gateway.client_ca needs gateway.tls_cert: only who ends TLS can ask for "
                "certificates; without it, that is the proxy in front"
            )
        if self.client_ca is not None and self.flower_app is not None:
            raise ValueError(
                "gateway.client_ca with gateway.flower_app: Flower's supernodes have no "
                "certificates to show: serve them by a gateway of their own"
            )
        if (self.flower_app is None) != (self.flower_keys is None):
            raise ValueError(
                "gateway.flower_app and gateway.flower_keys go together: set both or none"
            )
        return self

    def tls(self) -> ssl.SSLContext | None:
        """What to serve TLS with; None: plain HTTP. Raises ConfigError if a file can't be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        for key in ("tls_cert", "tls_key", "client_ca"):
            file = getattr(self, key)
            try:
                if file is not None:
                    Path(file).read_bytes()
            except OSError as error:
                raise ConfigError(f"gateway.{key} = {file!r}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"gateway.tls_cert = {self.tls_cert!r} with gateway.tls_key = {self.tls_key!r}: "
                f"not a certificate in PEM and its key without a password: {error}"
            ) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # Who resumes shows no certificate, though it has ended or the authorities changed.
            # Only TLS 1.3: Python can't turn off the cache from which 1.2 resumes without tickets.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
            # Whoever is in the file is trusted, though somebody else signed its certificate: or it
            # would take a whole institution's root to trust its authority for devices.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:  # as above; it may have been removed since it was read
                raise ConfigError(
                    f"gateway.client_ca = {self.client_ca!r}: no certificates in PEM: {error}"
                ) from error
        return context
