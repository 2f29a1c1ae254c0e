"""The page on wire formats, as a reader would follow it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.docs.reader import Reader
from tests.integration.command import TEST_GUARD_S, adds_up

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def test_wire_formats(reader: Callable[..., Reader]) -> None:
    with reader("docs/how-to/wire-formats.md") as page:
        page.follow()
        summary = json.loads((page.folder / "runs/int8/summary.json").read_text())
        assert (summary["versions"], summary["accuracy"] > 0.6) == (60, True), summary
        assert adds_up(summary)
        assert summary["encoded"]["updates"] >= 60
        assert summary["encoded"]["smaller_by"] > 3.8
        assert "60 of 60 versions identical" in page.said["fedstream replay runs/int8"]
