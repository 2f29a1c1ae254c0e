"""The keys of a settings class, described for people."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from fedstream.runtime.plugins import OneOf

_WORDS = {float: "number", int: "integer", str: "text", bool: "true or false", NoneType: "none"}
_LIMITS: dict[type, tuple[str, str]] = {
    Gt: (">", "gt"),
    Ge: (">=", "ge"),
    Lt: ("<", "lt"),
    Le: ("<=", "le"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table."""

    name: str
    values: str  # type and limits, in words
    default: str  # '' if it is required
    about: str  # one line; '' without a docstring


def keys_of(table: type[BaseModel], *, besides: Iterable[str] = ()) -> list[Key]:
    """The keys that users set in a table, except ``besides``."""
    said = _docstrings(table)
    left_out = set(besides)
    return [
        Key(
            name,
            _values(one.annotation, one.metadata),
            _default(one),
            one.description or said.get(name, ""),
        )
        for name, one in table.model_fields.items()
        if name not in left_out and not one.exclude
    ]


def _values(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """A type in words, with its limits."""
    about = list(metadata)
    choice = next((one for one in about if isinstance(one, OneOf)), None)
    if choice is not None:
        return f"table; {choice.tag}: {', '.join(choice.registry.built_in)} or your own"
    if get_origin(annotation) is Annotated:
        plain, *more = get_args(annotation)
        parts = [one.metadata if isinstance(one, FieldInfo) else [one] for one in more]
        inner = [part for some in parts for part in some]
        return _values(plain, [*inner, *about])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_values(one) for one in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    word = _WORDS.get(annotation) or ("table" if _is_table(annotation) else str(annotation))
    limits = [
        f"{text} {getattr(one, key):g}"
        for one in about
        for kind, (text, key) in _LIMITS.items()
        if isinstance(one, kind)
    ]
    return f"{word} {', '.join(limits)}" if limits else word


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        tag = next((getattr(value, key) for key in ("kind", "name") if hasattr(value, key)), None)
        return str(tag)
    return "none" if value is None else to_json(value, fallback=str).decode()


def _docstrings(table: type) -> dict[str, str]:
    """The first lines of the fields' docstrings, which Python doesn't keep."""
    found: dict[str, str] = {}
    for one in reversed(table.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        except (OSError, SyntaxError, TypeError, IndexError):
            continue  # made by a program, or its source is gone
        lines = getattr(body, "body", [])
        for field, text in pairwise(lines):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = getattr(text, "value", None) if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = " ".join(value.value.split())
    return found
