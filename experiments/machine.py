"""Description of the machine and the program that a result was measured with."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from experiments.program import commit


def described(program: str | None = None) -> dict[str, str | int]:
    """Describe machine, package versions, commit and date.

    ``program``: the commit, empty if unknown; None: the checkout's.
    """
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    packages = ("fedstream", "numpy", "redis", "hiredis", "torch", "uvloop")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count() or 0,
        "processor": models[0] if models else platform.processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        **{name: version(name) for name in packages},
        "commit": (commit() if program is None else program) or "not recorded",
    }
