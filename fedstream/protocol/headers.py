"""Headers with a syntax of their own: structured fields (RFC 9651), retries and tokens.

Uploads follow draft-ietf-httpbis-resumable-upload: Upload-Length, Upload-Offset and Upload-Limit
are integers, Upload-Complete a boolean. Until the draft becomes an RFC, a client that wants its
interim responses states the draft's version (Upload-Draft-Interop-Version).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from fedstream.core.errors import FedstreamError

CONTENT_TYPE: Final = "application/json"
PARTIAL: Final = "application/partial-upload"  # a part of an upload
PROBLEM: Final = "application/problem+json"  # a wrong offset (RFC 9457)

LENGTH: Final = "Upload-Length"
OFFSET: Final = "Upload-Offset"
COMPLETE: Final = "Upload-Complete"
LIMIT: Final = "Upload-Limit"
INTEROP: Final = "Upload-Draft-Interop-Version"
REPORT: Final = "Update-Report"
FORMAT: Final = "Fedstream-Format"

MOST: Final = "max-size"  # of Upload-Limit: bytes of an upload
LEAST_PART: Final = "min-append-size"  # bytes in a request that does not complete the upload
AGE: Final = "max-age"  # seconds for which an upload is kept

INTEROP_VERSION: Final = "8"  # of the draft from -09 on

REPORT_CHARS: Final = 6000  # of the header Update-Report

_INTEGER = re.compile(r"0|[1-9][0-9]{0,14}")  # a structured integer has at most 15 digits
_LIMIT = re.compile(r"([a-z*][a-z0-9_.*-]*)=(0|[1-9][0-9]{0,14})")
_BEARER = re.compile(r"Bearer ([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)")
_TOKEN_CHARS = 1000


class BadHeader(FedstreamError):
    """A header's value with invalid syntax."""


def integer(name: str, value: str) -> int:
    """Parse a number of bytes, at least 0. Raises BadHeader."""
    if not _INTEGER.fullmatch(value):
        raise BadHeader(f"{name}: {value[:40]!r} is not a number of bytes")
    return int(value)


def boolean(name: str, value: str) -> bool:
    """Parse ``?1`` or ``?0``. Raises BadHeader."""
    if value not in ("?0", "?1"):
        raise BadHeader(f"{name}: {value[:40]!r} is neither ?0 nor ?1")
    return value == "?1"


def as_boolean(value: bool) -> str:
    """The value of a header for a boolean."""
    return "?1" if value else "?0"


def limits(value: str) -> dict[str, int]:
    """Parse Upload-Limit; return its limits by name, unknown ones included.

    Raises BadHeader.
    """
    found = {}
    for part in value.split(","):
        one = _LIMIT.fullmatch(part.strip(" "))
        if one is None:
            raise BadHeader(f"{LIMIT}: {value[:80]!r} is not of the form {MOST}=BYTES, ...")
        found[one[1]] = int(one[2])
    return found


def as_limits(limits: Mapping[str, int]) -> str:
    """The value of Upload-Limit for these limits."""
    return ", ".join(f"{name}={value}" for name, value in limits.items())


def bearer(value: str) -> str:
    """Parse Authorization; return its token. Raises BadHeader."""
    found = _BEARER.fullmatch(value) if len(value) <= _TOKEN_CHARS else None
    if found is None:
        raise BadHeader("Authorization: expected Bearer and a token")
    return found[1]


def as_bearer(token: str) -> str:
    """The value of Authorization for a token."""
    return f"Bearer {token}"
