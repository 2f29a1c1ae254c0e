"""What `fedstream plan` assumes and its page shows, from what `benchmarks.gateway` measured.

    python -m benchmarks.plan [results/gateway.json]

Writes the defaults of StepCosts into `fedstream/planning.py`, and the table of
`docs/how-to/plan-devices.md` with them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.results import RESULTS
from fedstream.cli.plan import rows
from fedstream.planning import CHANGES, Fleet, Rules, StepCosts, TaskCost, bytes_of, forecast

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "fedstream" / "planning.py"
PAGE: Final = ROOT / "docs" / "how-to" / "plan-devices.md"
FLEETS: Final = (10_000, 1_000_000, 100_000_000)
PARAMETERS: Final = 61_706  # of the page's model
_TABLE = re.compile(r"^\| devices \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def rounded(costs: StepCosts) -> StepCosts:
    """Costs with three digits: more were not measured."""
    found: dict[str, Any] = {}
    for name, one in asdict(costs).items():
        if isinstance(one, dict):
            found[name] = TaskCost(_digits(one["ms"]), one["ms_per_mb"])
        else:
            found[name] = one if isinstance(one, int) else _digits(one)
    return StepCosts(**found)


def _digits(number: float) -> float:
    return float(f"{number:.3g}")


def with_defaults(source: str, costs: StepCosts) -> str:
    """The text of `planning.py` with these costs as the defaults of StepCosts."""
    for field in fields(costs):
        one = getattr(costs, field.name)
        said = f"TaskCost({one.ms!r}, {one.ms_per_mb!r})" if isinstance(one, TaskCost) else one
        default = rf"^(    {field.name}: \w+ = )(?:TaskCost\([^)]*\)|[\d.]+)"
        source, count = re.subn(default, rf"\g<1>{said}", source, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{SOURCE}: {count} defaults of {field.name}, expected one")
    return source


def with_table(page: str, costs: StepCosts) -> str:
    """The text of the page with a table of what these costs make of its fleets."""
    size = bytes_of(PARAMETERS, "f32")
    found = [
        rows(forecast(Fleet(devices, size, size, changes=CHANGES["f32"]), costs, Rules()))
        for devices in FLEETS
    ]
    lines = [
        f"| devices | {' | '.join(f'{devices:,}' for devices in FLEETS)} |",
        "|---" * (1 + len(FLEETS)) + "|",
        *(f"| {what} | {' | '.join(one[what] for one in found)} |" for what in found[0]),
    ]
    text, count = _TABLE.subn("\n".join(lines), page)
    if count != 1:
        raise SystemExit(f"{PAGE}: {count} tables of devices, expected one")
    return text


def costs_of(results: Mapping[str, Any]) -> StepCosts:
    """What a plan assumes after this measurement."""
    return rounded(StepCosts.measured(results))


def main() -> None:
    """Write the defaults and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "gateway.json")
    costs = costs_of(json.loads(parser.parse_args().results.read_text()))
    SOURCE.write_text(with_defaults(SOURCE.read_text(), costs))
    PAGE.write_text(with_table(PAGE.read_text(), costs))
    print(f"written to {SOURCE} and {PAGE}")


if __name__ == "__main__":
    main()
