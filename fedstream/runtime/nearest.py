"""What somebody who misspelt a name may have meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that is most like this one; None if none is (``likeness``: from 0 to 1)."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """The end of an error about an unknown name: ``; did you mean 'fedbuff'?``, or nothing.

    ``shown``: how the known name is to be written.
    """
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {shown(near)}?"
