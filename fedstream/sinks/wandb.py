"""Weights & Biases: a run with our run's id, each start in a folder of its own.

wandb passes rows to another process, which writes blocks of 32 KiB, so a kill loses the rows of the
last block. So each start reads the files of earlier starts, and writes missing rows again.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from fedstream.core.errors import ConfigError
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
    from wandb import Run

# The field of a row that has its version, by the kind of point.
_MARKS = {"version": "made", "evaluation": "measured", "devices": "measured_there"}
_BLOCK = 1 << 15
_MAGIC = 7  # bytes before the first record
_HEAD = struct.Struct("<IHB")  # of a part: checksum, length, type
_WHOLE, _MIDDLE, _LAST = 1, 3, 4  # types of parts of records
_END_S, _LOOK_S = 30.0, 0.01  # wait for a file's end: time limit, interval of checks


class WandbSettings(SinkSettings):
    """A run of Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "fedstream"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"  # offline: upload with `wandb sync`
    dir: str | None = None  # of wandb's files; None: the run's own folder

    def placed(self, out: Path) -> Self:
        return self.model_copy(update={"dir": str(Path(self.dir or out).absolute())})

    def build(self) -> Wandb:
        return Wandb(self)


class Wandb(Sink):
    """One run of Weights & Biases for each run of fedstream."""

    def __init__(self, settings: WandbSettings) -> None:
        needs("wandb", "wandb")
        if settings.dir is None:
            raise ConfigError("sinks: wandb needs dir, the folder for its files")
        self._settings = settings
        self._dir = Path(settings.dir)
        self._run: Run | None = None

    def begin(self, run: TrackedRun) -> Reached:
        self.close()
        self._dir.mkdir(parents=True, exist_ok=True)
        for part in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):  # by default in the home folder
            os.environ.setdefault(f"WANDB_{part}_DIR", str(self._dir / "wandb"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = self._settings
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=run.id,
            name=run.name,
            dir=self._dir,
            mode=settings.mode,
            resume="allow",
            config=dict(run.parameters),
            reinit="create_new",  # keeps the user's own runs open
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        if settings.mode == "online":
            return self._reached_online()
        reached, self._rows = _found(self._dir, run.id)
        return reached

    def _reached_online(self) -> Reached:
        """The server's progress, from a resumed run's newest numbers."""
        assert self._run is not None  # noqa: S101  (begun)
        self._rows = self._run.step
        summary = dict(self._run.summary)
        return _reached(summary)

    def write(self, points: Sequence[TrackedPoint]) -> None:
        assert self._run is not None  # noqa: S101  (begun)
        for point in points:
            row = {"version": point.version, _MARKS[point.kind]: point.version, **point.values}
            self._run.log(row, step=self._rows)
            self._rows += 1

    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        import wandb

        assert self._run is not None  # noqa: S101  (begun)
        self._run.summary.update(dict(summary))
        if model is not None:
            artifact = wandb.Artifact(f"{self._run.id}-model", type="model")
            artifact.add_file(str(model))
            self._run.log_artifact(artifact)
        self.close()

    def close(self) -> None:
        """Finish the run; when this returns, wandb's file is whole.

        Raises TimeoutError, or wandb's errors; the next start then uses a new process.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception:
            import wandb

            # Else every later start would use the dead process. Not in general, as this ends the
            # user's own runs. Its errors add nothing to the present one.
            with suppress(Exception, SystemExit):
                wandb.teardown()
            raise
        if self._settings.mode == "offline":
            # finish() doesn't wait for the last block, and a start that reads the file before would
            # write its rows again.
            _await_end(Path(run.dir).parent / f"run-{run.id}.wandb")


def _await_end(file: Path) -> None:
    """Wait until wandb's process has written the end of a run's file. Raises TimeoutError."""
    deadline = time.monotonic() + _END_S
    while not _ends(file):
        if time.monotonic() > deadline:
            raise TimeoutError(f"wandb has not written the end of {file} for {_END_S:.0f} s")
        time.sleep(_LOOK_S)


def _ends(file: Path) -> bool:
    """Whether the last two blocks of wandb's file have the record of the run's end."""
    start = max(0, file.stat().st_size // _BLOCK - 1) * _BLOCK
    with file.open("rb") as opened:
        opened.seek(start)
        newest = deque(_records(opened.read(), 0 if start else _MAGIC), maxlen=1)
    return any(_parsed(record).WhichOneof("record_type") == "exit" for record in newest)


def _parsed(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2

    return wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]  # generated


def _found(folder: Path, run: str) -> tuple[Reached, int]:
    """The progress in wandb's files of a run, and their number of rows."""
    reached, rows = Reached(), 0
    # The folders of starts within one second end in -1, -2 and so on.
    for file in sorted((folder / "wandb").glob(f"*run-*-{run}*/run-{run}.wandb")):
        for data in _records(file.read_bytes(), _MAGIC):
            record = _parsed(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows = max(rows, int(float(row.get("_step", rows))) + 1)
            one = _reached(row)
            reached = Reached(*map(max, vars(reached).values(), vars(one).values()))
    return reached, rows


def _reached(row: Mapping[str, Any]) -> Reached:
    """The progress that a row, or a run's summary, has."""
    return Reached(**{kind: int(row.get(mark, -1)) for kind, mark in _MARKS.items()})


def _records(data: bytes, at: int) -> Iterator[bytes]:
    """The whole records of wandb's file (LevelDB's log format), up to a torn one.

    ``data``: begins with a block; ``at``: the offset of the first part to read.
    """
    record: bytes | None = None  # a first part may be empty
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # too short for a part: padding
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if kind == 0 or end > len(data):
            return
        part, at = data[at + _HEAD.size : end], end
        if kind in (_MIDDLE, _LAST) and record is None:
            continue  # it began in a block before
        record = (record or b"") + part
        if kind in (_WHOLE, _LAST):
            yield record
            record = None
