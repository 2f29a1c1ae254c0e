"""``python -m tests.mutants.lua``: plants faults in the Lua scripts, and names those that survive.

It edits the files of the current folder, so it belongs into a copy: ``make mutants`` makes one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

SCRIPTS = Path("broker/lua")
TESTS = ("tests/broker", "tests/coordinator", "tests/updater")
LIMIT_S = 900  # for the tests of one mutant; one that hangs them is noticed too
_EDITS = [  # pattern, replacement; None: a number that is one larger
    (r"(?<![~=<>])==(?!=)", "~="),
    (r"~=", "=="),
    (r"<=", "<"),
    (r"(?<![<>])<(?![=<>])", "<="),
    (r">=", ">"),
    (r"(?<![<>])>(?![=<>])", ">="),
    (r"\band\b", "or"),
    (r"\bor\b", "and"),
    (r"\bnot ", ""),
    (r"(?<=\w) \+ (?=\w)", " - "),
    (r"(?<=[\w)]) - (?=\w)", " + "),
    (r"(?<![\w.'%:])\d+(?![\w.'])", None),
    # A statement that is left out.
    (r"^\s*(redis\.p?call|tell|count|bury|guard|room|remember|end_task)\(.*\)\s*$", ""),
]


@dataclass(frozen=True)
class Mutant:
    """One line of a script with a fault in it."""

    path: Path
    line: int  # from 1
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The script's text with the fault in it."""
        lines = source.splitlines(keepends=True)
        assert lines[self.line - 1] == self.old
        lines[self.line - 1] = self.new
        return "".join(lines)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old.strip()!r} -> {self.new.strip()!r}"


def mutants(path: Path, source: str) -> Iterator[Mutant]:
    """Every fault that can be planted in a script, outside comments and texts."""
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = line.partition("--")[0]
        for pattern, replacement in _EDITS:
            for found in re.finditer(pattern, code.rstrip("\n")):
                if code.count("'", 0, found.start()) % 2 == 0:
                    word = str(int(found[0]) + 1) if replacement is None else replacement
                    new = line[: found.start()] + word + line[found.end() :]
                    yield Mutant(path, number, line, new)


def is_noticed(mutant: Mutant) -> bool:
    """Whether a test fails while the fault is there."""
    source = mutant.path.read_text()
    mutant.path.write_text(mutant.applied(source))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", *TESTS]
        return subprocess.run(command, check=False, timeout=LIMIT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        mutant.path.write_text(source)


def main() -> int:
    """Exits with 1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.lua", description=__doc__)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    every = [
        one for path in sorted(SCRIPTS.glob("*.lua")) for one in mutants(path, path.read_text())
    ]
    drawn = Random(options.seed).sample(every, options.mutants)
    survived = [mutant for mutant in drawn if not is_noticed(mutant)]
    sys.stdout.writelines(f"SURVIVED {mutant}\n" for mutant in survived)
    sys.stdout.write(f"{len(drawn) - len(survived)} of {len(drawn)} killed\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
