"""What may be wrong with a journal."""

from __future__ import annotations

from fedstream.broker.errors import FedstreamError


class JournalError(FedstreamError):
    """A journal that cannot be read or written; the message says which file and where."""


class JournalDamaged(JournalError):
    """What is there is not what was written."""


class JournalFull(JournalError):
    """There is no room for another record."""

    retriable = True
