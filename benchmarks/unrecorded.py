"""`python -m benchmarks.unrecorded updater ...`: the services with a journal that records nothing.

The baseline for the journal's cost: the same program without the writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstream.cli.app import main
from fedstream.core.layout import Payload
from fedstream.journal import EntryRecord, recorder


async def append_nothing(
    self: recorder.Recorder, records: Sequence[tuple[EntryRecord | None, Sequence[Payload]]]
) -> list[int]:
    """Stand in for ``Recorder.append``: write nothing, and start no thread."""
    return [self.appended] * len(records)


if __name__ == "__main__":
    recorder.Recorder.append = append_nothing  # type: ignore[method-assign]
    main()
