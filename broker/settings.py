"""The table ``[redis]``: Redis's address, login and TLS."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from fedstream.core.errors import ConfigError

_NODE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::(\d{1,5}))?")

# Secrets are never dumped; other processes get them in the environment.
Secret = Annotated[SecretStr | None, Field(exclude=True)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TlsSettings(_Table):
    """PEM files for ``rediss://``, read anew for every connection."""

    ca: str | None = None  # authorities that may sign Redis's certificate, besides the system's
    cert: str | None = None  # client certificate, if Redis requires one
    key: str | None = None


class SentinelSettings(_Table):
    """The sentinels, which name the master."""

    nodes: tuple[str, ...] = ()  # "host:port", or "host": port 26379
    master: str = "fedstream"
    username: str | None = None  # of the sentinels themselves
    password: Secret = None
    password_file: str | None = None  # read anew for every connection; ``password`` goes before it


class RedisSettings(_Table):
    """Redis's address, our login, and time-outs."""

    # With sentinels, only the scheme and database are used; with a cluster, any node will do.
    url: str = "redis://127.0.0.1:6379/0"
    username: str | None = None  # instead of the URL's
    password: Secret = None  # instead of the URL's
    password_file: str | None = None  # read anew for every connection; ``password`` goes before it
    tls: TlsSettings | None = None
    sentinel: SentinelSettings | None = None
    cluster: bool = False
    # For one round trip or one window of chunks. Liveness expects a heartbeat within 30 s.
    timeout_s: float = Field(default=10.0, gt=0, le=20)

    @field_validator("sentinel")
    @classmethod
    def _sentinel_has_nodes(cls, sentinel: SentinelSettings | None) -> SentinelSettings | None:
        """Drop a table with only a password, which a deployment may set without sentinels."""
        if sentinel is None or sentinel.nodes:
            return sentinel
        if sentinel.model_fields_set - {"password", "password_file"}:
            raise ValueError('redis.sentinel.nodes: name at least one, as in ["host:26379"]')
        return None

    @model_validator(mode="after")
    def _agree(self) -> RedisSettings:
        """Check that keys don't contradict each other; the error names both."""
        scheme = self.url.partition("://")[0]
        if self.sentinel is not None and self.cluster:
            raise ValueError(
                "redis.sentinel and redis.cluster = true: set only one, because a cluster has no "
                "sentinels"
            )
        if scheme == "unix" and (self.sentinel is not None or self.cluster):
            other = "redis.cluster = true" if self.cluster else "redis.sentinel"
            raise ValueError(
                f"redis.url = unix://... does not work with {other}, whose nodes have addresses"
            )
        if self.tls is not None:
            if scheme != "rediss":
                raise ValueError("redis.tls needs a redis.url that starts with rediss://")
            if (self.tls.cert is None) != (self.tls.key is None):
                raise ValueError("redis.tls.cert and redis.tls.key: set both or neither")
        for node in self.sentinel.nodes if self.sentinel else ():
            address(node)
        return self

    @property
    def is_named(self) -> bool:
        """Whether any address or login is set; False if all are defaults."""
        login = (self.username, self.password, self.password_file)
        others = (*login, self.tls, self.sentinel)
        return (
            "url" in self.model_fields_set or self.cluster or any(one is not None for one in others)
        )


def address(node: str) -> tuple[str, int]:
    """Parse a sentinel's host and port. Raises ValueError."""
    found = _NODE.fullmatch(node)
    port = int(found[2] or 26379) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise ValueError(f"redis.sentinel.nodes: {node!r} is not an address; expected host:port")
    return found[1].strip("[]"), port


def passwords(login: RedisSettings | SentinelSettings) -> list[str]:
    """The passwords to try, in order; empty: use the URL's password, if any.

    There are several while a password is being replaced. Raises OSError if the file is unreadable.
    """
    if login.password is not None:
        return in_lines(login.password.get_secret_value())
    if login.password_file is not None:
        return in_lines(Path(login.password_file).read_text(errors="replace"))
    return []


def in_lines(secret: str) -> list[str]:
    """The passwords in a secret: one a line, newest first."""
    return [line for line in secret.replace("\r", "").split("\n") if line]


def check_password_file(key: str, login: RedisSettings | SentinelSettings) -> None:
    """Check that a configured password file has a password. Raises ConfigError."""
    if login.password_file is not None and login.password is None:
        _tried(key, login.password_file)
        if not passwords(login):
            raise ConfigError(f"{key}: {login.password_file}: contains no password")


def check_files(tls: TlsSettings) -> None:
    """Check that the TLS files are readable and valid. Raises ConfigError."""
    context = ssl.create_default_context()
    if tls.ca is not None:
        _tried("redis.tls.ca", tls.ca)
        try:
            context.load_verify_locations(tls.ca)
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(f"redis.tls.ca: {tls.ca}: contains no PEM certificate") from error
    if tls.cert is not None and tls.key is not None:
        _tried("redis.tls.cert", tls.cert)
        _tried("redis.tls.key", tls.key)
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")
        except OSError as error:
            raise ConfigError(
                f"redis.tls.cert, redis.tls.key: {tls.cert} and {tls.key} are not a PEM "
                "certificate and its unencrypted key"
            ) from error


def _tried(key: str, path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123  (the path as given, for the message)
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {path}: cannot be read: {reason}") from error
