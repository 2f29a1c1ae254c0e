"""The planted faults can be planted: what they change is there, once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_another_program(mutant: Mutant, tmp_path: Path) -> None:
    path = tmp_path / mutant.path
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.path, path)
    before = path.read_text()
    mutant.plant(tmp_path)
    assert path.read_text() != before
    if path.suffix == ".py":
        compile(path.read_text(), path, "exec")
