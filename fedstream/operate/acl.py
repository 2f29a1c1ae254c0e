"""`fedstream acl`: the ACL file with the users that fedstream's Redis needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import GATEWAY, POOL, check_name
from fedstream.broker.rights import OPTIONAL, PARTS, ROLES, acl

_PREFIX = "FEDSTREAM_PASSWORD_"


def file_of(
    run: str,
    environ: Mapping[str, str],
    sites: Sequence[str] = (),
    gateways: Sequence[str] = (),
) -> str:
    """Text of the ACL file, with passwords from the environment. Raises ConfigError.

    ``sites`` get a user each, of the trainers there. The pool must not be among them: it uses the
    trainer role's user. ``gateways``: the sites of gateways, likewise; that of the site 'gateway'
    is the role's user.
    """
    given = {role: environ.get(_PREFIX + role.upper(), "") for role in (*ROLES, *PARTS)}
    named: dict[str, str] = {}
    own = [site for site in gateways if site != GATEWAY]
    for site in (*sites, *own):
        check_name("--site", site)
        if site == POOL:
            raise ConfigError(
                f"--site {POOL}: not needed, since the pool's trainers are the user trainer"
            )
        place = variable(site)
        if twin := next((one for one in named if variable(one) == place), None):
            raise ConfigError(
                f"--site {site}: its password would be read from {place}, which is {twin}'s"
            )
        named[site] = environ.get(place, "")
    needed = [role for role in ROLES if role not in OPTIONAL]
    needed += ["gateway"] if GATEWAY in gateways else []
    missing = [_PREFIX + role.upper() for role in needed if not given[role]]
    missing += [variable(site) for site, password in named.items() if not password]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not set in the environment; every role and every site needs a "
            "password"
        )
    return acl(
        run, {role: password for role, password in given.items() if password},
        {site: named[site] for site in sites}, {site: named[site] for site in own},
    )  # fmt: skip


def variable(site: str) -> str:
    """Variable with a site's password: FEDSTREAM_PASSWORD_SITE_HOSPITAL_A for hospital-a."""
    return f"{_PREFIX}SITE_{re.sub('[.-]', '_', site).upper()}"


def write(path: Path, text: str) -> None:
    """Write the file atomically, readable by its group: Redis may run as another user.

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
            f"--out {path}: {error.strerror}: choose a file in a writable folder"
        ) from error
