"""Make untrusted text safe to show on a terminal.

A name, a reason or a log line may contain escape sequences, bidirectional overrides or line breaks.
They are shown as Python's escapes: an escape character becomes ``\\x1b``.
"""

from __future__ import annotations

_MOST = 16_384  # characters; our own texts are all shorter


def visible(value: object, *, lines: bool = False) -> str:
    """The text of a value with unprintable characters escaped; ``lines`` keeps newlines and tabs.

    Printable is what :meth:`str.isprintable` says: no control, format or private-use characters,
    no surrogates, no spaces but U+0020. Very long texts are cut.
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
