"""`fedstream status`: the current state of a run, as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.coordinator.app import status
from fedstream.core.errors import ConfigError, FedstreamError, Unavailable
from fedstream.core.messages import first_wrong
from fedstream.core.records import StepSize
from fedstream.history.display import failing_rows, outcomes, privacy_rows, quarantined
from fedstream.terminal import cell, clock, console, measure, number, spaced, two_columns

_ANSWER_S = 15.0  # more than the 10 s that a coordinator waits for Redis
_PASSING = (502, 503, 504)
_DEVICES_SHOWN = 20
_MOST_BYTES = 64 << 20  # limit for an answer


class _Tasks(BaseModel):
    issued: int


class _Failing(BaseModel):
    tasks: int
    reason: str


class _Encoded(BaseModel):
    updates: int
    bytes: int
    smaller_by: float | None


class _Best(BaseModel):
    metric: str
    value: float
    version: int
    kept: bool


class _Privacy(BaseModel):
    epsilon: float | None
    delta: float
    sums_opened: int
    sums_dropped: int
    devices_spent: int


class _Step(BaseModel):
    key: str
    rate: float
    scale: float


class _Answer(BaseModel):
    """Fields used of a coordinator's answer, validated because another server may be answering."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    run: str
    state: str
    why: str | None
    task: str
    strategy: str
    devices: int
    parameters: int
    model_bytes: int
    version: int
    versions: int
    published: float
    mean_staleness: float
    tasks: _Tasks
    refused: dict[str, int]
    given_up: dict[str, int]
    dead: dict[str, int]
    strays: dict[str, int]
    triggers: int
    inbox: int
    queue: int
    buffered_now: int
    kept_versions: int
    best: _Best | None = None  # absent if the coordinator is of an older release
    dead_letters: int
    privacy: _Privacy | None = None  # of a private run
    # The next six are absent if the coordinator is of an older release.
    evaluated: dict[str, int] = {}
    quarantined: list[int] = []
    step: _Step | None = None  # of a rule that adapts
    failing: dict[str, _Failing] = {}
    published_as: str = "f32"
    encoded: _Encoded | None = None
    trainers: int
    register_: dict[str, dict[str, Any]] = Field(alias="register")  # BaseModel has a `register`


async def read(client: Client, keys: Keys) -> dict[str, Any]:
    """Read the status from Redis, as a coordinator returns it over HTTP. Raises NoRun."""
    ledger = OperatorLedger(client, keys, "status")
    view = await ledger.tally(inboxes=True)
    return status(keys.name, view) | {"register": await ledger.trainers(), "register_more": 0}


def fetch(url: str, run: str, token: str | None = None) -> dict[str, Any]:
    """Fetch the status from a coordinator, for users without access to Redis.

    ``url`` is its address, with or without a path before ``/v1``. Raises FedstreamError.
    """
    if not _is_address(url):
        shown = re.sub(r"//.*@", "//...@", url)
        raise ConfigError(
            f"--url {shown!r} is not a coordinator's address; expected http://HOST:PORT"
        )
    base = url.partition("/v1/")[0].rstrip("/")
    asked = f"{base}/v1/runs/{quote(run, safe='')}"
    try:
        with urlopen(_request(asked, token), timeout=_ANSWER_S) as answer:  # noqa: S310  (http or https)
            body = answer.read(_MOST_BYTES)
    except HTTPError as error:
        text = _problem(error.read()) or error.reason
        kind = Unavailable if error.code in _PASSING else FedstreamError
        raise kind(f"{asked} answered {error.code}: {text}") from error
    except (HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise Unavailable(f"no answer from {asked}: {reason}") from error
    about = _parsed(body)
    try:
        _Answer.model_validate(about)
    except ValidationError as error:
        raise FedstreamError(
            f"{asked} does not answer like a coordinator: {first_wrong(error)}"
        ) from error
    return about


def _request(url: str, token: str | None) -> Request:
    request = Request(url)  # noqa: S310  (http or https)
    if token is not None:  # never sent on to a redirect's target
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_there = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # A URL with credentials is rejected, because error messages would show it.
    return parts.scheme in ("http", "https") and is_there and "@" not in parts.netloc


def _problem(body: bytes) -> str:
    """A coordinator's error text; empty if there is none."""
    return str(_parsed(body).get("error", ""))


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; empty if the body is anything else."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def show(about: Mapping[str, Any]) -> None:
    """Print the status."""
    console().print(page(about))


def page(about: Mapping[str, Any]) -> RenderableType:
    """The status as tables."""
    facts = two_columns(_rows(about))
    if not about["register"]:
        return facts
    more = about.get("register_more", 0)
    return Group(facts, "", trainers(about["register"]), f"and {more} more" if more else "")


def _rows(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = about["state"] + (f": {about['why']}" if about["why"] else "")
    rows = [
        ("run", f"{about['run']}, {state}"),
        ("task", f"{about['task']}, {about['devices']} devices"),
        ("model", _model(about)),
        ("strategy", about["strategy"]),
        ("version", f"{about['version']} of {about['versions']}, at {clock(about['published'])}"),
        ("staleness", f"{about['mean_staleness']:.2f}, moving average"),
        ("tasks", outcomes(about["tasks"])),
    ]
    if best := about.get("best"):
        rows.insert(5, ("best", _best(best)))
    if step := about.get("step"):
        rows.insert(4, (step["key"], str(StepSize(**step))))
    for what in ("refused", "given_up", "dead", "strays", "evaluated"):
        if about.get(what):
            text = ", ".join(f"{reason} {count}" for reason, count in about[what].items())
            rows.append((spaced(what), text))
    backlog = (
        f"{about['triggers']} triggers, {about['inbox']} in the inboxes, "
        f"{about['queue']} in the queue ({about['buffered_now']} buffered)"
    )
    if barred := about.get("quarantined"):
        rows.append(("quarantined", quarantined(barred)))
    rows += privacy_rows(about.get("privacy"))
    rows += failing_rows(about.get("failing", {}), about["register"])
    if encoded := _encoded(about):
        rows.append(("encoded", encoded))
    rows += [
        ("waiting", backlog),
        ("kept", f"{about['kept_versions']} versions, {about['dead_letters']} dead letters"),
        ("trainers", f"{about['trainers']} alive"),
    ]
    return rows


def _best(best: Mapping[str, Any]) -> str:
    """The main metric's best value, and its version."""
    lost = "" if best["kept"] else ", its model is no longer in Redis"
    return f"{best['metric']} {measure(best['value'])} at version {best['version']}{lost}"


def _model(about: Mapping[str, Any]) -> str:
    size = f"{about['parameters']:,} parameters, {about['model_bytes']:,} bytes"
    copy = about.get("published_as", "f32")
    return size if copy == "f32" else f"{size}, published as {copy}"


def _encoded(about: Mapping[str, Any]) -> str:
    """The savings by wire formats; '' if no update was encoded."""
    found = about.get("encoded")
    if not found or not found["updates"]:
        return ""
    each = found["bytes"] / found["updates"]
    return (
        f"{found['updates']:,} updates of {each:,.0f} bytes, {found['smaller_by']} times smaller "
        "than float32"
    )


def trainers(register: Mapping[str, Mapping[str, Any]]) -> Table:
    """Table of the trainers, as they describe themselves."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trainer", style="cyan")
    table.add_column("host")
    table.add_column("pid", justify="right")
    table.add_column("answers", justify="right")
    table.add_column("device now", justify="right")
    table.add_column("owns")
    for name, about in register.items():
        now = about.get("device")
        table.add_row(
            cell(name),
            cell(about.get("host", "")),
            cell(number(about.get("pid"))),
            cell(number(about.get("answers"))),
            "-" if now is None else cell(number(now)),
            cell(_owned(about.get("owns"))),
        )
    return table


def _owned(devices: object) -> str:
    """Devices that a trainer owns, at most 20 of them."""
    if not isinstance(devices, list | tuple) or not devices:
        return "any"
    more = len(devices) - _DEVICES_SHOWN
    shown = ", ".join(number(device) for device in devices[:_DEVICES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
