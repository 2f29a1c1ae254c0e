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

OTHER_FILES = 256  # open files besides the devices' connections


class GatewaySettings(Section):
    """The table ``[gateway]``: site, time limits, quotas, TLS and enrolment."""

    site: str = GATEWAY  # not the pool; its replicas share a Redis user
    devices: Annotated[int, Field(ge=1, le=OWNED)] = 20_000  # most devices present at this replica
    away_s: Positive = 60.0  # silence after which a device without a task is no longer present
    lease_s: Positive = 120.0  # silence after which a device's tasks are given up
    poll_s: Annotated[float, Field(ge=0, le=WAIT_S)] = (
        WAIT_S  # longest that a check-in waits for a task
    )
    retry_s: tuple[Positive, Positive] = (1.0, 10.0)  # wait before the next check-in: between these
    heartbeat_s: Positive = 5.0  # between two heartbeats of a device that trains
    connections: Annotated[int, Field(ge=1)] = 25_000  # simultaneous; each waiting device has one
    # Connections from one address, which may belong to a whole network; not with ``proxies``.
    address_connections: Annotated[int, Field(ge=1)] = 10_000
    # New connections per second from one address, after a burst; not with ``proxies``.
    address_arrivals: Positive = 200.0
    downloads: Annotated[int, Field(ge=1)] = 256  # simultaneous, of models
    redis_downloads: Annotated[int, Field(ge=1)] = 64  # of these, downloads that read from Redis
    model_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # bytes of models in memory
    # Bytes of changes between models in memory; 0: devices get whole models.
    changes_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    uploads: Annotated[int, Field(ge=1)] = 256  # simultaneous, of updates; each takes 2 MiB
    chunk_s: Positive = 60.0  # time limit for each MiB of a model or an update
    # Secret for signing tokens; None: the replicas share one in Redis.
    secret: Annotated[Annotated[SecretStr, Field(min_length=32)] | None, Field(exclude=True)] = None
    body_s: Positive = 15.0  # time limit for a JSON body
    device_rate: Positive = 20.0  # requests per second of a device
    address_rate: Positive = 500.0  # requests per second from an address
    proxies: Annotated[int, Field(ge=0)] = 0  # our own in front; they add to X-Forwarded-For
    tls_cert: str | None = None  # PEM: the certificate and its chain
    tls_key: str | None = None  # PEM, without a password
    client_ca: str | None = None  # PEM: authorities for devices' certificates; None: not required
    attestation: VerifierSettings = NoVerifier()  # verifier of enrolling devices' attestations
    # Host or host:port in the devices' URLs; none: the certificate's names.
    names: Annotated[tuple[UrlHost, ...], Field(max_length=16)] = ()
    flower_app: str | None = None  # FAB for Flower's supernodes; None: no supernodes
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
        """Make the TLS context; None: plain HTTP. Raises ConfigError for an unusable file."""
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
            # No resumption: a resuming client shows no certificate, which may have expired since.
            # Only TLS 1.3: Python can't turn off the session cache of TLS 1.2.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
            # Trust intermediate authorities in the file, so that an institution's authority for
            # devices can be trusted without its root.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:  # as above; the file may have been removed since
                raise ConfigError(
                    f"gateway.client_ca = {self.client_ca!r}: no certificates in PEM: {error}"
                ) from error
        return context
