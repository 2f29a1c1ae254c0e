"""The errors of fedstream, as one small tree.

    FedstreamError
    ├── ConfigError           a key or value that is not allowed; the message names it
    │   └── TaskError         also a DataError: a task that cannot work, found before the start
    ├── SumOutOfRange         an opened sum that honest devices' updates can't have
    ├── DataError             data that is missing or does not fit; says where it was expected
    └── BrokerError
        ├── Unavailable       Redis cannot be reached or cannot serve now     (retriable)
        │   ├── OutOfMemory   Redis is full: back-pressure                    (retriable)
        │   └── NoScript      Redis does not have a script (any more)         (retriable)
        ├── Foreign           a key holds a foreign value                     (retriable)
        ├── ReplyTooLarge     a reply exceeds the caller's limit              (retriable)
        ├── LoginRefused      Redis or a Sentinel refuses the password
        │   └── Distrusted    their certificate is not trusted
        ├── BadMessage        an entry that cannot be decoded
        ├── LayoutMismatch    a model of another shape than the run's
        ├── BlobMissing       a blob that is gone: expired, deleted or never written
        ├── BlobDamaged       a blob whose bytes do not match its digest or size
        ├── Undecodable       an update or model that is not in the format that it names
        ├── NoRun             the run was not created yet
        └── Fenced            another process has taken over this role

``retriable`` says whether the same call may succeed later without any change.
"""

from __future__ import annotations

import re

_ANOTHERS = re.compile(r"certificate is not valid for '(.*)'")


class FedstreamError(Exception):
    """Base of every error that fedstream raises on purpose."""

    retriable = False

    @property
    def trace(self) -> str:
        """The traceback of the user's code that caused the error; '' if there is none."""
        return "\n".join(getattr(self, "__notes__", ()))


class ConfigError(FedstreamError):
    """A configuration key or value that is not allowed."""


class SumOutOfRange(FedstreamError):
    """An opened sum that no batch of honest devices has: an update or the mask was malformed."""


class DataError(FedstreamError):
    """Training or test data that is missing or does not fit."""


class TaskError(ConfigError, DataError):
    """A task that cannot work: its model, data, training or metrics failed before the start."""


class BrokerError(FedstreamError):
    """Base of the errors between a service and Redis."""


class Unavailable(BrokerError):
    """Redis cannot be reached, is loading, or is failing over."""

    retriable = True


class LoginRefused(BrokerError):
    """Redis or a Sentinel refuses the password, or the server's certificate is not trusted."""


class Distrusted(LoginRefused):
    """The certificate of Redis or a Sentinel is not trusted."""


class OutOfMemory(Unavailable):
    """Redis refused a write because its memory limit is reached."""


class NoScript(Unavailable):
    """Redis does not have the script with the requested digest."""


class Foreign(BrokerError):
    """One of our keys holds a value of another type, or a stream with ids in the future."""

    retriable = True  # a coordinator quarantines it


class ReplyTooLarge(BrokerError):
    """A reply exceeded the caller's limit; its connection was dropped half-read."""

    retriable = True  # the commands were executed; the caller reads smaller parts


class BadMessage(BrokerError):
    """An entry whose bytes are not a message of this schema."""


class LayoutMismatch(BrokerError):
    """A model whose tensors are not those of the run."""


class BlobMissing(BrokerError):
    """A blob that does not exist (any more)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"blob {name} does not exist: expired, deleted or never written")
        self.name = name


class BlobDamaged(BrokerError):
    """A blob whose bytes don't match its announced size or digest."""


class NoRun(BrokerError):
    """The run does not exist in this Redis."""


class Fenced(BrokerError):
    """Another process now holds this role; this one must stop writing."""


def innermost(error: BaseException) -> BaseException:
    """The exception itself; of a group, the first exception inside, at any depth.

    An exception that was never raised gets its group's traceback.
    """
    while isinstance(error, BaseExceptionGroup):
        first: BaseException = error.exceptions[0]
        # An exception that was never raised itself gets the group's traceback.
        error = first.with_traceback(first.__traceback__ or error.__traceback__)
    return error


def distrust(said: str, unsigned: str) -> str:
    """Explain why a server's certificate is not trusted, and what to change.

    ``said``: OpenSSL's message. ``unsigned``: what to change if no known authority has signed the
    certificate.
    """
    if found := _ANOTHERS.search(said):
        host = found[1]
        _, dot, rest = host.partition(".")
        star = f", not *.{rest}, which matches no name" if dot and "." not in rest else ""
        return f"its certificate is not for {host}: issue one that names {host}{star}"
    if "expired" in said:
        return "its certificate, or the authority's, has expired: renew it"
    if "not yet valid" in said:
        return "its certificate is not valid yet: correct this machine's clock, or wait"
    return f"its certificate is refused ({said.strip()}): {unsigned}"


class Undecodable(BrokerError):
    """Bytes that are not in their announced format.

    ``reason``: the member of :data:`fedstream.core.reasons.REFUSED` under which it is counted.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason = reason
