"""`--strategy NAME --help`: the keys of the strategy, and of its staleness function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from typer.core import TyperCommand

from fedstream.terminal import cell, console, line

if TYPE_CHECKING:
    from pydantic import BaseModel

_TYPED = "fedstream.typed"  # the command line as it was typed, in a context's notes


class RuleHelp(TyperCommand):
    """A command whose help ends with the keys of the given strategy."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments, as `--help` is handled before the other options."""
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and then the keys."""
        super().format_help(ctx, formatter)
        from fedstream.strategies import FUNCTIONS, RULES

        named = dict(_named(ctx.meta.get(_TYPED, [])))
        if rule := named.get("strategy.name"):
            _show("strategy", rule, RULES.find(rule).value, besides="name")
        if function := named.get("strategy.staleness.kind"):
            _show("strategy.staleness", function, FUNCTIONS.find(function).value, besides="kind")


def _named(typed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The keys set by options, in order."""
    for option, value in zip(typed, [*typed[1:], ""], strict=True):
        name, equals, joined = option.partition("=")
        given = joined if equals else value
        if name == "--strategy":
            yield "strategy.name", given
        elif name == "--set":
            key, _, text = given.partition("=")
            yield key.strip(), text.strip().strip("\"'")


def _show(key: str, name: str, table: type[BaseModel], *, besides: str) -> None:
    from fedstream.runtime.settings_keys import keys_of

    about = (inspect.getdoc(table) or "").partition("\n")[0]
    line(f"\n{name}: {about}" if about else f"\n{name}")
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("key", "values", "default", ""):
        shown.add_column(column)
    for one in keys_of(table, besides=[besides]):
        shown.add_row(
            *map(cell, (f"{key}.{one.name}", one.values, one.default or "required", one.about))
        )
    console().print(shown)
