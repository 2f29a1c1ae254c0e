"""A container's file system: read-only but for what is mounted to be written, where Linux can.

Landlock restricts a process and all that it starts, without root. Where the kernel has none of it,
nothing is restricted: `available` says so.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1  # a flag: say which version of Landlock this is
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_WRITES = 0x2 | sum(1 << bit for bit in range(4, 13))  # write, remove and make of every kind
_BY_VERSION = {2: 1 << 13, 3: 1 << 14}  # refer, truncate


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


_libc = ctypes.CDLL(None, use_errno=True)


def available() -> int:
    """The kernel's version of Landlock; 0 without it."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)))


@contextmanager
def read_only_but(folders: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """What a new process does first, so that it can write beneath these folders alone.

    Raises OSError where there is no Landlock.
    """
    version = available()
    writes = _WRITES | sum(bit for since, bit in _BY_VERSION.items() if version >= since)
    opened = [os.open(folder, os.O_PATH | os.O_CLOEXEC) for folder in folders]
    ruleset = _Ruleset(writes)
    rules = int(_libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for folder in opened:
        beneath = _Beneath(writes, folder)
        _libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(beneath), 0)
        os.close(folder)

    def restrict() -> None:  # between fork and exec: two system calls
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _libc.syscall(_RESTRICT_SELF, rules, 0)

    try:
        yield restrict
    finally:
        os.close(rules)
