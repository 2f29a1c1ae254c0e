"""Hooks of `make docs`: what links may point to.

A link to a file outside docs/ opens that file on GitHub. The site has no page for it and does not
know where the repository is published, so there it becomes the file's path. And no page may load
anything from another host.
"""

from __future__ import annotations

import logging
import re
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|link\s+rel=\"?(?:stylesheet|icon|preconnect|preload))"
    r"[^>]*?\s(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
)
_log = logging.getLogger("mkdocs.hooks.links")  # a warning fails the build: it is strict


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page's text. Warns where a file outside docs/ does not exist."""
    folder = (DOCS / page.file.src_uri).parent

    def as_path(link: re.Match[str]) -> str:
        words, target = link.groups()
        file = Path(normpath(folder / target))
        if file.is_relative_to(DOCS):
            return link[0]
        if not file.exists():
            _log.warning("%s: %s does not exist", page.file.src_uri, target)
        path = file.relative_to(DOCS.parent).as_posix()
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return _LINK.sub(as_path, markdown)


def on_post_page(output: str, page: Page, **_: object) -> None:
    """Warns where the finished page would load something from another host."""
    for address in _LOADED.findall(output):
        _log.warning("%s loads %s, which is on another host", page.file.src_uri, address)
