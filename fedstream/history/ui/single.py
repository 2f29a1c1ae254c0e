"""`fedstream report --html`: a run's pages in one file, to attach to a ticket.

The file requests nothing: it contains its styles and scripts, and its content security policy
allows only these, by their hashes.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from markupsafe import Markup

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.history import charts
from fedstream.history.devices import devices_of
from fedstream.history.model_stats import AHEAD
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import pages
from fedstream.history.ui.http import static
from fedstream.journal import opened
from fedstream.journal.contributions import DeviceContribution, stats

NAME = "report.html"
_MODULES = ("charts.js", "page.js", "report.js")
VERSIONS = 200  # in the file, evenly chosen: some 3 kB each


def write(run: RecordedRun, folder: Path) -> Path:
    """Write the file into a folder; returns its path. Rebuilds its versions' models.

    Raises FedstreamError; ConfigError if there is such a file already.
    """
    text = single(run)
    path = folder / NAME
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}: choose another folder") from error
    return path


def single(run: RecordedRun) -> str:
    """The file's text. Raises FedstreamError."""
    styles = [_own(static(name).decode()) for name in ("uPlot.min.css", "page.css")]
    scripts = [_own(static("uPlot.iife.min.js").decode()), _own(_joined(*_MODULES))]
    numbers = run.columns.numbers
    over_time = {
        one.name: replace(one, name=f"{one.name}-time")
        for one in charts.of_run(run, charts.Window(over_time=True))
        if one.leads
    }
    chosen = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), VERSIONS)).astype(int))
    views = [
        pages.view(run, int(one), None, models=True, is_waiting=lambda: True)
        for one in numbers[chosen]
    ]
    table = devices_of(run.columns.updates, shares=_shares(run))
    return pages.page(
        run,
        "single.html",
        "Report",
        "",
        policy=_policy(styles, scripts),
        styles=styles,
        scripts=scripts,
        total=len(numbers),
        facts=pages.facts(run),
        charts=charts.of_run(run),
        outcomes=pages.outcomes(run),
        over_time=over_time,
        table=table,
        devices=table.rows(),
        views=views,
    )


def _own(text: str) -> Markup:
    return Markup(text)  # noqa: S704  (what comes with the pages)


def _joined(*modules: str) -> str:
    """JavaScript modules joined into one, imported ones first: a single file can't import."""
    text = "\n".join(static(name).decode() for name in modules)
    return re.sub(r"^import .*\n|^export ", "", text, flags=re.MULTILINE)


def _shares(run: RecordedRun) -> dict[int, DeviceContribution] | None:
    """Each device's figures from all models; None if the models can't be rebuilt."""
    try:
        with opened(run.journal) as chain:
            return stats(chain, AHEAD)
    except FedstreamError:  # the views tell why
        return None


def _policy(styles: list[Markup], scripts: list[Markup]) -> str:
    """A content security policy that allows only these styles and scripts."""
    allowed = {
        kind: " ".join(
            f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts
        )
        for kind, texts in (("style-src", styles), ("script-src", scripts))
    }
    return "; ".join(["default-src 'none'", *(f"{kind} {of}" for kind, of in allowed.items())])
