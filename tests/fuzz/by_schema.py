"""Requests drawn from the gateway's own OpenAPI document, by schemathesis: valid ones, and others.

``python -m tests.fuzz.by_schema`` sends 5,000 to a gateway that has a task for the device, and
exits with 1 if an answer is 500, not what the document says, or good for a request that it rules
out. Hypothesis shrinks what it finds; the output has it as a command for curl.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests
import schemathesis
import structlog
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup, ServerError
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway import openapi
from fedstream.protocol import headers
from fedstream.protocol.messages import EvaluationOffer, Offer, UpdateReport, offered
from tests.broker.servers import redis
from tests.coordinator.gateway.places import Place, coordinating, evaluates, owned_by, serving
from tests.fuzz.raw_requests import NAME, Devices
from tests.support import EveryRole, Hand, wait_until

schemathesis.serializer.alias("application/partial-upload", "application/octet-stream")
DEVICE = 3
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def no_fault(_context: object, response: Any, case: Any) -> None:
    """503 has a device try again; anything else from 500 on is a fault of ours."""
    if response.status_code >= 500 and response.status_code != 503:
        raise ServerError(operation=case.operation.label, status_code=response.status_code)


def refused(context: Any, response: Any, case: Any) -> bool | None:
    """What the document rules out is refused, also as too large before anybody reads it."""
    if response.status_code == 413:
        return None
    return negative_data_rejection(context, response, case)


CHECKS = (
    no_fault,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    missing_required_header,
    refused,
    ignored_auth,
)

Signed = Callable[[str, bytes, str], dict[str, str]]


class Signature(requests.auth.AuthBase):
    """Signs what is sent, as a device does; else nothing but 401 would ever be seen."""

    def __init__(self, signed: Signed, keyid: str) -> None:
        self._signed = signed
        self._keyid = keyid

    def __call__(self, sent: requests.PreparedRequest) -> requests.PreparedRequest:
        body = sent.body.encode() if isinstance(sent.body, str) else sent.body or b""
        assert isinstance(body, bytes)
        sent.headers.update(self._signed(sent.path_url, body, self._keyid))
        return sent


def explore(
    operation: Any,
    url: str,
    *,
    n: int,
    token: Mapping[str, str],
    auth: Signature | None,
    known: Mapping[str, str],
    begin: int,
) -> Counter[int]:
    """Send about ``n`` requests of one operation; the answers' statuses. Raises FailureGroup.

    ``known``: parameters of a path that half of the valid requests have.
    """
    statuses: Counter[int] = Counter()

    def answers(case: Any) -> None:
        if case.meta.generation.mode is GenerationMode.POSITIVE and statuses.total() % 2:
            case.path_parameters.update(known)
        signature = auth if _mode(case, ParameterLocation.HEADER) is MODES[0] else None
        answer = case.call(base_url=url, headers=dict(token), auth=signature, timeout=30)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=list(CHECKS), headers=dict(token))

    limits = settings(
        max_examples=n // len(MODES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    has_parts = any(operation.iter_parameters()) or operation.body
    for mode in MODES if has_parts else MODES[:1]:
        drawn = operation.as_strategy(generation_mode=mode)
        wrap: Any = given(drawn)
        limits(seed(begin)(wrap(answers)))()
    return statuses


def _mode(case: Any, where: ParameterLocation) -> GenerationMode:
    """Whether this part of a request is as the document says."""
    part = case.meta.components.get(where)
    return part.mode if part else GenerationMode.POSITIVE


async def attack(
    hand: Hand, at: RedisSettings, *, n: int, begin: int = 1, only: str = ""
) -> dict[str, Counter[int]]:
    """Send about ``n`` requests, alike for all operations; statuses by operation.

    ``only``: what stands in the paths of those that are tried.
    """
    version = await hand.create()
    told: dict[str, Counter[int]] = {}
    document: Any = schemathesis.openapi.from_dict(openapi.document())
    every = [found.ok() for found in document.get_all_operations()]
    operations = [one for one in every if only in one.path]
    limits: dict[str, Any] = {"device_rate": 1e6, "address_rate": 1e6, "poll_s": 0.0}
    async with (
        coordinating(hand, at),
        serving(hand, at, identity=None, names=(NAME,), **limits) as place,
    ):
        devices = Devices(place)
        await devices.enrol(hand, DEVICE)
        token = await devices.token(DEVICE)
        for operation in operations:
            keyid = {"/v1/devices": "new", "/v1/token": str(DEVICE)}.get(operation.path)
            known = {"digest": version.digest}
            if "measurements" in operation.path:
                known = await _evaluation(hand, place, token)
            elif "{task}" in operation.path:
                known = await _task(hand, place, token)
            if operation.label.startswith(("HEAD /v1/tasks", "PATCH", "DELETE")):
                await _begin(hand, place, operation.path.format(**known), token, version.digest)
            known = {key: known[key] for key in known if f"{{{key}}}" in operation.path}
            told[operation.label] = await asyncio.to_thread(
                explore,
                operation,
                place.url,
                n=n // len(operations),
                token=token,
                auth=Signature(devices.signed, keyid) if keyid else None,
                known=known,
                begin=begin,
            )
    return told


async def _task(hand: Hand, place: Place, token: Mapping[str, str]) -> dict[str, str]:
    """What the path of a task in hand has; a new one if there is none."""

    async def training() -> Offer | None:
        said = {"nonce": secrets.token_urlsafe(16), "wait_s": 0}
        answer = await place.ask("POST", "/v1/check-in", json=said, headers=token)
        return answer.offer if answer.status == 200 else None

    if (offer := await training()) is None:
        await owned_by(hand, DEVICE, "gw-0")
        await hand.open(device=DEVICE)
        offer = await wait_until(training)
    return {"task": offer.task.id, "attempt": offer.attempt}


async def _evaluation(hand: Hand, place: Place, token: Mapping[str, str]) -> dict[str, str]:
    """What the path of an evaluation in hand has."""
    await owned_by(hand, DEVICE, "gw-0")
    await evaluates(hand, DEVICE)
    while True:
        said = {"nonce": secrets.token_urlsafe(16), "wait_s": 50, "evaluates": True}
        answer = await place.ask("POST", "/v1/check-in", json=said, headers=token)
        offer = offered(answer.body)
        if isinstance(offer, EvaluationOffer):
            return {"task": offer.task.id, "attempt": offer.attempt}
        leaves = {"attempt": offer.attempt, "reason": "dropped out"}
        path = f"/v1/tasks/{offer.task.id}/give-up"
        await place.ask("POST", path, json=leaves, headers=token)


async def _begin(hand: Hand, place: Place, path: str, token: Mapping[str, str], base: str) -> None:
    """Begin the upload of an update, with nothing of it."""
    report = UpdateReport(
        digest=base, samples=5, steps=10, lr=0.1, tau=0, base=base, layout=hand.layout.signature
    )
    about = {
        headers.LENGTH: str(hand.layout.nbytes),
        headers.COMPLETE: headers.as_boolean(False),
        headers.REPORT: report.encode().decode(),
    }
    answer = await place.ask("POST", path, headers={**token, **about})
    assert answer.status == 201, answer


async def _main(options: argparse.Namespace) -> dict[str, Counter[int]]:
    with tempfile.TemporaryDirectory() as folder, redis(Path(folder)) as server:
        at = RedisSettings(url=f"redis://127.0.0.1:{server.port}/0")
        client, keys = Client(at, "fuzz"), Keys("fuzz")
        try:
            hand = Hand(client, keys, EveryRole(client, keys, "fuzz"))
            return await attack(hand, at, n=options.inputs, begin=options.seed)
        finally:
            await client.close()


def told(found: Mapping[str, Counter[int]]) -> str:
    """A line for each operation."""
    lines = [
        f"{label:<42}{sum(statuses.values()):>7,}  "
        + ", ".join(f"{status}: {n:,}" for status, n in sorted(statuses.items()))
        for label, statuses in found.items()
    ]
    every = sum(sum(statuses.values()) for statuses in found.values())
    return "\n".join([*lines, f"{every:,} requests, all answered as the document says", ""])


def main() -> int:
    """Send them, and print what was answered."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.by_schema", description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        found = asyncio.run(_main(options))
    except FailureGroup as failures:
        sys.stdout.write(f"{failures}\n")
        return 1
    sys.stdout.write(told(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
