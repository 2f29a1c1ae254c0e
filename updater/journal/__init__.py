"""The journal: what the updater did, in the order in which it did it, on disk.

A journal is a folder of segments. Only the epoch that made a segment ever writes to it, and a
segment begins complete (it is written aside and linked into place) with

    its head      epoch, the segment before it and how much of that one counts, run, strategy
    a standing    where the run stood: version, model, the strategy's memory, what was done lately

and goes on with a record for every entry of the queue. So a standing is a checkpoint, recovery
reads the newest segment alone, and the oldest segments can go whenever there are too many. Each
record holds the checksum of the one before it, and each head that of the last record which counts
of its predecessor: from version 0 on they are one chain of SHA-256.

A writer that was stopped past its lease and goes on writes into its own segment, behind the cut
that its successor has named: nobody reads that, and nothing of it was ever committed (``claims``).

``frames`` says how a record looks on disk, ``messages`` what it says; ``reading`` and ``writing``
do what their names say.
"""

from fedstream.updater.journal.claims import Claim, newest_epoch
from fedstream.updater.journal.errors import JournalDamaged, JournalError, JournalFull
from fedstream.updater.journal.frames import FORMAT, Place
from fedstream.updater.journal.messages import (
    SUFFIX,
    VECTORS,
    Counts,
    DeviceVector,
    Entry,
    RoundClosed,
    SegmentHead,
    Standing,
    Taken,
    name_of,
)
from fedstream.updater.journal.reading import (
    Chunk,
    Cut,
    Ending,
    Record,
    Segment,
    Tear,
    chunk_bytes,
    cuts,
    segments,
)
from fedstream.updater.journal.settings import JournalSettings
from fedstream.updater.journal.writing import FILE_MODE, FOLDER_MODE, Writer, sync_file

__all__ = [
    "FILE_MODE",
    "FOLDER_MODE",
    "FORMAT",
    "SUFFIX",
    "VECTORS",
    "Chunk",
    "Claim",
    "Counts",
    "Cut",
    "DeviceVector",
    "Ending",
    "Entry",
    "JournalDamaged",
    "JournalError",
    "JournalFull",
    "JournalSettings",
    "Place",
    "Record",
    "RoundClosed",
    "Segment",
    "SegmentHead",
    "Standing",
    "Taken",
    "Tear",
    "Writer",
    "chunk_bytes",
    "cuts",
    "name_of",
    "newest_epoch",
    "segments",
    "sync_file",
]
