"""``python -m experiments.theory [name ...]``: results, pictures and README.md.

Without names, measures every setting again. README.md always covers all settings with results.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from experiments.machine import described
from experiments.theory import (
    afa,
    fedasync,
    fedbuff,
    readme,
    remarks,
    reuse,
    schedule,
    speedup,
    terms,
    weak,
)
from experiments.theory.claims import Measured, TheoremClaim

HERE = Path(__file__).parent


class Setting(Protocol):
    """The interface of a setting's module."""

    def measure(self) -> Measured:
        """Measure: the figures for the JSON file."""

    def claims(self, found: Measured) -> list[TheoremClaim]:
        """What the figures say about the theorems."""

    def draw(self, found: Measured, path: Path) -> None:
        """Draw the picture."""


SETTINGS: dict[str, Setting] = {
    "fedasync": fedasync,
    "weak": weak,
    "afa": afa,
    "reuse": reuse,
    "speedup": speedup,
    "terms": terms,
    "fedbuff": fedbuff,
    "remarks": remarks,
    "schedule": schedule,
}


def rounded(value: Any) -> Any:
    """Every float rounded to six digits: more than are significant, but still readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def write(name: str, folder: Path) -> None:
    """Measure a setting, and write its results with the machine, versions and time taken."""
    began = time.perf_counter()
    found = rounded(SETTINGS[name].measure())
    found["how"] = described() | {"seconds": round(time.perf_counter() - began)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    (folder / f"{name}.json").write_text("{\n" + lines + "\n}\n")


def main(names: list[str]) -> int:
    """Measure, draw and write README.md; return the exit status, 2 for an unknown name."""
    if unknown := set(names) - set(SETTINGS):
        sys.stderr.write(f"unknown setting {', '.join(unknown)}; known: {', '.join(SETTINGS)}\n")
        return 2
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    claims, how = {}, {}
    for name in names or SETTINGS:
        write(name, folder)
    for name, setting in SETTINGS.items():
        if (path := folder / f"{name}.json").exists():
            found = json.loads(path.read_text())
            claims[name], how[name] = setting.claims(found), found["how"]
            setting.draw(found, folder / f"{name}.png")
            for claim in claims[name]:
                sys.stdout.write(f"{claim.verdict}: {claim.source}. {claim.measured}\n")
    (HERE / "README.md").write_text(readme.page(claims, how))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
