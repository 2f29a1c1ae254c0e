"""What others wrote, made fit for a terminal.

A name, a reason or a log's line may hold what a terminal obeys (escape sequences), what turns the
text around (bidirectional overrides), and what ends a line early. It is shown as Python would write
it down: an escape becomes ``\\x1b``.
"""

from __future__ import annotations

_MOST = 16_384  # characters: nothing of ours is as long


def visible(value: object, *, lines: bool = False) -> str:
    """The text of a value, with whatever can't be printed written out; ``lines`` keeps its lines.

    What can be printed is what :meth:`str.isprintable` says: no control, format or private
    character, no surrogate, no space but the usual one.
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
