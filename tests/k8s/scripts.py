"""Programs that stand in for those that the manifests' scripts call."""

from __future__ import annotations

import os
from pathlib import Path


def with_program(folder: Path, name: str, script: str, path: str = os.environ["PATH"]) -> str:
    """A PATH with another program of this name, before ``path``."""
    program = folder / "programs" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}:{path}"
