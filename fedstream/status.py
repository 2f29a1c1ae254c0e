"""`fedstream status`: a run as it is now, in a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from broker.client import Client
from broker.errors import ConfigError, FedstreamError, Unavailable
from broker.keys import Keys
from broker.ledger import Ledger
from coordinator.app import status
from fedstream.display import outcomes

_ANSWER_S = 15.0  # a coordinator's own patience with Redis is 10
_PASSING = (502, 503, 504)


async def read(client: Client, keys: Keys) -> dict[str, Any]:
    """The same as the coordinator's HTTP status. Raises NoRun."""
    ledger = Ledger(client, keys, "status")
    view = await ledger.look()
    return status(keys.name, view) | {"register": await ledger.trainers(), "register_more": 0}


def fetch(url: str, run: str) -> dict[str, Any]:
    """The same from a coordinator, for whoever may not ask Redis.

    ``url`` is its address, with or without a path before ``/v1``. Raises FedstreamError.
    """
    if not _is_address(url):
        shown = re.sub(r"//.*@", "//...@", url)
        raise ConfigError(f"--url {shown!r} is no address of a coordinator: http://HOST:PORT")
    base = url.partition("/v1/")[0].rstrip("/")
    asked = f"{base}/v1/runs/{quote(run, safe='')}"
    try:
        with urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310  (http or https)
            body = answer.read()
    except HTTPError as error:
        text = _problem(error.read()) or error.reason
        kind = Unavailable if error.code in _PASSING else FedstreamError
        raise kind(f"{asked} answers {error.code}: {text}") from error
    except (HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise Unavailable(f"nobody answers at {asked}: {reason}") from error
    about = _parsed(body)
    if "register" not in about:
        raise FedstreamError(f"{asked} does not answer as a coordinator does")
    return about


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_there = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # Credentials would be in messages.
    return parts.scheme in ("http", "https") and is_there and "@" not in parts.netloc


def _problem(body: bytes) -> str:
    """What a coordinator says is wrong."""
    return str(_parsed(body).get("error", ""))


def _parsed(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty one if it is something else."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def show(about: Mapping[str, Any]) -> None:
    """Prints it."""
    Console().print(page(about))


def page(about: Mapping[str, Any]) -> RenderableType:
    """The status as tables."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _rows(about):
        facts.add_row(name, escape(value))
    if not about["register"]:
        return facts
    more = about.get("register_more", 0)
    return Group(facts, "", trainers(about["register"]), f"and {more} more" if more else "")


def _rows(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = about["state"] + (f": {about['why']}" if about["why"] else "")
    rows = [
        ("run", f"{about['run']}, {state}"),
        ("task", f"{about['task']}, {about['devices']} devices"),
        ("model", f"{about['parameters']:,} parameters, {about['model_bytes']:,} bytes"),
        ("strategy", about["strategy"]),
        ("version", f"{about['version']} of {about['versions']}, at {_clock(about['published'])}"),
        ("staleness", f"{about['mean_staleness']:.2f}, moving average"),
        ("tasks", outcomes(about["tasks"])),
    ]
    for what in ("refused", "given_up", "dead", "strays"):
        if about[what]:
            text = ", ".join(f"{reason} {count}" for reason, count in about[what].items())
            rows.append((what.replace("_", " "), text))
    backlog = (
        f"{about['triggers']} triggers, {about['uploads']} uploads, {about['queue']} in the queue "
        f"({about['buffered_now']} buffered)"
    )
    rows += [
        ("waiting", backlog),
        ("kept", f"{about['kept_versions']} versions, {about['dead_letters']} dead letters"),
        ("trainers", f"{about['trainers']} alive"),
    ]
    return rows


def trainers(register: Mapping[str, Mapping[str, Any]]) -> Table:
    """What the trainers say of themselves."""
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
            escape(name), escape(str(about.get("host", ""))), str(about.get("pid", "")),
            str(about.get("answers", "")), "-" if now is None else str(now),
            ", ".join(str(device) for device in about.get("owns", ())) or "any",
        )  # fmt: skip
    return table


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")
