"""`fedstream acl`: the ACL file with the users that fedstream's Redis needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedstream.broker.keys import GATEWAY, check_name
from fedstream.broker.rights import OPTIONAL, PARTS, ROLES, acl, user_of
from fedstream.broker.settings import in_lines
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL

_PREFIX = "FEDSTREAM_PASSWORD_"


def file_of(
    run: str,
    environ: Mapping[str, str],
    sites: Sequence[str] = (),
    gateways: Sequence[str] = (),
    *,
    folder: Path | None = None,
    reload: str | None = None,
) -> str:
    """Text of the ACL file, with passwords from the environment. Raises ConfigError.

    ``sites``: the sites whose trainers get a user of their own; the pool's trainers use the role's
    user. ``gateways``: the sites whose gateway gets a user of its own; the gateway of the site
    'gateway' uses the role's user. ``folder``: a folder with the passwords, in files named after
    the users; None: they are in the environment. ``reload``: password of the user ``reload``.
    """
    missing: list[str] = []

    def password(user: str, name: str, *, needed: bool = True) -> str:
        found = environ.get(name, "") if folder is None else _content(folder, user)
        if needed and not in_lines(found):
            missing.append(name if folder is None else str(folder / user))
        return found

    own = [site for site in gateways if site != GATEWAY]
    _check([*sites, *own])
    optional = {*PARTS, *OPTIONAL} - ({"gateway"} if GATEWAY in gateways else set())
    given = {
        role: password(role, _PREFIX + role.upper(), needed=role not in optional)
        for role in (*ROLES, *PARTS)
    } | ({} if reload is None else {"reload": reload})
    of_sites = {site: password(user_of(site), variable(site)) for site in sites}
    of_gateways = {site: password(user_of(site, "gateway"), variable(site)) for site in own}
    if missing:
        where = "set in the environment" if folder is None else "there, or empty"
        raise ConfigError(
            f"{', '.join(missing)}: not {where}; every role and every site needs a password"
        )
    known = {role: text for role, text in given.items() if in_lines(text)}
    return acl(run, known, of_sites, of_gateways)


def _check(sites: Sequence[str]) -> None:
    """Raise ConfigError for an invalid name, or two names with the same variable."""
    for number, site in enumerate(sites):
        check_name("--site", site)
        if site == POOL:
            raise ConfigError(
                f"--site {POOL}: not needed, since the pool's trainers are the user trainer"
            )
        place = variable(site)
        if twin := next((one for one in sites[:number] if variable(one) == place), None):
            raise ConfigError(
                f"--site {site}: its password would be read from {place}, which is {twin}'s"
            )


def _content(folder: Path, user: str) -> str:
    """The text of a user's file in a folder or its subfolders; '' if there is none.

    Raises ConfigError.
    """
    for file in (folder / user, *folder.glob(f"*/{user}")):
        try:
            return file.read_text(errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"--passwords: {file}: cannot be read: {error.strerror}") from error
    return ""


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
            os.fchmod(file.fileno(), 0o640)  # regardless of the umask
            file.write(text)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ConfigError(
            f"{path}: {error.strerror}: choose a file in a writable folder"
        ) from error
