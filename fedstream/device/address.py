"""A gateway's address: URL, certificates, and a proxy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from fedstream.core.errors import ConfigError


@dataclass(frozen=True)
class GatewayAddress:
    """A gateway's URL, and the files for TLS with it."""

    url: str
    ca: Path | None = None  # PEM; None: the system's authorities
    cert: Path | None = None  # PEM, of the device, for gateways that ask for one
    cert_key: Path | None = None  # PEM; None: it is in ``cert``

    @property
    def base(self) -> URL:
        """The parsed and checked URL. Raises ConfigError."""
        try:
            url = URL(self.url)
            port = url.port
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or port is None:
            raise ConfigError(f"--url {self.url}: expected https://HOST or https://HOST:PORT")
        if url.path not in ("", "/") or url.query_string or url.fragment or url.user:
            raise ConfigError(
                f"--url {self.url}: expected https://HOST or https://HOST:PORT alone: requests are "
                "signed with their paths, so a gateway has no folder of its own"
            )
        if url.scheme == "http" and not _is_here(url.host):
            raise ConfigError(
                f"--url {self.url}: over http:// anybody on the way could read and change "
                "everything: use https:// (http:// is only for this machine)"
            )
        return url.origin()

    @property
    def files(self) -> list[Path]:
        """The files that :meth:`tls` reads, except the system's."""
        return [one for one in (self.ca, self.cert, self.cert_key) if one is not None]

    def tls(self) -> ssl.SSLContext:
        """The TLS context of connections. Raises ConfigError, naming the file."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca {self.ca}: {_words(error, 'certificates')}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.cert_key, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                what = _words(error, "a certificate and its unencrypted private key")
                raise ConfigError(f"--cert {self.cert}: {what}") from error
        elif self.cert_key is not None:
            raise ConfigError("--cert-key needs --cert, the certificate that it belongs to")
        return context

    def proxy(self) -> str | None:
        """The proxy named by the environment (HTTPS_PROXY, NO_PROXY), if any."""
        base = self.base
        if proxy_bypass(base.host or ""):
            return None
        return getproxies().get(base.scheme)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    return ""  # else OpenSSL asks for one at the terminal


def _words(error: OSError, expected: str) -> str:
    if isinstance(error, ssl.SSLError):
        return f"expected {expected} in PEM"
    return f"cannot be read: {error.strerror}"
