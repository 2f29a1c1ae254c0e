"""Secure aggregation: the server gets sums of updates from which no single update can be told.

Two-party additive sharing in which one share is a seed. A device sends its update masked by a
pseudorandom stream (:mod:`~fedstream.private.masks`), and the stream's seed sealed to the helper,
another trust domain (:mod:`~fedstream.private.sealing`). The helper returns the sum of a batch's
masks plus noise (:mod:`~fedstream.private.noise`); the server subtracts it. What the helper may do
stands in one document (:mod:`~fedstream.private.policy`). Pure functions of values; primitives come
from ``cryptography``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fedstream.core.errors import ConfigError

KemName = Literal["x25519", "mlkem768-x25519"]  # how seeds are sealed to the helper


class NotInstalled(ConfigError):
    """The extra ``private`` is not installed."""


@contextmanager
def importing(by: str) -> Iterator[None]:
    """For imports of what needs the extra. Raises NotInstalled, which says that ``by`` needs it."""
    try:
        yield
    except ImportError as error:  # also of a release of cryptography without HPKE
        raise NotInstalled(
            f"{by} needs the package cryptography: pip install 'fedstream[private]'"
        ) from error
