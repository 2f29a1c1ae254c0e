"""A part of the live page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedstream.history.live.scene import Scene


@dataclass(frozen=True)
class LivePanel:
    """Draws one thing of a scene; sent again whenever what it draws has changed."""

    name: str  # an identifier
    title: str
    html: Callable[[Scene], str]  # escaped, and readable without JavaScript and style
    wide: bool = False  # over all columns of the page
