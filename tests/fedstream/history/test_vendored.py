"""What comes from elsewhere is what its author published, with its licence."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

import pytest

# Of uPlot 1.6.32 on the npm registry: package/dist/, and package/LICENSE.
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
_STATIC = files("fedstream.history.ui") / "static"


@pytest.mark.parametrize("name", UPLOT)
def test_uplot_is_unchanged(name: str) -> None:
    assert sha256((_STATIC / name).read_bytes()).hexdigest() == UPLOT[name]


def test_all_else_is_ours() -> None:
    assert {one.name for one in _STATIC.iterdir()} == {
        *UPLOT,
        "page.css",
        "charts.js",
        "page.js",
        "question.js",
        "report.js",
        "live.js",
        "live-panels.js",
        "live.css",
    }
