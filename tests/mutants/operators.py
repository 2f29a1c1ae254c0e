"""The faults: one small edit each, of Python by its syntax tree, of Lua by its words."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_CALCULATED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
# A log line, a trace or a metric that is missing is a fault, but not one that loses an update.
_TELLS = re.compile(r"\b(log|trace|_?metrics|console)\.|\blogging\.|\bprint\(")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file: ``old``, at ``start`` (characters from its beginning), is ``new``."""

    path: Path  # relative to the root of the tree
    start: int
    old: str
    new: str
    line: int
    what: str  # the kind of edit

    def applied(self, source: str) -> str:
        """The file's text with the fault in it."""
        end = self.start + len(self.old)
        if source[self.start : end] != self.old:
            raise ValueError(
                f"{self.path}:{self.line}: is not the text that the mutant was made of"
            )
        return source[: self.start] + self.new + source[end:]

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.path}:{self.line}: {self.what}: {old!r} -> {new!r}"


def mutants(path: Path, source: str) -> list[Mutant]:
    """Every fault that can be planted in a file, in the order of its text."""
    found = _of_lua(path, source) if path.suffix == ".lua" else _of_python(path, source)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.new))


class _Text:
    """A source by lines and UTF-8 columns, as syntax trees count."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0, *accumulate(len(line) for line in self.lines)]

    def at(self, line: int, column: int) -> int:
        """The character at a line (from 1) and a column (bytes)."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )


def _of_python(path: Path, source: str) -> Iterator[Mutant]:
    text = _Text(source)

    def edit(start: int, end: int, new: str, what: str) -> Mutant:
        return Mutant(path, start, source[start:end], new, bisect_right(text.starts, start), what)

    def sign(left: ast.expr, right: ast.expr, old: str, new: str, what: str) -> Iterator[Mutant]:
        """The sign between two expressions."""
        start, end = text.span(left)[1], text.span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.search(rf"(?<![=<>!*/]){pattern}(?![=<>*/])", source[start:end])
        if found:
            yield edit(start + found.start(), start + found.end(), new, what)

    for node in _executed(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield from sign(left, right, *_COMPARED[type(op)], "comparison")
            case ast.BoolOp(op=op, values=[left, right, *_]):
                words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from sign(left, right, *words, "condition")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _CALCULATED:
                if not _is_text(left) and not _is_text(right):
                    yield from sign(left, right, *_CALCULATED[type(op)], "arithmetic")
            case ast.UnaryOp(op=ast.Not()):
                start, _ = text.span(node)
                yield edit(start, start + len("not "), "", "negation")
            case ast.Constant(value=bool(value)):
                yield edit(*text.span(node), str(not value), "constant")
            case ast.Constant(value=int(value)):
                yield edit(*text.span(node), str(value + 1), "constant")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                start, end = text.span(test)
                yield edit(start, end, f"not ({source[start:end]})", "branch")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign():
                start, end = text.span(node)
                if not _TELLS.search(source[start:end]):
                    yield edit(start, end, "pass", "statement")
            case _:
                pass


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes inside of functions, without annotations, defaults of signatures and docstrings."""
    waiting: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.body
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        seen.add(id(node))
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
            continue
        if isinstance(node, ast.JoinedStr):  # words of a message
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


_LUA = [
    (r"(?<![~=<>])==(?!=)", "~=", "comparison"),
    (r"~=", "==", "comparison"),
    (r"<=", "<", "comparison"),
    (r"(?<![<>])<(?![=<>])", "<=", "comparison"),
    (r">=", ">", "comparison"),
    (r"(?<![<>])>(?![=<>])", ">=", "comparison"),
    (r"\band\b", "or", "condition"),
    (r"\bor\b", "and", "condition"),
    (r"\bnot ", "", "negation"),
    (r"(?<=\w) \+ (?=\w)", " - ", "arithmetic"),
    (r"(?<=[\w)]) - (?=\w)", " + ", "arithmetic"),
    (r"(?<![\w.'%:])\d+(?![\w.'])", None, "constant"),
]
_CALL = re.compile(
    r"^\s*((?:redis\.p?call|tell|count|bury|guard|room|remember|end_task)\(.*\))\s*$"
)


def _of_lua(path: Path, source: str) -> Iterator[Mutant]:
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = line.split("--", 1)[0]
        for pattern, new, what in _LUA:
            for found in re.finditer(pattern, code):
                if _in_text(code, found.start()):
                    continue
                word = str(int(found[0]) + 1) if new is None else new
                yield Mutant(path, start + found.start(), found[0], word, number, what)
        call = _CALL.match(code.rstrip("\n"))
        if call:
            yield Mutant(path, start + call.start(1), call[1], "", number, "statement")
        start += len(line)


def _in_text(code: str, at: int) -> bool:
    return code.count("'", 0, at) % 2 == 1
