"""Invites: what an operator gives to the owner of a device, who may enrol with it once.

An invite begins with the device's number, followed by 192 random bits. Redis knows only its digest.
"""

from __future__ import annotations

import re
import secrets

_FORM = re.compile(r"(0|[1-9][0-9]{0,9})-[A-Za-z0-9_-]{22,53}")


def new_invite(device: int) -> str:
    """An invite that nobody else can guess."""
    return f"{device}-{secrets.token_urlsafe(24)}"


def device_in(invite: str) -> int | None:
    """The number of the device that an invite is for; None if it can't be one of ours."""
    found = _FORM.fullmatch(invite)
    return int(found[1]) if found else None
