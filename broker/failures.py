"""Translate the errors of Redis and of connections into fedstream's errors. Pure functions."""

from __future__ import annotations

import re

from redis import exceptions

from fedstream.core.errors import (
    BrokerError,
    Distrusted,
    Foreign,
    LoginRefused,
    NoScript,
    OutOfMemory,
    Unavailable,
    distrust,
)

_DENIED = re.compile(r"\b(NOPERM|WRONGPASS) |The user executing the script can't|ACL failure")
# MISCONF: a snapshot failed. BUSY: a script has run for too long. Errors raised inside a script
# don't start with the code.
_PASSING = re.compile(r"\b(NOREPLICAS|MISCONF|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|LOADING) ")
# Errors of a node that is no longer the right one, including errors inside scripts (Redis 7 and
# later, Valkey). UNBLOCKED: the stream we blocked on is gone, or the node was demoted.
_ELSEWHERE = (
    exceptions.AskError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
)
_ELSEWHERE_TOO = re.compile(
    r"\b(UNBLOCKED|READONLY) |ttempted to (access a non|execute a .* while the cluster)"
)
_SAID = (exceptions.ResponseError, exceptions.AuthenticationError)
# A key of the wrong type, or a stream whose last id is so high that nothing can be appended.
_FOREIGN = re.compile(r"WRONGTYPE |exhausted the last possible ID|equal or smaller than the target")
_UNTRUSTED = re.compile(r"certificate verify failed: ([^(]+)")


def meaning(error: Exception, address: str, *, is_guided: bool) -> BrokerError:
    """The BrokerError for an error of a node or of a connection.

    ``address``: of the node, for the message. ``is_guided``: whether sentinels or a cluster name
    the node.
    """
    if isinstance(error, BrokerError):
        return error
    error = said_by_redis(error)
    text = str(error) or type(error).__name__
    where = f"Redis at {address}"
    denied = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    if isinstance(error, denied) or _DENIED.search(text):
        if isinstance(error, exceptions.AuthenticationError):
            keys = (
                "redis.username; redis.password, FEDSTREAM_REDIS__PASSWORD or redis.password_file"
            )
            return LoginRefused(f"{where} refuses: {text} ({keys})")
        text += " (a user's rights are for one role and one run: run.name)"
        return BrokerError(f"{where} refuses: {text}")
    if isinstance(error, exceptions.NoScriptError):
        return NoScript(f"{where} does not know our scripts yet: a coordinator loads them")
    if _FOREIGN.search(text):
        return Foreign(
            f"{where}: a key of the run holds a foreign value ({text}): a coordinator logs "
            "which one and moves it aside"
        )
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM " in text:
        return OutOfMemory(f"{where} is full: {text}")
    if untrusted := _UNTRUSTED.search(text):
        why = distrust(untrusted[1], "redis.tls.ca must name the authority that signed it")
        return Distrusted(f"{where} is not trusted: {why}")
    if isinstance(error, exceptions.AskError) and not is_guided:
        return BrokerError(f"{where} is a node of a cluster: set redis.cluster = true")
    passing = (
        exceptions.ConnectionError,  # BusyLoadingError among them
        exceptions.TimeoutError,
        exceptions.TryAgainError,
        OSError,
        TimeoutError,
    )
    if isinstance(error, passing) or is_elsewhere(error) or _PASSING.search(text):
        return Unavailable(f"{where} does not answer: {text}")
    return BrokerError(f"{where}: {text}")


def said_by_redis(error: Exception) -> Exception:
    """The error itself, or the handshake error that redis-py wraps on Unix sockets."""
    if type(error) is exceptions.ConnectionError and isinstance(error.__cause__, _SAID):
        return error.__cause__
    return error


def is_elsewhere(error: Exception) -> bool:
    """Whether the error means that the node is not, or no longer, the right one."""
    return isinstance(error, _ELSEWHERE) or bool(_ELSEWHERE_TOO.search(str(error)))
