"""``make sbom``: write a release's software bill of materials in CycloneDX format.

    python -m requirements.sbom INTERPRETER OUT

INTERPRETER belongs to an environment with fedstream's dependencies and nothing else. Every package
is listed with its version, licence, package URL and dependencies.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """fedstream's version. Parsed, not imported: fedstream is not installed where this runs."""
    for node in ast.parse((ROOT / "fedstream" / "core" / "__init__.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__version__")], value=ast.Constant(str(text))):
                return text
    raise SystemExit("fedstream/core/__init__.py does not set __version__")


def main() -> None:
    """Write OUT."""
    interpreter, out = (Path(argument) for argument in sys.argv[1:])
    done = subprocess.run(
        [
            Path(sys.executable).with_name("cyclonedx-py"),
            "environment",
            "--pyproject",
            ROOT / "pyproject.toml",
            "--mc-type",
            "application",
            "--output-reproducible",
            "--output-format",
            "JSON",
            "--output-file",
            "-",
            interpreter,
        ],
        check=True,
        capture_output=True,
    )
    bill = json.loads(done.stdout)
    # The tool reads only pyproject.toml, which does not contain the version.
    own = bill["metadata"]["component"]
    own |= {"version": version(), "purl": f"pkg:pypi/fedstream@{version()}"}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill, indent=2) + "\n")


if __name__ == "__main__":
    main()
