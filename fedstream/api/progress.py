"""Progress of a run or simulation in a notebook, on a terminal or as lines; and Ctrl-C."""

from __future__ import annotations

import html
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedstream.runtime.text import escaped
from fedstream.terminal import console, line


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Inside the block, SIGINT calls ``act`` instead of raising KeyboardInterrupt.

    Only the main thread can handle signals. In other threads this does nothing, and Ctrl-C does not
    interrupt them.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (signal.SIG_IGN, None):  # None: not set by Python, nor settable again
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_LINE_EVERY_S = 3.0
_REFRESH_S = 0.1


class ProgressDisplay(Protocol):
    """A display of progress."""

    def update(self, done: int, text: str) -> None:
        """Show the number of versions, and a text about the run."""

    def say(self, text: str) -> None:
        """Report an event."""

    def close(self, text: str) -> None:
        """End the display; ``text``: the end of the run, for a bar that stays visible."""


@contextmanager
def progress_display(what: str, total: int, *, wanted: bool) -> Iterator[ProgressDisplay]:
    """A display that fits the environment; not ``wanted``: only reported events.

    ``what``: the work in progress; ``total``: versions.
    """
    display: ProgressDisplay
    if not wanted:
        display = _Silent()
    elif in_notebook():
        display = _Notebook(what, total)
    elif console(err=True).is_terminal:
        display = _Terminal(what, total)
    else:
        display = _Lines(what, total)
    try:
        yield display
    finally:
        display.close("")


def in_notebook() -> bool:
    """Whether this is a notebook's kernel, without importing IPython."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython  # type: ignore[attr-defined, unused-ignore]

    return getattr(get_ipython(), "kernel", None) is not None


class _Silent:
    """Only reported events, on stderr."""

    def update(self, done: int, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        line(text, err=True)

    def close(self, text: str) -> None:
        pass


class _Lines(_Silent):
    """A line on stderr every few seconds, for a file or a pipe."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._shown = time.monotonic()

    def update(self, done: int, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _LINE_EVERY_S:
            self._shown = now
            line(f"{self._what} · {done}/{self._total} · {text}", err=True)


class _Terminal(_Silent):
    """A bar on stderr that disappears at the end."""

    def __init__(self, what: str, total: int) -> None:
        self._bar = Progress(
            TextColumn(escaped(what)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console(err=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(what, total=total, text="")
        self._bar.start()

    def update(self, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, text=escaped(text))

    def close(self, text: str) -> None:
        self._bar.stop()


class _Notebook(_Silent):
    """A bar in the cell's output, replaced by a line about the end of the run.

    Jupyter updates outputs in place; rich would need ipywidgets and an extension of the notebook's
    server.
    """

    def __init__(self, what: str, total: int) -> None:
        from IPython.display import display

        self._what, self._total = what, total
        self._shown = 0.0
        self._closed = False
        first = self._drawn(0, "starting")
        self._handle: Any = display(first, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def update(self, done: int, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _REFRESH_S:
            self._shown = now
            self._handle.update(self._drawn(done, text), raw=True)

    def close(self, text: str) -> None:
        if not self._closed:
            self._closed = True
            told = f"{self._what} · {text}" if text else self._what
            self._handle.update(
                {"text/plain": told, "text/html": f"<div>{html.escape(told)}</div>"}, raw=True
            )

    def _drawn(self, done: int, text: str) -> dict[str, str]:
        told = f"{self._what} · {done}/{self._total} · {text}"
        bar = f'<progress value="{done}" max="{self._total}" style="width: 20em"></progress>'
        return {"text/plain": told, "text/html": f"<div>{bar} {html.escape(told)}</div>"}
