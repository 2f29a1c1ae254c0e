"""`fedstream doctor`'s check of the certificates of Redis and its Sentinels."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedstream.broker.client import Client, RedisSettings, shown_certificate
from fedstream.core.errors import BrokerError, distrust
from fedstream.doctor.findings import Finding, not_checked, ok, problem, warning
from fedstream.runtime.tls import Certificate

if TYPE_CHECKING:
    from fedstream.broker.discovery import Address

_ABOUT = "redis certificate"
DAY = 86_400.0
ENDS_S = 14 * DAY  # warn if a certificate ends sooner
_ANOTHERS = (62, 64)  # OpenSSL's errors for a certificate of other hosts, or of other addresses
_ANY_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, to read expired certificates too
_REPLACE = (
    "issue it again, and replace it where Redis and the Sentinels read it (on Kubernetes the "
    "Secret fedstream-redis-tls)"
)


def is_idle_star(name: str) -> bool:
    """Whether a certificate's name has a wildcard that OpenSSL ignores.

    OpenSSL accepts a wildcard only as the whole first label, before at least two more labels.
    """
    first, _, rest = name.partition(".")
    return "*" in name and (first != "*" or "*" in rest or "." not in rest)


def in_words(names: Sequence[str]) -> str:
    """A certificate's names, for people, marking names that match nothing."""
    idle = [name for name in names if is_idle_star(name)]
    text = f"names {', '.join(names) or 'nothing'}"
    if not idle:
        return text
    return f"{text}; {', '.join(idle)} matches no name: a star needs two labels behind it"


def lifetime(
    about: str, text: str, *, begins: float, ends: float, now: float, renew: str
) -> Finding:
    """Check whether and how long a certificate is valid. ``text``: further facts about it."""
    days = (ends - now) / DAY
    if now < begins:
        return problem(about, f"{text}: is not valid yet", "correct this machine's clock, or wait")
    if days < 0:
        return problem(about, f"{text}: ended {-days:.0f} days ago", renew)
    if days * DAY < ENDS_S:
        return warning(about, f"{text}: ends in {days:.0f} days", renew)
    return ok(about, f"{text}; ends in {days:.0f} days")


async def examine(settings: RedisSettings, *, now: float) -> list[Finding]:
    """Check the certificate of every server that services may connect to.

    These are the host in redis.url, or each Sentinel with its known master and replicas, or each
    node of a cluster. Without TLS there are no findings.
    """
    if urlsplit(settings.url).scheme != "rediss":
        return []
    first = Client(settings, "doctor").places
    looks = await _looked(settings, first)
    findings: list[Finding] = []
    if settings.sentinel is not None or settings.cluster:
        try:
            asked = [one for one in first if not looks[one].wrong and not looks[one].away]
            named = await _named(settings, asked)
        except BrokerError as error:
            findings.append(not_checked(f"{_ABOUT} of others", str(error)))
        else:
            others = [one for one in dict.fromkeys(named) if one not in looks]
            looks |= await _looked(settings, others)
    return [*_judged(looks, now), *findings]


@dataclass(frozen=True)
class _Look:
    """The result of a connection to one server."""

    shown: Certificate | None = None
    wrong: str = ""  # why services would not trust it, by OpenSSL
    is_anothers: bool = False  # whether that is because of its names
    away: str = ""  # why there was no connection


async def _looked(settings: RedisSettings, places: Sequence[Address]) -> dict[Address, _Look]:
    client = Client(settings, "doctor")
    looks = await asyncio.gather(*(_look(client, one, settings.timeout_s) for one in places))
    return dict(zip(places, looks, strict=True))


async def _look(client: Client, place: Address, within_s: float) -> _Look:
    """Connect as services do; if the certificate is refused, connect again to read it.

    Sends no command.
    """
    strict, open_minded = client.tls_context(), client.tls_context()
    assert strict is not None and open_minded is not None  # noqa: S101, PT018  (the URL is rediss)
    open_minded.check_hostname = False
    open_minded.verify_flags |= _ANY_TIME
    try:
        async with asyncio.timeout(within_s):
            try:
                return _Look(await _greeted(place, strict))
            except ssl.SSLCertVerificationError as error:
                refused = error
            wrong, is_anothers = refused.verify_message, refused.verify_code in _ANOTHERS
            try:
                return _Look(await _greeted(place, open_minded), wrong, is_anothers)
            except ssl.SSLCertVerificationError:  # an unknown authority signed it
                return _Look(None, wrong)
    except TimeoutError:
        return _Look(away=f"no answer within {within_s:g} s")
    except ConnectionRefusedError:  # its text repeats the address
        return _Look(away="connection refused")
    except OSError as error:
        return _Look(away=str(error.strerror or error))


async def _greeted(place: Address, context: ssl.SSLContext) -> Certificate | None:
    """Read a server's certificate; None if the context verifies none. Raises OSError."""
    found = await shown_certificate(place, context)
    if not found:
        return None
    return Certificate(
        tuple(name for _, name in found.get("subjectAltName", ())),
        ssl.cert_time_to_seconds(found["notBefore"]),
        ssl.cert_time_to_seconds(found["notAfter"]),
    )


async def _named(settings: RedisSettings, trusted: Sequence[Address]) -> list[Address]:
    """The master and replicas known to a Sentinel, or a cluster's nodes.

    Asks only ``trusted`` servers, as asking sends a password. Raises BrokerError.
    """
    error = BrokerError("no server with a trusted certificate could be asked for their addresses")
    sentinel = settings.sentinel
    url = urlsplit(settings.url)
    login, at, _ = url.netloc.rpartition("@") if sentinel is None else ("", "", "")
    for host, port in trusted:
        node = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        address = url._replace(netloc=f"{login}{at}{node}", path="").geturl()
        plain: dict[str, object] = {"url": address, "sentinel": None, "cluster": False}
        if sentinel is not None:
            keys = ("username", "password", "password_file")
            plain |= {key: getattr(sentinel, key) for key in keys}
        alone = settings.model_copy(update=plain)
        client = Client(alone, "doctor")
        try:
            if sentinel is None:
                slots = await client.call("CLUSTER", "SLOTS")
                nodes = [node for _, _, *nodes in slots for node in nodes]
                return [(n[0].decode() if n[0] else host, int(n[1])) for n in nodes]
            asked = ("GET-MASTER-ADDR-BY-NAME", "REPLICAS")
            master, replicas = [
                await client.call("SENTINEL", one, sentinel.master) for one in asked
            ]
            rows = [dict(zip(row[::2], row[1::2], strict=True)) for row in replicas]
            places = [*([master] if master else ()), *((row[b"ip"], row[b"port"]) for row in rows)]
            return [(place[0].decode(), int(place[1])) for place in places]
        except BrokerError as one:
            error = one
        finally:
            await client.close()
    raise error


def _judged(looks: dict[Address, _Look], now: float) -> Iterator[Finding]:
    """One finding for all servers with the same result."""
    alike: dict[_Look, list[Address]] = {}
    for place, look in looks.items():
        alike.setdefault(look, []).append(place)
    for look, places in alike.items():
        at = ", ".join(f"{host}:{port}" for host, port in places)
        hosts = ", ".join(dict.fromkeys(host for host, _ in places))
        shown = look.shown
        if look.away:
            yield not_checked(_ABOUT, f"{at}: {look.away}")
        elif shown is None and look.wrong:
            unsigned = "redis.tls.ca must name the authority that signed it"
            yield problem(_ABOUT, f"of {at}: {distrust(look.wrong, unsigned)}", _REPLACE)
        elif shown is None:
            yield not_checked(_ABOUT, f"{at}: redis.url disables the check of certificates")
        else:
            if look.is_anothers:
                named = f"is not for {hosts}: it {in_words(shown.names)}"
                yield problem(_ABOUT, named, f"{_REPLACE}, with the names {hosts}")
            elif any(map(is_idle_star, shown.names)):
                yield warning(_ABOUT, f"of {hosts}: it {in_words(shown.names)}", "name each host")
            life = lifetime(
                _ABOUT, f"of {hosts}", begins=shown.begins, ends=shown.ends, now=now, renew=_REPLACE
            )
            if look.wrong and not look.is_anothers and life.level == "ok":  # the authority's end
                yield problem(_ABOUT, f"of {at}: {distrust(look.wrong, '')}", _REPLACE)
            elif life.level != "ok" or not look.is_anothers:
                yield life
