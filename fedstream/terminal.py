"""All output for people, on stdout and stderr.

Most text is untrusted: from trainers, other people's journals, other machines. So all foreign text
goes through :func:`line` or :func:`cell`, which escape terminal control sequences and rich's
markup. No other module prints (``test_structure.py``).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedstream.runtime.text import escaped

Advance: TypeAlias = Callable[[int], None]

_WIDEST = 10_000  # cells
_MOST_PLACED = 1e6
_MOST_DIGITS = 15  # longest integer to show in full


def line(text: object = "", *, err: bool = False) -> None:
    """Print a text, which may have several lines."""
    stream = sys.stderr if err else sys.stdout
    stream.write(escaped(text, lines=True) + "\n")
    stream.flush()


def verbatim(text: str) -> None:
    """Print text for programs unchanged: JSON, which is escaped already, or a file's content."""
    sys.stdout.write(text)
    sys.stdout.flush()


def confirm(question: str) -> None:
    """Ask a yes-or-no question. Raises typer.Abort for no."""
    typer.confirm(escaped(question), abort=True)


class _Piped(Console):
    """Console for a file or a pipe, without the blanks that pad cells at line ends."""

    def print(self, *objects: Any, **how: Any) -> None:
        with self.capture() as caught:
            super().print(*objects, **how)
        lines = caught.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


def console(*, err: bool = False, width: int | None = None) -> Console:
    """Console for tables and bars, as wide as ``width`` or else the terminal.

    Without a terminal, lines are not cut, because a program or grep may read them.
    """
    here = Console(stderr=err, width=width)
    return here if here.is_terminal else _Piped(stderr=err, width=width or _WIDEST)


def room() -> int | None:
    """Width of stdout's terminal in cells; None if stdout is not a terminal."""
    here = console()
    return here.width if here.is_terminal else None


def adding(step: Advance, total: int) -> Advance:
    """Wrap ``step``: sum up increments, and call ``step`` only now and then."""
    done = told = 0

    def add(part: int) -> None:
        nonlocal done, told
        done += part
        if done - told >= total // 500:
            told = done
            step(done)

    return add


@contextmanager
def pressed(key: str) -> Iterator[asyncio.Event]:
    """Event that is set once the key is pressed; never, unless stdin is a terminal."""
    event = asyncio.Event()
    if sys.stdin is None or not sys.stdin.isatty():
        yield event
        return
    import termios
    import tty

    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        typed = os.read(fd, 1024)
        if not typed:  # end of input
            loop.remove_reader(fd)
        if key.encode() in typed.lower():
            event.set()

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # keys arrive without Return; Ctrl-C still interrupts
    loop.add_reader(fd, read)
    try:
        yield event
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def progress(what: str, total: int, *, quiet: bool, parts: bool = True) -> Iterator[Advance]:
    """Progress bar with the time left, on a terminal; yields a function that advances it.

    ``parts``: show the count of parts beside the bar; otherwise a percentage.
    """
    here = console(err=True)
    if quiet or not here.is_terminal:
        yield lambda _done: None
        return
    counted = MofNCompleteColumn() if parts else TaskProgressColumn()
    columns = TextColumn(what), BarColumn(), counted, TimeRemainingColumn(compact=True)
    # Lines printed to a terminal meanwhile appear above the bar; redirected stdout is left alone.
    with Progress(
        *columns, console=here, transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """Status line at the bottom of a terminal; yields a function that sets its text."""
    here = console(err=True)
    if not here.is_terminal:
        yield lambda _what: None
        return
    spinner = Spinner("dots")
    with Live(spinner, console=here, transient=True, redirect_stdout=sys.stdout.isatty()):
        yield lambda what: spinner.update(text=cell(what))


def cell(value: object, *, style: str = "", lines: bool = False) -> Text:
    """Value made safe for a table cell or a line of text; ``lines`` keeps line breaks."""
    return Text(escaped(value, lines=lines), style=style)


def cut(value: object, *, style: str = "", lines: bool = False) -> Text:
    """Like :func:`cell`, cut with an ellipsis if it doesn't fit."""
    shown = escaped(value, lines=lines)
    return Text(shown, style=style, overflow="ellipsis", no_wrap=True)


def spaced(name: str) -> str:
    """Identifier with spaces for underscores: 'given up' for given_up."""
    return name.replace("_", " ")


def clock(seconds: float, form: str = "%H:%M:%S") -> str:
    """Local time for seconds since 1970; '?' if out of range."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime(form)
    except (OverflowError, ValueError, OSError):
        return "?"


def measure(value: float) -> str:
    """Metric with four decimal places, or four significant digits from a million on."""
    return f"{value:.4f}" if abs(value) < _MOST_PLACED else f"{value:.4g}"


def counted(number: int, what: str) -> str:
    """Number with a noun, in the plural unless it is 1."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number(value: object, digits: int = 4) -> str:
    """Number for people: floats with ``digits`` significant digits; nothing for None."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.{digits}g}"
        case int() if abs(value) >= 10**_MOST_DIGITS:
            return f"{'-' if value < 0 else ''}1e{_MOST_DIGITS} or more"
    return escaped(value)


def two_columns(rows: Iterable[tuple[str, object]]) -> Table:
    """Table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else cell(value, lines=True))
    return table
