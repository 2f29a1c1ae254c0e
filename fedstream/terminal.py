"""What is shown to people, on stdout and stderr: all of it goes through here.

Most of what is shown was written by others: trainers, a stranger's journal, another machine's
answer. So whatever is not our own text goes through :func:`line` or :func:`cell`: nothing in it is
obeyed, neither by the terminal nor as rich's markup. Nobody else prints (``test_structure.py``).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedstream.runtime.visible import visible

Step: TypeAlias = Callable[[int], None]

_WIDEST = 10_000  # cells
_MOST_PLACED = 1e6
_MOST_DIGITS = 15  # of a whole number: more of them say nothing to anybody


def line(text: object = "", *, err: bool = False) -> None:
    """Prints a text, in its lines."""
    stream = sys.stderr if err else sys.stdout
    stream.write(visible(text, lines=True) + "\n")
    stream.flush()


def verbatim(text: str) -> None:
    """Prints a text for programs as it is: JSON, which escapes by itself, or a file's content."""
    sys.stdout.write(text)
    sys.stdout.flush()


def confirm(question: str) -> None:
    """Asks. Raises typer.Abort for no."""
    typer.confirm(visible(question), abort=True)


class _Piped(Console):
    """For a file or a pipe: cells are padded, and blanks at a line's end are no use there."""

    def print(self, *objects: Any, **how: Any) -> None:
        with self.capture() as caught:
            super().print(*objects, **how)
        lines = caught.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


def console(*, err: bool = False, width: int | None = None) -> Console:
    """Where tables and bars are drawn. Unless ``width`` is given they are as wide as the terminal;
    where there is none, as wide as they are: what a program or grep reads is not cut.
    """
    here = Console(stderr=err, width=width)
    return here if here.is_terminal else _Piped(stderr=err, width=width or _WIDEST)


def room() -> int | None:
    """The width of the terminal that stdout is; None: it is none."""
    here = console()
    return here.width if here.is_terminal else None


def adding(step: Step, total: int) -> Step:
    """Takes parts where ``step`` takes how much is done, and tells of them now and then."""
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
    """An event that is set once the key is pressed, if stdin is a terminal."""
    event = asyncio.Event()
    if sys.stdin is None or not sys.stdin.isatty():
        yield event
        return
    import termios
    import tty

    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        typed = os.read(fd, 1024)
        if not typed:  # nobody types there any more
            loop.remove_reader(fd)
        if key.encode() in typed.lower():
            event.set()

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # as it is typed, without the return key; Ctrl-C still is one
    loop.add_reader(fd, read)
    try:
        yield event
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def progress(what: str, total: int, *, quiet: bool, parts: bool = True) -> Iterator[Step]:
    """A bar with the time left, on a terminal: what it gives takes how much is done.

    ``parts``: the parts are counted beside it; else they are too small to be told.
    """
    here = console(err=True)
    if quiet or not here.is_terminal:
        yield lambda _done: None
        return
    counted = MofNCompleteColumn() if parts else TaskProgressColumn()
    columns = TextColumn(what), BarColumn(), counted, TimeRemainingColumn(compact=True)
    # Lines that are printed meanwhile stand above the bar; those for a file go there.
    with Progress(
        *columns, console=here, transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def cell(value: object, *, style: str = "", lines: bool = False) -> Text:
    """A value in a table, or beside one; ``lines`` keeps its lines."""
    return Text(visible(value, lines=lines), style=style)


def cut(value: object, *, style: str = "", lines: bool = False) -> Text:
    """The same, cut where the room for it ends."""
    shown = visible(value, lines=lines)
    return Text(shown, style=style, overflow="ellipsis", no_wrap=True)


def spaced(name: str) -> str:
    """A name of ours as people read it: given_up is 'given up'."""
    return name.replace("_", " ")


def clock(seconds: float, form: str = "%H:%M:%S") -> str:
    """A time since 1970 as clocks here show it; '?' for what is no time."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime(form)
    except (OverflowError, ValueError, OSError):
        return "?"


def measure(value: float) -> str:
    """An accuracy, a loss or the like with four places, unless it is out of all proportion."""
    return f"{value:.4f}" if abs(value) < _MOST_PLACED else f"{value:.4g}"


def number(value: object, digits: int = 4) -> str:
    """A number for people: of a fraction so many significant digits; nothing for None."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.{digits}g}"
        case int() if abs(value) >= 10**_MOST_DIGITS:
            return f"{'-' if value < 0 else ''}1e{_MOST_DIGITS} or more"
    return visible(value)
