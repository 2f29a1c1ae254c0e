"""The journal's errors."""

from __future__ import annotations

from fedstream.core.errors import ConfigError, FedstreamError


class JournalError(FedstreamError):
    """A journal that cannot be read or written; the message says which file and where."""


class JournalDamaged(JournalError):
    """A journal whose content has changed since it was written."""


class UpdateAltered(JournalDamaged):
    """A recorded update whose bytes differ from the received ones."""


class JournalFull(JournalError):
    """A disk without room for another record."""

    retriable = True


class Diverged(JournalError):
    """Rebuilding from the journal gives another result than the recorded one."""


# Why what a command asks about single updates of a private run is unknown.
ONLY_SUMS = "the updates of this private run are masked, and only their sums were opened"


class NotRecorded(JournalError):
    """The journal does not have an update's content: it was kept without, or it is masked."""


class RuleChanged(ConfigError):
    """The source of a strategy or staleness function is not the recorded source."""
