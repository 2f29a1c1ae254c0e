"""A run's picture, drawn in a thread while the services stop."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO

from fedstream.core.messages import Goal
from fedstream.core.records import Tally
from fedstream.history.display import short
from fedstream.history.timeline import History, SeenVersion
from fedstream.settings.config import Settings

_DRAWS = ("fedstream.history.pictures", "matplotlib.figure", "matplotlib.backends.backend_agg")


@dataclass(frozen=True)
class Drawn:
    """The data of the picture."""

    title: str
    created: float  # seconds since 1970
    devices: int
    versions: dict[int, SeenVersion]
    evaluations: dict[int, dict[str, float]]
    goal: dict[str, Goal]
    stop_metric: str | None

    @classmethod
    def of(cls, settings: Settings, who_trains: str, view: Tally, history: History) -> Drawn:
        """Collect the present data of a run; ``who_trains``: for example "2 trainers"."""
        title = (
            f"{short(settings.task.name)} · {short(settings.strategy.name)} · "
            f"{view.run.devices} devices, {who_trains} · {view.head.version} versions"
        )
        return cls(
            title,
            view.run.created,
            view.run.devices,
            dict(history.versions),
            dict(history.evaluations),
            dict(history.goal),
            history.stop_metric,
        )

    def png(self) -> bytes:
        """Draw the picture as PNG."""
        from fedstream.history import pictures

        shown, file = History(), BytesIO()
        shown.goal, shown.stop_metric = self.goal, self.stop_metric
        shown.versions = self.versions
        for version in sorted(self.evaluations):
            shown.measure(version, self.evaluations[version])
        pictures.draw(file, self.title, shown, created=self.created, devices=self.devices)
        return file.getvalue()


class Painter:
    """Draws a run's picture in a thread."""

    def __init__(self) -> None:
        self._ready: asyncio.Task[None] | None = None
        self._begun: tuple[Drawn, asyncio.Task[bytes]] | None = None

    def get_ready(self) -> None:
        """Import the drawing library once, which takes half a second, ahead of the run's end."""
        if self._ready is None:
            self._ready = asyncio.create_task(asyncio.to_thread(_import), name="get ready to draw")

    def begin(self, drawn: Drawn) -> None:
        """Begin to draw the probable picture."""
        self._begun = drawn, asyncio.create_task(asyncio.to_thread(drawn.png), name="draw")

    async def png(self, drawn: Drawn) -> bytes:
        """The picture as PNG, drawn anew if the data have changed since :meth:`begin`.

        Raises matplotlib's errors.
        """
        if self._begun is not None:
            begun, drawing = self._begun
            found = await drawing
            if begun == drawn:
                return found
        return await asyncio.to_thread(drawn.png)


def _import() -> None:
    with suppress(Exception):  # drawing raises the same error
        for module in _DRAWS:
            importlib.import_module(module)
