"""Texts for people: suggestions for misspelt names, and escaping of untrusted text.

Names, reasons and log lines may contain escape sequences, bidirectional overrides or line breaks.
They are shown as Python's escapes: an escape character becomes ``\\x1b``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from inspect import isfunction
from types import CodeType, FunctionType
from typing import Any

from fedstream.core.errors import ConfigError


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The most similar known name, in upper or lower case; None if none is similar.

    ``likeness``: from 0 to 1.
    """
    names = {one.lower(): one for one in known}
    return next(map(names.get, get_close_matches(name.lower(), names, n=1, cutoff=likeness)), None)


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """The end of an error about an unknown name: ``; did you mean 'fedbuff'?``, or ''.

    ``shown``: formats the known name.
    """
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {shown(near)}?"


_MOST = 16_384  # characters; our own texts are all shorter


def escaped(value: object, *, lines: bool = False) -> str:
    """The text of a value with unprintable characters escaped; ``lines`` keeps newlines and tabs.

    Printable characters are those of :meth:`str.isprintable`: no control, format or private-use
    characters, no surrogates, no spaces but U+0020. Very long texts are cut.
    """
    text = str(value)
    if text.isprintable() and len(text) <= _MOST:
        return text
    cut = "" if len(text) <= _MOST else f"... ({len(text)} characters)"
    return "".join(_written(sign, lines=lines) for sign in text[:_MOST]) + cut


def _written(sign: str, *, lines: bool) -> str:
    if sign.isprintable() or (lines and sign in "\n\t"):
        return sign
    return sign.encode("unicode_escape").decode()


_LIKENESS = 0.8


def check_spelling(cls: type[Any]) -> None:
    """Raise ConfigError for a public method that the class doesn't use itself and whose name is
    similar to that of a method which the class may override."""
    base = next((one for one in cls.__mro__ if _is_ours(one)), object)
    own = [one for one in cls.__mro__ if issubclass(one, base) and not _is_ours(one)]
    known = {name for one in base.__mro__ if _is_ours(one) for name, _ in _methods(one)}
    methods = [method for one in own for method in _methods(one)]
    for name, _ in methods:
        if name in known or (near := nearest(name, known, likeness=_LIKENESS)) is None:
            continue
        if not any(name in _mentioned(code.__code__) for other, code in methods if other != name):
            raise ConfigError(
                f"defines {name}(), which nothing uses; did you mean {near}()? If not, rename it"
            )


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "fedstream"


def _methods(cls: type[Any]) -> Iterator[tuple[str, FunctionType]]:
    """Public methods and properties defined by this class."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isfunction(function) and not name.startswith("_"):
            yield name, function


def _mentioned(code: CodeType) -> set[str]:
    """Names that a function's code reads, also within the functions in it."""
    inner = [_mentioned(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
