"""`fedstream plugins`: what can be named in a configuration, and where it comes from."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from fedstream.cli.options import AsJson
from fedstream.terminal import cell, console, line, verbatim


def plugins(as_json: AsJson = False) -> None:
    """List the strategies, solvers and the like that a configuration can name.

    Built-in ones, and those that installed packages announce by entry points, which are loaded to
    see whether they work. Your own need no list: path/to/file.py:Name, package.module:Name.
    Exit codes: 0 all work, 1 one doesn't.
    """
    from fedstream.settings.parts import listed

    found = list(listed())
    if as_json:
        verbatim(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("key", "name", "from"):
            table.add_column(column, no_wrap=True)
        for one in found:
            table.add_row(cell(one.key), cell(one.name), cell(one.source))
        console().print(table)
        for one in found:
            if one.problem:
                line(f"{one.key} = {one.name}: {one.problem}", err=True)
    if any(one.problem for one in found):
        raise typer.Exit(1)
