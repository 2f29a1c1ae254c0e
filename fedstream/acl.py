"""`fedstream acl`: the users that a Redis of our own needs, as the file that it reads them from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from broker.errors import ConfigError
from broker.rights import PARTS, ROLES, acl

_PREFIX = "FEDSTREAM_PASSWORD_"


def file_of(run: str, environ: Mapping[str, str]) -> str:
    """The file's text, with passwords from the environment. Raises ConfigError."""
    given = {role: environ.get(_PREFIX + role.upper(), "") for role in (*ROLES, *PARTS)}
    if missing := [_PREFIX + role.upper() for role in ROLES if not given[role]]:
        raise ConfigError(
            f"{', '.join(missing)}: not set in the environment: every role needs a password"
        )
    return acl(run, {role: password for role, password in given.items() if password})


def write(path: Path, text: str) -> None:
    """Writes it whole or not at all, for owner and group: Redis may run as another user.

    Raises ConfigError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "w") as file:  # noqa: PTH123  (with a mode)
            os.fchmod(file.fileno(), 0o640)  # whatever the umask
            file.write(text)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ConfigError(
            f"--out {path}: {error.strerror}: name a file in a folder that can be written"
        ) from error
