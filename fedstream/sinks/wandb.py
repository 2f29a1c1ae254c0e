"""Weights & Biases: a run with our run's id, each start in a folder of its own.

wandb hands rows to a process of its own, which writes blocks of 32 KiB: a kill loses the rows of
the last block. So the files of earlier starts are read back, and what they lack is written again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from fedstream.broker.errors import ConfigError
from fedstream.sinks.extras import needs
from fedstream.sinks.sink import Reached, Sink, SinkSettings, TrackedPoint, TrackedRun, TrackedValue

if TYPE_CHECKING:
    from wandb import Run

_BLOCK = 1 << 15
_MAGIC = 7  # bytes before the first record
_HEAD = struct.Struct("<IHB")  # of a part: checksum, length, type
_WHOLE, _LAST = 1, 4  # types of parts that end a record


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
    """One run of Weights & Biases for each run of ours."""

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
            project=settings.project, entity=settings.entity, id=run.id, name=run.name,
            dir=self._dir, mode=settings.mode, resume="allow", config=dict(run.parameters),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
                x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )  # fmt: skip
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        if settings.mode == "online":
            return self._reached_online()
        reached, self._rows = _found(self._dir, run.id)
        return reached

    def _reached_online(self) -> Reached:
        """What the server has: a resumed run begins with its newest numbers."""
        assert self._run is not None  # noqa: S101  (begun)
        self._rows = self._run.step
        summary = dict(self._run.summary)
        return Reached(int(summary.get("made", -1)), int(summary.get("measured", -1)))

    def write(self, points: Sequence[TrackedPoint]) -> None:
        assert self._run is not None  # noqa: S101  (begun)
        for point in points:
            marker = "made" if point.kind == "version" else "measured"
            row = {"version": point.version, marker: point.version, **point.values}
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

        ``finish`` alone returns before wandb's process has written the last block, and a start
        that reads the file before then would write the block's rows a second time.
        """
        if self._run is not None:
            import wandb

            self._run.finish()
            self._run = None
            wandb.teardown()


def _found(folder: Path, run: str) -> tuple[Reached, int]:
    """What wandb's files of a run hold: the newest points, and how many rows."""
    from wandb.proto import wandb_internal_pb2

    parse: Any = wandb_internal_pb2.Record.FromString  # type: ignore[attr-defined]  # generated
    reached, rows = Reached(), 0
    # The folders of starts within one second end in -1, -2 and so on.
    for file in sorted((folder / "wandb").glob(f"*run-*-{run}*/run-{run}.wandb")):
        for data in _records(file.read_bytes()):
            record = parse(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows = max(rows, int(float(row.get("_step", rows))) + 1)
            reached = Reached(
                max(reached.version, int(row.get("made", -1))),
                max(reached.evaluation, int(row.get("measured", -1))),
            )
    return reached, rows


def _records(data: bytes) -> Iterator[bytes]:
    """The whole records of wandb's file (LevelDB's log format), up to a torn one."""
    at, record = _MAGIC, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # too short for a part: padding
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if kind == 0 or end > len(data):
            return
        record += data[at + _HEAD.size : end]
        at = end
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
