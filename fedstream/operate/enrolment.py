"""`fedstream devices invite`, `enrolled`, `revoke` and `admit`: access to a gateway.

An invite is shown once, to the operator; Redis has only its digest. The gateway reads revocations
about every two seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.gateway import Registration
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.coordinator.gateway.auth import new_invite
from fedstream.core.digest import digest_of
from fedstream.core.errors import ConfigError, FedstreamError, NoRun
from fedstream.terminal import clock, console, line

_AT = "%Y-%m-%d %H:%M:%S"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 365 * 86_400
_SHOWN = 16  # hexadecimal digits of a key's digest

EntrantState = Literal["enrolled", "invited", "invite expired", "revoked"]


@dataclass(frozen=True)
class Invitation:
    """Invites for devices, and their expiry in seconds since 1970."""

    invites: dict[int, str]
    till: float


@dataclass(frozen=True)
class Entrant:
    """A device in a gateway's registers. Times are in seconds since 1970."""

    device: int
    state: EntrantState
    enrolled: float | None
    key: str | None  # the beginning of its public key's SHA-256
    invited_until: float | None
    revoked: float | None


def seconds_of(text: str) -> float:
    """A duration such as 90s, 30m, 12h or 7d. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            f"--expires {text}: expected a number and s, m, h or d, such as 12h; at most 365d"
        )
    return seconds


async def invite(
    client: Client, keys: Keys, site: str, devices: Sequence[int], *, seconds: float
) -> Invitation:
    """Invite devices to enrol at a site's gateway. Raises NoRun, FedstreamError."""
    ledger = OperatorLedger(client, keys, "devices")
    made = {device: new_invite(device) for device in sorted({*devices})}
    digests = {device: digest_of(text.encode()) for device, text in made.items()}
    verdict, detail = await ledger.invite(site, digests, seconds=seconds)
    match verdict:
        case "invited":
            return Invitation(made, int(detail) / 1000)
        case "revoked":
            raise FedstreamError(
                f"device {detail} is revoked; first: fedstream devices admit {detail}"
            )
        case "finished":
            raise FedstreamError("the run is finished, so no device can take part")
        case _:
            raise _unknown(verdict, detail, client, keys)


async def set_access(
    client: Client, keys: Keys, site: str, devices: Sequence[int], *, admit: bool
) -> list[int]:
    """Revoke devices, or admit them again; return the changed ones.

    Raises NoRun, FedstreamError.
    """
    ledger = OperatorLedger(client, keys, "devices")
    verdict, found = await ledger.set_access(site, sorted({*devices}), admit=admit)
    if verdict != "set":
        raise _unknown(verdict, "".join(map(str, found)), client, keys)
    return found


def _unknown(verdict: str, detail: str, client: Client, keys: Keys) -> FedstreamError:
    if verdict == "none":
        return NoRun(
            f"there is no run {keys.name!r} in Redis at {client.address}: its updater creates it"
        )
    return FedstreamError(f"device {detail} is not in this run")


async def read(client: Client, keys: Keys, site: str) -> list[Entrant]:
    """Read all devices in the registers of a site's gateway, by number. Raises NoRun."""
    ledger = OperatorLedger(client, keys, "devices")
    await ledger.run()
    enrolled, invites, revoked = await ledger.access(site)
    now = await client.time()
    return [
        _entrant(device, enrolled.get(device), invites.get(device), revoked.get(device), now)
        for device in sorted({*enrolled, *invites, *revoked})
    ]


def _entrant(
    device: int, known: Registration | None, till: float | None, revoked: float | None, now: float
) -> Entrant:
    state: EntrantState = "invite expired"
    if revoked is not None:
        state = "revoked"
    elif known is not None:
        state = "enrolled"
    elif till is not None and till > now:
        state = "invited"
    if known is None:
        return Entrant(device, state, None, None, till, revoked)
    key = digest_of(known.key.encode())[:_SHOWN]
    return Entrant(device, state, known.at / 1000, key, till, revoked)


def tell_invites(made: Invitation) -> None:
    """Print each device's invite."""
    for device, text in made.invites.items():
        line(f"device {device}: {text}")
    line(
        f"each enrols its device once, until {clock(made.till, _AT)}, and is not shown again",
        err=True,
    )


def tell_access(devices: Sequence[int], changed: Sequence[int], *, admit: bool) -> None:
    """Print the changed and the unchanged devices."""
    before = sorted({*devices} - {*changed})
    if changed:
        line(f"{'admitted' if admit else 'revoked'}: {_named(changed)}")
    if before:
        line(f"{'not revoked' if admit else 'already revoked'}: {_named(before)}")


def _named(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, sorted(devices)))}"


def plain(found: Sequence[Entrant]) -> dict[str, Any]:
    """The devices as plain values, for JSON."""
    return {"devices": [dict(one.__dict__) for one in found]}


def show(found: Sequence[Entrant]) -> None:
    """Print the devices as a table."""
    if not found:
        line("no device has enrolled, and none is invited")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("device", justify="right")
    for name in ("state", "enrolled", "key", "invited until", "revoked since"):
        table.add_column(name)
    for one in found:
        enrolled, till, revoked = (
            "" if time is None else clock(time, _AT)
            for time in (one.enrolled, one.invited_until, one.revoked)
        )
        table.add_row(str(one.device), one.state, enrolled, one.key or "", till, revoked)
    console().print(table)
