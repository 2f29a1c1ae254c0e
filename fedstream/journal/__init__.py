"""The journal: a record on disk of the updater's work, in order. Nothing here imports Redis.

A journal is a folder of segments. Only the epoch that made a segment ever writes to it. A segment
appears complete (it is written aside and linked into place), and begins with

    its head      epoch, the predecessor and its counted length, run, strategy
    a standing    state of the run: version, model, the strategy's memory, recent ends of tasks

followed by a record for every queue entry. So a standing is a checkpoint: recovery follows only the
newest segment (older ones are read only for devices' vectors that did not change), and the oldest
segments can be deleted when there are too many. Each record holds the checksum of the record
before, and each head that of its predecessor's last record that counts: from version 0 on, they
form one SHA-256 chain.

A writer that was paused past its lease and then continues writes into its own segment, after the
cut that its successor recorded: that part is never read, and none of it was committed (``claims``).

To read a journal, open it and follow its segments up to their cuts:

    with opened(Path("runs/demo")) as chain:
        for segment, cut in cuts(chain):
            for record, entry in entries(segment, cut):
                print(record.place.where, entry.version)

For its models, use :class:`fedstream.journal.replay.Replayer`. The modules, bottom up:

    frames, records              the format: a record's bytes, and their messages
    unshared                     the values of frozen parameters, beside the segments
    segment, chain               reading a segment, and the segments of a journal
    record_batches               reading many records at once
    claims, writer               the right to write, and writing a segment
    recorder                     the updater's writing, syncing and deleting
    norms, progress              the effect of a queue entry on a run, as pure functions
    rebuild, replay              rebuilding models for recovery, and in order by any rule
    what_if, base_models         another rule on the same updates, and the updates' x_tau
    inspection, contributions    show, verify and compare journals; statistics of devices
    ended_tasks                  an index of ended tasks
"""

from fedstream.journal.chain import (
    FOLDER,
    counted_bytes,
    cuts,
    entries,
    journal_of,
    newest_version,
    opened,
    segments,
    since,
    stored_bytes,
    uncounted,
)
from fedstream.journal.claims import Claim, newest_epoch
from fedstream.journal.errors import (
    Diverged,
    JournalDamaged,
    JournalError,
    JournalFull,
    NotRecorded,
    RuleChanged,
)
from fedstream.journal.frames import Place
from fedstream.journal.recorder import JournalSettings
from fedstream.journal.records import (
    QUARANTINES,
    SUFFIX,
    VECTORS,
    DeviceVector,
    EntryRecord,
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    SegmentHead,
    Standing,
    StepScaled,
    SumOpened,
    Taken,
    name_of,
)
from fedstream.journal.segment import Cut, Record, Segment, SegmentEnd, Tear
from fedstream.journal.writer import Writer

__all__ = [
    "FOLDER",
    "QUARANTINES",
    "SUFFIX",
    "VECTORS",
    "Claim",
    "Cut",
    "DeviceVector",
    "Diverged",
    "EntryRecord",
    "EvaluationEnded",
    "JournalDamaged",
    "JournalError",
    "JournalFull",
    "JournalSettings",
    "NotRecorded",
    "Place",
    "QuarantineSet",
    "Record",
    "RoundClosed",
    "RuleChanged",
    "Segment",
    "SegmentEnd",
    "SegmentHead",
    "Standing",
    "StepScaled",
    "SumOpened",
    "Taken",
    "Tear",
    "Writer",
    "counted_bytes",
    "cuts",
    "entries",
    "journal_of",
    "name_of",
    "newest_epoch",
    "newest_version",
    "opened",
    "segments",
    "since",
    "stored_bytes",
    "uncounted",
]
