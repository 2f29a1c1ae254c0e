"""TensorBoard: an event file for each start that adds something, in a folder per run.

All numbers of a point are one record of the file, so a kill leaves either the whole point or a torn
record at the file's end, which readers ignore. The progress is read from the files.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from fedstream.core.errors import ConfigError
from fedstream.runtime.process import open_regular
from fedstream.sinks.sink import (
    Reached,
    Sink,
    SinkSettings,
    TrackedPoint,
    TrackedRun,
    TrackedValue,
    needs,
)

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

_PREFIX = "events"
_HEAD = struct.Struct("<QI")  # of a record: length, checksum of the length
_FOOT = struct.Struct("<I")  # checksum of the data
_PARAMETERS, _SUMMARY = "fedstream/parameters", "fedstream/summary"
_MODEL = "model.safetensors"


class TensorBoardSettings(SinkSettings):
    """TensorBoard event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    dir: str | None = None  # with a folder per run; None: in the run's own folder

    def placed(self, out: Path) -> Self:
        folder = Path(self.dir) if self.dir is not None else out / "tensorboard"
        return self.model_copy(update={"dir": str(folder.absolute())})

    def build(self) -> TensorBoard:
        return TensorBoard(self)


class TensorBoard(Sink):
    """Event files in ``dir``/NAME-ID."""

    def __init__(self, settings: TensorBoardSettings) -> None:
        needs("tensorboardX", "tensorboard")
        if settings.dir is None:
            raise ConfigError("sinks: tensorboard needs dir, the folder for event files")
        self._dir = Path(settings.dir)
        self._writer: EventsWriter | None = None

    def begin(self, run: TrackedRun) -> Reached:
        self.close()
        self.folder = self._dir / f"{run.name}-{run.id[:8]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        reached, self._texts = _found(self.folder)
        self._text(_PARAMETERS, run.parameters)
        return reached

    def _file(self) -> EventsWriter:
        """The event file of this start."""
        if self._writer is None:
            from tensorboardX.event_file_writer import EventsWriter

            # A name of its own: a writer truncates a file of the same name.
            self._writer = EventsWriter(str(self.folder / _PREFIX), f".{time.time_ns()}")
        return self._writer

    def write(self, points: Sequence[TrackedPoint]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for point in points:
            values = [
                Summary.Value(tag=_tag(point.kind, name), simple_value=value)
                for name, value in point.values.items()
            ]
            self._file().write_event(
                Event(wall_time=point.time, step=point.version, summary=Summary(value=values))
            )
        if points:
            self._file().flush()

    def _text(self, tag: str, table: Mapping[str, TrackedValue], *, step: int = 0) -> None:
        """Write a table as text, unless it is there."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        if (tag, step) in self._texts:
            return
        rows = "".join(f"| {key} | {value} |\n" for key, value in table.items())
        summary = text(tag, f"| key | value |\n|---|---|\n{rows}")
        self._file().write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._file().flush()
        self._texts.add((tag, step))

    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        self._text(_SUMMARY, summary, step=int(summary["versions"]))
        if model is not None:  # TensorBoard has no place for files: beside the events
            part = self.folder / f".{_MODEL}"
            shutil.copyfile(model, part)
            part.replace(self.folder / _MODEL)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _tag(kind: str, name: str) -> str:
    """The tag of a number; a name without a group gets its kind as the group."""
    return name if "/" in name else f"{kind}/{name}"


def _found(folder: Path) -> tuple[Reached, set[tuple[str, int]]]:
    """The content of a folder's event files: the newest points, and tables of text."""
    from tensorboardX.proto.event_pb2 import Event

    reached, texts = Reached(), set[tuple[str, int]]()
    for file in sorted(folder.glob(f"{_PREFIX}.out.tfevents.*")):
        for record in _records(file):
            event: Any = Event.FromString(record)
            tags = {value.tag for value in event.summary.value}
            if "version/updates" in tags:
                reached = replace(reached, version=max(reached.version, event.step))
            elif any(tag.startswith("test/") for tag in tags):
                reached = replace(reached, evaluation=max(reached.evaluation, event.step))
            elif any(tag.startswith("devices/") for tag in tags):
                reached = replace(reached, devices=max(reached.devices, event.step))
            texts |= {(tag.removesuffix("/text_summary"), event.step) for tag in tags}
    return reached, texts


def _records(file: Path) -> Iterator[bytes]:
    """The whole records of an event file (TFRecord's format), up to a torn one."""
    with os.fdopen(open_regular(file), "rb") as source:
        while len(head := source.read(_HEAD.size)) == _HEAD.size:
            length = _HEAD.unpack(head)[0]
            data = source.read(length + _FOOT.size)
            if len(data) < length + _FOOT.size:
                return
            yield data[:length]
