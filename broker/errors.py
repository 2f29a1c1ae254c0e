"""Everything that can go wrong between the services, as one small tree.

    FedstreamError
    ├── ConfigError           a key or value that is not allowed; the message names it
    ├── DataError             data that is missing or does not fit; says where it was sought
    └── BrokerError
        ├── Unavailable       Redis cannot be reached or cannot serve now     (retriable)
        │   ├── OutOfMemory   Redis is full: back-pressure                    (retriable)
        │   └── NoScript      Redis does not know a script (any more)         (retriable)
        ├── Foreign           a key holds what is not ours                    (retriable)
        ├── ReplyTooLarge     a reply longer than the caller takes            (retriable)
        ├── BadMessage        an entry that cannot be decoded
        ├── LayoutMismatch    a model of another shape than the run's
        ├── BlobMissing       a blob that is gone: expired, deleted or never written
        ├── BlobDamaged       a blob whose bytes do not match its digest or size
        ├── NoRun             the run was not created yet
        └── Fenced            another process has taken this role over

``retriable`` says whether the same call may succeed later without anything being changed.
"""

from __future__ import annotations


class FedstreamError(Exception):
    """Base of every error that fedstream raises on purpose."""

    retriable = False


class ConfigError(FedstreamError):
    """A configuration key or value that is not allowed."""


class DataError(FedstreamError):
    """Training or test data that is missing or does not fit."""


class BrokerError(FedstreamError):
    """Base of what can go wrong between a service and Redis."""


class Unavailable(BrokerError):
    """Redis cannot be reached, is loading, or is failing over."""

    retriable = True


class OutOfMemory(Unavailable):
    """Redis refused a write because its memory limit is reached."""


class NoScript(Unavailable):
    """Redis was asked for a script by its digest and does not know it."""


class Foreign(BrokerError):
    """A key of ours holds a value of another type, or ids of a day to come."""

    retriable = True  # a coordinator puts it aside


class ReplyTooLarge(BrokerError):
    """A reply that was longer than the caller takes: its connection was dropped half-read."""

    retriable = True  # what Redis did for it is done: the caller reads that in smaller parts


class BadMessage(BrokerError):
    """An entry whose bytes are not a message of this schema."""


class LayoutMismatch(BrokerError):
    """A model whose tensors are not those of the run."""


class BlobMissing(BrokerError):
    """A blob that is not there (any more)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"blob {name} is not there: expired, deleted or never written")
        self.name = name


class BlobDamaged(BrokerError):
    """A blob whose bytes are not those that were announced."""


class NoRun(BrokerError):
    """The run does not exist in this Redis."""


class Fenced(BrokerError):
    """Another process holds this role now; this one must stop writing."""
