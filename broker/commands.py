"""Commands to Redis, and their bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import hiredis

Buffer = bytes | memoryview
Argument = bytes | memoryview | str | int | float
Command = tuple[Argument, ...]

ASKING: Command = ("ASKING",)  # precedes a command to a node that imports the slot


# hiredis's stub takes tuples of one element only.
_packed = cast("Callable[[Command], bytes]", hiredis.pack_command)


def asking(commands: Sequence[Command]) -> Iterator[Command]:
    """Prefix commands with ASKING, for a node that is importing their slot.

    One ASKING covers one command or one MULTI.
    """
    inside = False
    for command in commands:
        if not inside:
            yield ASKING
        yield command
        inside = (inside or command[0] == "MULTI") and command[0] != "EXEC"


def encoded(commands: Sequence[Command]) -> list[Buffer]:
    """Encode commands in Redis's protocol without copying memory views.

    A 44 MB model would otherwise be copied twice.
    """
    for command in commands:
        if memoryview in map(type, command):
            return _in_parts(commands)
    return [b"".join(map(_packed, commands))]


def _in_parts(commands: Sequence[Command]) -> list[Buffer]:
    """Encode commands, with memory views as parts of their own."""
    parts: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        types, done = [*map(type, command)], 0
        if memoryview not in types:
            small.append(_packed(command))
            continue
        small.append(b"*%d\r\n" % len(command))
        while memoryview in types[done:]:
            at = types.index(memoryview, done)
            view = cast(memoryview, command[at])
            small += (_arguments(command[done:at]), b"$%d\r\n" % view.nbytes)
            parts += (b"".join(small), view)
            small, done = [b"\r\n"], at + 1
        small.append(_arguments(command[done:]))
    parts.append(b"".join(small))
    return parts


def _arguments(some: Command) -> bytes:
    """Encode some arguments of a command, without the header with their number."""
    return _packed(some).partition(b"\r\n")[2]
