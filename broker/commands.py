"""Commands to Redis, and their bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import hiredis

Buffer = bytes | memoryview
Argument = bytes | memoryview | str | int | float
Command = Sequence[Argument]

ASKING: Command = ("ASKING",)  # ahead of a command to a node that imports its slot


def asking(commands: Sequence[Command]) -> Iterator[Command]:
    """Prefix commands with ASKING, which covers one command or one MULTI, for an importing node."""
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
    parts: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        if memoryview not in map(type, command):  # nothing can be derived from it
            small.append(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]  # a stub of one element
            continue
        small.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, memoryview):
                small.append(b"$%d\r\n" % argument.nbytes)
                parts += (b"".join(small), argument)
                small = [b"\r\n"]
            else:
                # Pack the argument as a command of its own, then strip the array header.
                small.append(hiredis.pack_command((argument,)).removeprefix(b"*1\r\n"))
    parts.append(b"".join(small))
    return parts
