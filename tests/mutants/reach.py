"""Which tests run which lines, so that a mutant meets only those that could notice it."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from tests.mutants.operators import Mutant
from tests.mutants.traced.sitecustomize import NO_TEST

WORTH_S = 120.0  # of tests for one mutant, as long as they took when they were traced
_FUNCTION = re.compile(r"^local function (\w+)(\(.*?)^end$", re.MULTILINE | re.DOTALL)


class Reach:
    """The tests that ran a line, and how long each took: what the tracers wrote to a file."""

    def __init__(self, written: Path) -> None:
        self._seconds: dict[str, float] = {}
        self._tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for entry in written.read_text().splitlines():
            test, path, number = entry.rsplit("\t", 2)
            if path:
                self._tests[path, int(number)].add(test)
            else:
                self._seconds[test] = float(number)

    def of(self, mutant: Mutant, root: Path) -> list[str] | None:
        """The tests that could notice a mutant, the likeliest first; None: all of them."""
        source = (root / mutant.path).read_text()
        if mutant.path.suffix == ".lua":
            lines = {(f"broker/lua/{name}.lua", 0) for name in _scripts(mutant, source, root)}
        else:
            lines = {(str(mutant.path), line) for line in _statement(source, mutant.line)}
        found: set[str] = set().union(*(self._tests[line] for line in lines))
        if NO_TEST in found:
            return None
        return self._in_order(found & self._seconds.keys(), mutant.path)

    def _in_order(self, tests: set[str], path: Path) -> list[str]:
        """The file's own tests first, the quickest first, and of each one case before the others;
        as many as are worth it: what they don't notice, the rest would seldom.
        """
        own = str(Path("tests", *path.parts[:-1], f"test_{path.stem}.py"))
        cases: Counter[str] = Counter()
        order: list[tuple[bool, int, float, str]] = []
        for seconds, test in sorted((self._seconds[test], test) for test in tests):
            file, name = test.split("::", 1)
            function = f"{file}::{name.split('[')[0]}"
            order.append((file != own, cases[function], seconds, test))
            cases[function] += 1
        total = 0.0
        chosen: list[str] = []
        for _, _, seconds, test in sorted(order):
            total += seconds
            if chosen and total > WORTH_S:
                break
            chosen.append(test)
        return chosen


def _statement(source: str, line: int) -> range:
    """The lines of the smallest statement around a line; not its body, if it has one."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.end_lineno and node.lineno <= line <= node.end_lineno
    ]
    inner = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    body: list[ast.stmt] = getattr(inner, "body", [])
    if body and line < body[0].lineno:
        return range(inner.lineno, body[0].lineno)
    return range(inner.lineno, (inner.end_lineno or line) + 1)


def _scripts(mutant: Mutant, source: str, root: Path) -> list[str]:
    """The scripts that a mutant is in: of a function of the prelude, all that use it."""
    if mutant.path.stem != "prelude":
        return [mutant.path.stem]
    functions = {found[1]: found for found in _FUNCTION.finditer(source)}
    inside = {name for name, at in functions.items() if at.start() <= mutant.start < at.end()}

    def uses(body: str) -> bool:
        return any(re.search(rf"\b{name}\(", body) for name in inside)

    while more := {name for name, at in functions.items() if uses(at[2])} - inside:
        inside |= more
    others = [file for file in (root / mutant.path).parent.glob("*.lua") if file.stem != "prelude"]
    return [file.stem for file in others if not inside or uses(file.read_text())]
