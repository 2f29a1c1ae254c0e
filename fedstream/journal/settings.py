"""Where the journal is, how soon it is on disk, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstream.runtime.config import Section


class JournalSettings(Section):
    """Where the journal is, how soon it is on disk, and how much of it is kept."""

    dir: str = "journal"
    sync: Literal["always", "interval", "never"] = "interval"
    sync_s: Annotated[float, Field(gt=0)] = 1.0  # interval: at most this long after a write
    sync_bytes: Annotated[int, Field(gt=0)] = 64 << 20  # interval: or after this many bytes
    weights: bool = True  # false: everything but the updates' bytes is recorded
    segment_versions: Annotated[int, Field(ge=1)] = 4000  # a checkpoint after this many versions,
    segment_s: Annotated[float, Field(gt=0)] = 600.0  # this long
    segment_bytes: Annotated[int, Field(gt=0)] = 1 << 30  # or this many bytes
    keep_bytes: Annotated[int, Field(gt=0)] = 10 << 30  # the newest segment is kept at any size
    keep_segments: Annotated[int, Field(ge=1)] | None = None
    keep_s: Annotated[float, Field(gt=0)] | None = None
    adopt: bool = False  # if the journal or its end is missing: go on from Redis's model
    changed_rules: bool = False  # resume although the source of a rule isn't the recorded one
