"""``make sbom``: what a release consists of, as CycloneDX has it.

    python -m requirements.sbom INTERPRETER OUT

INTERPRETER is that of an environment with what fedstream depends on and nothing else. Every
package has its version, licence, package URL and what it depends on.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """fedstream's own. Read, not imported: nothing of ours is installed where this runs."""
    for node in ast.parse((ROOT / "fedstream" / "__init__.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__version__")], value=ast.Constant(str(text))):
                return text
    raise SystemExit("fedstream/__init__.py does not say __version__")


def main() -> None:
    """Writes OUT."""
    interpreter, out = (Path(argument) for argument in sys.argv[1:])
    done = subprocess.run(
        [
            Path(sys.executable).with_name("cyclonedx-py"), "environment", "--pyproject",
            ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible",
            "--output-format", "JSON", "--output-file", "-", interpreter,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    bill = json.loads(done.stdout)
    # The version is not in pyproject.toml, which is all that the tool reads of us.
    own = bill["metadata"]["component"]
    own |= {"version": version(), "purl": f"pkg:pypi/fedstream@{version()}"}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill, indent=2) + "\n")


if __name__ == "__main__":
    main()
