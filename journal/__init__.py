"""The journal: an ordered record on disk of what the updater did.

A journal is a folder of segments. Only the epoch that made a segment ever writes to it. A segment
appears complete (it is written aside and linked into place), and begins with

    its head      epoch, the segment before it and how much of that one counts, run, strategy
    a standing    where the run stood: version, model, the strategy's memory, recent ends of tasks

followed by a record for every queue entry. So a standing is a checkpoint: recovery follows only the
newest segment (older ones are read only for devices' vectors that did not change), and the oldest
segments can be deleted when there are too many. Each record holds the checksum of the one before
it, and each head that of its predecessor's last record that counts: from version 0 on, they form
one SHA-256 chain.

A writer that was paused past its lease and then goes on writes into its own segment, after the cut
that its successor named: that part is never read, and nothing of it was committed (``claims``).

``frames`` defines a record's bytes on disk, and ``messages`` its content; ``reading`` and
``writing`` do what their names say.
"""

from fedstream.journal.claims import Claim, newest_epoch
from fedstream.journal.errors import JournalDamaged, JournalError, JournalFull
from fedstream.journal.frames import FORMAT, Place
from fedstream.journal.records import (
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
from fedstream.journal.segment import (
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
from fedstream.journal.settings import JournalSettings
from fedstream.journal.writer import FILE_MODE, FOLDER_MODE, Writer, sync_file

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
