"""`fedstream doctor`'s checks of a gateway: certificate, open files, clock, site, restarts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.keys import GATEWAY
from fedstream.coordinator.gateway.settings import OTHER_FILES, GatewaySettings
from fedstream.coordinator.sites import served
from fedstream.core.errors import ConfigError
from fedstream.doctor.certificates import DAY, ENDS_S, in_words, is_idle_star, lifetime
from fedstream.doctor.findings import Finding, not_checked, ok, problem, warning

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

RESTART_S = 60.0  # time limit for a new process or pod to serve again


def is_gateways(user: str) -> bool:
    """Whether this Redis user is a gateway's."""
    return user == GATEWAY or user.startswith(f"{GATEWAY}-")


def is_meant(settings: Settings, user: str) -> bool:
    """Whether a gateway is expected: its site is served, it is configured, or this is its user."""
    coordinator = settings.coordinator
    return (
        is_gateways(user)
        or settings.gateway != GatewaySettings()
        or settings.gateway.site in served(coordinator.sites, coordinator.trusted_sites)
    )


def here(settings: GatewaySettings, *, now: float) -> Iterator[Finding]:
    """Checks on the gateway's machine. ``now``: seconds since 1970."""
    yield _certificate(settings, now)
    if settings.client_ca is not None:
        yield _authorities(settings.client_ca, now)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which a gateway raises its limit
    yield open_files(settings, None if most == resource.RLIM_INFINITY else most)


def _certificate(settings: GatewaySettings, now: float) -> Finding:
    about = "gateway certificate"
    if settings.tls_cert is None:
        proxy = "none: devices come over plain HTTP, through a proxy that ends TLS"
        if not settings.names:
            return warning(
                about,
                f"{proxy}; without gateway.names, signatures made for any host are accepted",
                "set gateway.names to the host in the devices' URL",
            )
        return ok(about, proxy)
    try:
        settings.tls()
    except ConfigError as error:
        return problem(about, str(error))
    try:
        from fedstream.coordinator.gateway.certificate import certificate_in
    except ModuleNotFoundError as error:
        return not_checked(about, f"needs {error.name}: pip install 'fedstream[gateway]'")
    found = certificate_in(Path(settings.tls_cert).read_bytes())
    if not found.names:
        return problem(
            about,
            "has no subjectAltName: devices would accept it for no host",
            "issue it for the hosts in the URL that devices use",
        )
    names = f"for {', '.join(found.names)}"
    renew = "renew it: gateways serve it within seconds"
    life = lifetime(about, names, begins=found.begins, ends=found.ends, now=now, renew=renew)
    if life.level == "ok" and any(map(is_idle_star, found.names)):
        return warning(about, in_words(found.names), "name each host")
    return life


def _authorities(file: str, now: float) -> Finding:
    about = "gateway client_ca"
    try:
        from fedstream.coordinator.gateway.certificate import authorities_in
    except ModuleNotFoundError as error:
        return not_checked(about, f"needs {error.name}: pip install 'fedstream[gateway]'")
    try:
        found = authorities_in(Path(file).read_bytes())
    except (OSError, ConfigError) as error:
        return problem(about, f"{file}: {error}")
    for one in found:
        if not one.may_sign:
            return problem(
                about,
                f"{one.subject}: may not sign certificates, so no device's is accepted by it",
                "name the authority that signs those of devices",
            )
        if one.ends - now < ENDS_S:
            days = (one.ends - now) / DAY
            when = f"ends in {days:.0f} days" if days > 0 else f"ended {-days:.0f} days ago"
            return (warning if days > 0 else problem)(
                about, f"{one.subject}: {when}", "add its successor to the file"
            )
    return ok(about, f"devices need a certificate of {', '.join(one.subject for one in found)}")


def open_files(settings: GatewaySettings, most: int | None) -> Finding:
    """Compare the limit of open files with the connections. ``most``: files; None: no limit."""
    about, wanted = "gateway open files", settings.connections + OTHER_FILES
    if most is not None and most < wanted:
        return warning(
            about,
            f"this process may open {most} files, and gateway.connections = "
            f"{settings.connections}: devices beyond that could not connect",
            f"raise the limit (ulimit -Hn) to {wanted}, or lower gateway.connections",
        )
    of = "as many files as it likes" if most is None else f"{most} files"
    return ok(about, f"this process may open {of}; gateway.connections = {settings.connections}")


def silence(settings: Settings, user: str) -> Finding:
    """Check that a gateway can restart before the coordinators end its tasks."""
    about, silence_s = "gateway restarts", settings.coordinator.trainer_silence_s
    if is_gateways(user):
        return not_checked(about, "look at trainer_silence_s where a coordinator runs")
    if silence_s < RESTART_S:
        return warning(
            about,
            f"coordinator.trainer_silence_s = {silence_s:g}: if a gateway takes longer to start "
            "again, the tasks of all its devices are given up",
            f"set coordinator.trainer_silence_s = {RESTART_S:g}",
        )
    return ok(about, f"may take coordinator.trainer_silence_s = {silence_s:g}")


def site(settings: Settings, user: str) -> Finding:
    """Check that the coordinators serve the gateway's site."""
    about, name, sites = "gateway site", settings.gateway.site, settings.coordinator.sites
    if name in served(sites, settings.coordinator.trusted_sites):
        return ok(about, f"{name!r}, which coordinator.sites names")
    if is_gateways(user):  # its own configuration need not have the coordinators' settings
        return not_checked(
            about, f"{name!r} is not in this coordinator.sites: look where a coordinator runs"
        )
    named = ", ".join(f'"{one}"' for one in (*sites, name))
    return problem(
        about,
        f"{name!r} is not in coordinator.sites: no coordinator reads its inbox",
        f"set coordinator.sites = [{named}]",
    )
