"""Where benchmarks keep what they found: the figures as JSON, and beside them a page in Markdown.

A benchmark that has a page says in it what it was measured on (:func:`conditions`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--out``: the folder that results are kept in."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")


def conditions(machine: Mapping[str, object]) -> str:
    """What was measured on, as pages say it. ``machine``: what described it, by name."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def keep(
    name: str, found: Mapping[str, Any], page: str | None = None, folder: Path = RESULTS
) -> None:
    """Write ``name``.json, and ``name``.md if there is a page, in place of what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if page is not None:
        (folder / f"{name}.md").write_text(page)
    print(f"written to {folder / name}.json{'' if page is None else ' and .md'}")
