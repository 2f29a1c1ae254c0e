"""Mutated requests, byte for byte on real connections, to a gateway that serves a device meanwhile.

``python -m tests.fuzz.raw_requests`` sends 100,000 of them beside a thousand slow connections, and
exits with 1 if one was answered 500 or not at all, if the gateway's memory grew, or if the honest
device was kept waiting. An input that went wrong is then in ``build/fuzz/raw_requests``.

Unlike the other targets this one needs a Redis, and time: what is cut off must be waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import hashlib
import json
import logging
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.digest import digest_of
from fedstream.protocol.messages import Access, Enrolment
from fedstream.protocol.signatures import pem_of, sign
from tests.broker.servers import redis
from tests.coordinator.gateway.attacks import SMUGGLED, TRICKS
from tests.coordinator.gateway.places import SITE, Place, serving
from tests.coordinator.gateway.raw import request, trickle
from tests.fuzz.mutation import mutated_bytes
from tests.support import EveryRole, Hand

FINDS = Path("build/fuzz/raw_requests")
LIMIT_S = 30.0  # for an answer, or to be cut off
WAITS_S = 15.0  # that an honest check-in takes, of a gateway that shares its processor with us
GROWN = 16 << 20  # bytes of memory, of the gateway and this client together
_CUT_S, _IDLE_S = 0.5, 2.0  # after which the gateway cuts off who does not go on
NAME = "gateway"  # of the gateway, for which devices sign
_ANEW = {"Connection": "close"}  # so that no connection is used while it is closed for idleness
_AT_ONCE = 128
_EACH = 1000  # inputs between two tokens, and two looks at the memory
_HONEST, _HOSTILE = 4, 3  # devices
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n")

_ATTACKED = (*SMUGGLED.values(), *(request("GET", target) for target in TRICKS))
_ATTACKS = 0.1  # of the inputs


@dataclass
class Tally:
    """What came of all inputs."""

    inputs: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    cut: int = 0  # connections that were closed without an answer
    wrong: dict[str, bytes] = field(default_factory=dict)  # what, with an input
    slowest_s: float = 0.0
    served: int = 0  # check-ins of the honest device
    waited_s: float = 0.0  # by it, at most
    slow: int = 0  # connections that sent a byte a second
    grown: int = 0  # bytes

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not self.wrong and self.grown < GROWN and self.waited_s < WAITS_S


@dataclass
class Devices:
    """The two that have enrolled."""

    place: Place
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def signed(self, path: str, body: bytes, keyid: str) -> dict[str, str]:
        created = int(time.time())
        return sign(
            self.key,
            method="POST",
            authority=NAME,
            path=path,
            body=body,
            keyid=keyid,
            created=created,
        )

    async def enrol(self, hand: Hand, device: int) -> None:
        invite = f"{device}-{'i' * 32}"
        given = {device: digest_of(invite.encode())}
        assert (await hand.ledger.invite(SITE, given, seconds=3600))[0] == "invited"
        asks = Enrolment(invite=invite, public_key=pem_of(self.key.public_key())).encode()
        headers = self.signed("/v1/devices", asks, "new")
        answer = await self.place.ask("POST", "/v1/devices", data=asks, headers=headers)
        assert answer.status == 201, answer

    async def token(self, device: int) -> dict[str, str]:
        headers = self.signed("/v1/token", b"{}", str(device)) | _ANEW
        answer = await self.place.ask("POST", "/v1/token", data=b"{}", headers=headers)
        return {"Authorization": f"Bearer {Access.decode(answer.body).token}"}

    def valid(self, digest: str, token: dict[str, str]) -> list[bytes]:
        """A request for each route, as a device would send it now."""
        path = f"/v1/tasks/{'0' * 32}/updates/{'a' * 12}"
        report = {
            "digest": digest,
            "samples": 5,
            "steps": 10,
            "lr": 0.1,
            "loss": 0.5,
            "seconds": 1.5,
            "tau": 0,
            "base": digest,
            "layout": digest[:16],
            "format": "f32",
        }
        enrolment = Enrolment(invite="3-" + "j" * 32, public_key=pem_of(self.key.public_key()))
        attempt = {"attempt": "a" * 12}

        def made(method: str, target: str, body: Any = None, **more: str) -> bytes:
            data = body if isinstance(body, bytes) else b"" if body is None else _json(body)
            about = {"Host": NAME, **token, **{n.replace("_", "-"): v for n, v in more.items()}}
            if body is not None:
                about["Content-Length"] = str(len(data))
            lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in about.items())]
            return "\r\n".join([*lines, "", ""]).encode() + data

        return [
            made(
                "POST",
                "/v1/devices",
                enrolment.encode(),
                **self.signed("/v1/devices", enrolment.encode(), "new"),
            ),
            made("POST", "/v1/token", b"{}", **self.signed("/v1/token", b"{}", str(_HOSTILE))),
            made("POST", "/v1/check-in", {"nonce": "n" * 22, "wait_s": 0.1, "formats": ["f32"]}),
            made("GET", f"/v1/models/{digest}", Range="bytes=3-9"),
            made("HEAD", f"/v1/models/{digest}"),
            made("POST", f"/v1/tasks/{'0' * 32}/heartbeat", attempt),
            made("POST", f"/v1/tasks/{'0' * 32}/give-up", attempt | {"reason": "dropped out"}),
            made(
                "POST",
                f"/v1/tasks/{'0' * 32}/measurements/{'0' * 12}",
                {"samples": 8, "sums": {"accuracy": [6.0, 8.0]}, "seconds": 0.5},
            ),
            made(
                "POST",
                path,
                b"\0" * 16,
                Upload_Length="16",
                Upload_Complete="?1",
                Update_Report=json.dumps(report),
            ),
            made(
                "PATCH",
                path,
                b"\0" * 8,
                Upload_Offset="8",
                Upload_Complete="?1",
                Content_Type="application/partial-upload",
            ),
            made("HEAD", path),
            made("DELETE", path),
            made("GET", "/v1/openapi.json"),
        ]


def _json(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode(errors="surrogatepass")


def inputs(n: int, valid: list[bytes], rng: Random) -> Iterator[bytes]:
    """``n`` of them: the valid ones, the known attacks, and either with changed bytes.

    Some valid ones have another one behind them.
    """
    yield from [*valid, *_ATTACKED][:n]
    for _ in range(n - len(valid) - len(_ATTACKED)):
        chosen = rng.choice(_ATTACKED if rng.random() < _ATTACKS else valid)
        behind = rng.choice(valid) if rng.random() < _ATTACKS else b""
        yield mutated_bytes(chosen, rng) + behind


# at the gateway


async def answered(port: int, data: bytes) -> bytes:
    """The first answer, as far as it says how long it is; b'': the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = bytearray()
    try:
        writer.write(data)
        while part := await reader.read(1 << 16):
            found += part
            head, between, body = found.partition(b"\r\n\r\n")
            length = _LENGTH.search(head + b"\r\n")
            is_bodiless = data.startswith(b"HEAD") or b" 204 " in head[:14] or b" 304 " in head[:14]
            if between and (is_bodiless or (length and len(body) >= int(length[1]))):
                break
    except ConnectionError:  # it closed the connection while we were still sending
        pass
    finally:
        writer.close()
    return bytes(found)


async def _try(port: int, data: bytes, tally: Tally) -> None:
    begun = time.monotonic()
    tally.inputs += 1
    try:
        async with asyncio.timeout(LIMIT_S):
            said = await answered(port, data)
    except TimeoutError:
        tally.wrong.setdefault("neither answered nor cut off", data)
        return
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - begun)
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", said)
    if found is None:
        tally.cut += 1
        return
    status = int(found[1])
    tally.statuses[status] += 1
    if status >= 500 and status not in (503, 505):
        tally.wrong.setdefault(f"answered {status}: {said[-200:]!r}", data)


async def _honest(place: Place, token: dict[str, str], tally: Tally) -> None:
    while True:
        begun = time.monotonic()
        said = {"nonce": f"{tally.served:022d}", "wait_s": 0}
        try:
            answer = await place.ask("POST", "/v1/check-in", json=said, headers=token | _ANEW)
        except aiohttp.ClientError as error:
            tally.wrong.setdefault(f"the honest device was cut off: {error}", b"")
            return
        tally.waited_s = max(tally.waited_s, time.monotonic() - begun)
        tally.served += answer.status == 204
        if answer.status != 204:
            tally.wrong.setdefault(f"the honest device got {answer.status}", answer.body)
        await asyncio.sleep(0.1)


async def _slow(port: int, number: int, tally: Tally) -> None:
    """Send a byte a second on one connection after the other."""
    beginnings = (b"", b"GET /v1/ope", b"POST /v1/token HTTP/1.1\r\nHost: x\r\nX: ")
    while True:
        tally.slow += 1
        await trickle(port, beginnings[number % 3], every_s=1.0)


def memory() -> int:
    """Bytes of this process that are in use.

    Without garbage that a gateway leaves alone for a while, and what glibc's malloc has free: that
    is a matter of how much was there at once, and may be more than all that a leak could add.
    """
    gc.unfreeze()
    gc.collect()
    if _TRIM is not None:
        _TRIM(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def attack(hand: Hand, settings: RedisSettings, *, n: int, slow: int, seed: int) -> Tally:
    """Send ``n`` inputs beside ``slow`` connections to a gateway with a new run."""
    version, tally, rng = await hand.create(), Tally(), Random(seed)
    limits: dict[str, Any] = {
        "device_rate": 1e6,
        "address_rate": 1e6,
        "poll_s": _CUT_S,
        "body_s": _CUT_S,
        "chunk_s": _CUT_S,
        "idle_s": _IDLE_S,
    }
    async with serving(hand, settings, identity=None, names=(NAME,), **limits) as place:
        port, devices = int(place.url.rpartition(":")[2]), Devices(place)
        for device in (_HONEST, _HOSTILE):
            await devices.enrol(hand, device)
        beside = [asyncio.create_task(_slow(port, number, tally)) for number in range(slow)]
        before = 0
        while tally.inputs < n:
            honest = asyncio.create_task(_honest(place, await devices.token(_HONEST), tally))
            valid = devices.valid(version.digest, await devices.token(_HOSTILE))
            waiting = inputs(min(_EACH, n - tally.inputs), valid, rng)

            async def some(waiting: Iterator[bytes] = waiting) -> None:
                for data in waiting:
                    await _try(port, data, tally)

            await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
            honest.cancel()
            await asyncio.wait({honest})
            if not honest.cancelled():
                honest.result()
            if tally.inputs >= n / 5:  # it has seen all kinds by then
                before = before or memory()
                tally.grown = memory() - before
        for one in beside:
            one.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    await hand.balanced()
    return tally


def told(tally: Tally) -> str:
    """The result in lines."""
    statuses = ", ".join(f"{status}: {times:,}" for status, times in sorted(tally.statuses.items()))
    return "\n".join(
        [
            f"{tally.inputs:,} requests: {statuses}; cut off: {tally.cut:,}",
            f"slowest {tally.slowest_s:.1f} s; memory grew by {tally.grown / 2**20:.1f} MiB",
            f"{tally.slow:,} slow connections",
            f"{tally.served:,} check-ins of an honest device, the longest {tally.waited_s:.2f} s",
            *(f"WRONG: {what}" for what in tally.wrong),
            "",
        ]
    )


async def _main(options: argparse.Namespace) -> Tally:
    with tempfile.TemporaryDirectory() as folder, redis(Path(folder)) as server:
        settings = RedisSettings(url=f"redis://127.0.0.1:{server.port}/0")
        client, keys = Client(settings, "fuzz"), Keys("fuzz")
        try:
            hand = Hand(client, keys, EveryRole(client, keys, "fuzz"))
            return await attack(
                hand, settings, n=options.inputs, slow=options.slow, seed=options.seed
            )
        finally:
            await client.close()


def main() -> int:
    """Send them, and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.raw_requests", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--slow", type=int, default=1000, help="connections beside them")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with suppress(ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (8192, most))
    tally = asyncio.run(_main(options))
    sys.stdout.write(told(tally))
    for data in tally.wrong.values():
        FINDS.mkdir(parents=True, exist_ok=True)
        path = FINDS / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
        path.write_bytes(data)
        sys.stdout.write(f"{path}\n")
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
