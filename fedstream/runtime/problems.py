"""Errors as responses, in the form that all routes use."""

from __future__ import annotations

from aiohttp import web


def problem(
    status: int, text: str, *, reason: str | None = None, retry_after_s: int | None = None
) -> web.Response:
    """An error response for people and programs.

    ``reason``: the same for programs, in a word. ``retry_after_s``: when to try again.
    """
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    body = {"error": text} if reason is None else {"error": text, "reason": reason}
    return web.json_response(body, status=status, headers=headers)
