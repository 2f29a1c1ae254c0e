"""The Lua scripts: each checks and makes several changes of state in one step.

A script's first line names the keys it touches, ``-- keys: open counts``; the script sees them as
``key.open`` and ``key.counts``. Keys of variable number (blobs) follow them, as ``rest``. Functions
shared by several scripts are in ``lua/prelude.lua``. Each script is sent with only the functions
that it uses, because Redis defines them anew at each run.

Redis requires read and write access to every declared key of a script. So a script doesn't declare
a key that its user may only read or only write. A second line names such keys, ``-- undeclared: run
head``, and the script assembles them from the run's prefix; Redis still checks the commands on
them. Undeclared keys lie in the run's slot like the others.

Redis checks its memory limit when a script starts. If the limit is reached, the script's first
write that takes memory fails. So every script that takes memory makes such a write (``guard``)
before it deletes anything: out of memory, the script changes nothing, and never does half its work.

A script names a reason as Python does, ``reasons.TOO_STALE``. Loading the script replaces the name
by the reason's text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fedstream.broker.client import Client
from fedstream.broker.commands import Argument, Command
from fedstream.core import reasons
from fedstream.core.errors import NoScript

_LUA = files(__package__) / "lua"
# A set becomes one text, in which a script searches for "|" .. reason .. "|".
_REASONS = reasons.named() | {"OF_THE_RUN": f"|{'|'.join(sorted(reasons.OF_THE_RUN))}|"}
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"\b(\w+)\(")
_REASON = re.compile(r"\breasons\.(\w+)")


def _shared_by(body: str) -> str:
    """The prelude's functions that a script calls, directly or through other functions."""
    text = (_LUA / "prelude.lua").read_text()
    functions = {found[1]: found[0] for found in _FUNCTION.finditer(text)}
    waiting, used = [body], set[str]()
    while waiting:
        names = functions.keys() & set(_CALLED.findall(waiting.pop())) - used
        used |= names
        waiting += [functions[name] for name in names]
    return _FUNCTION.sub(lambda found: found[0] if found[1] in used else "", text)


class Script:
    """One script of ``broker/lua``; if Redis doesn't have it, all scripts are loaded."""

    def __init__(self, name: str) -> None:
        body = self.body = (_LUA / f"{name}.lua").read_text()
        first = re.match(r"-- keys:([a-z_ ]*)\n", body)
        if first is None:
            raise ValueError(f"lua/{name}.lua does not begin with '-- keys: ...'")
        second = re.match(r".*\n-- undeclared:([a-z_ ]*)\n", body)
        self.name = name
        self.shared = _shared_by(body)
        self.keys = first.group(1).split()
        self.undeclared = second.group(1).split() if second else []
        table = [f"{key} = KEYS[{n}]" for n, key in enumerate(self.keys, 1)]
        table += [f"{key} = prefix .. '{key}'" for key in self.undeclared]
        header = "local prefix = table.remove(ARGV)\n" if self.undeclared else ""
        header += f"local key = {{{', '.join(table)}}}\nlocal first_rest = {len(self.keys) + 1}\n"
        if self.undeclared:
            # While a cluster migrates the slot, its keys are split between two nodes: fail before
            # the first write.
            header += (
                f"redis.call('EXISTS', {', '.join(f'key.{key}' for key in self.undeclared)})\n"
            )
        text = header + self.shared + body
        self.source = _REASON.sub(_reason, text).encode()
        self._sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    def command(
        self, keys: Mapping[str, str], *arguments: Argument, rest: Sequence[str] = ()
    ) -> Command:
        """The command that runs the script, for a pipeline.

        The pipeline raises NoScript if Redis doesn't have the script.
        """
        named = map(keys.__getitem__, self.keys)
        prefix = (keys["prefix"],) if self.undeclared else ()
        count = len(self.keys) + len(rest)
        return ("EVALSHA", self._sha, count, *named, *rest, *arguments, *prefix)

    def __call__(
        self,
        client: Client,
        keys: Mapping[str, str],
        *arguments: Argument,
        rest: Sequence[str] = (),
        ahead: Sequence[Command] = (),
    ) -> Coroutine[Any, Any, Any]:
        """Run the script, as :func:`run` does."""
        return run(client, self.command(keys, *arguments, rest=rest), ahead=ahead)


async def run(client: Client, command: Command, *, ahead: Sequence[Command] = ()) -> Any:
    """Run a script by its command; load all scripts and retry only if Redis doesn't have it.

    Raises NoScript if this user may not load scripts; a service will load them.

    ``ahead``: commands sent before the script in the same write. If one of these fails, this raises
    its error, but the script has run all the same: the script must check the effect of the
    commands.
    """
    try:
        return (await client.pipeline([*ahead, command]))[-1]
    except NoScript:
        if not client.loads_scripts:
            raise
        await load_all(client)
        return await client.call(*command)


def _reason(name: re.Match[str]) -> str:
    """A reason's text, as a string in Lua. Raises KeyError if it is not in the table."""
    return f'"{_REASONS[name[1]]}"'


@cache
def _sources() -> tuple[bytes, ...]:
    names = sorted(file.name for file in _LUA.iterdir() if file.name.endswith(".lua"))
    return tuple(
        Script(name.removesuffix(".lua")).source for name in names if name != "prelude.lua"
    )


async def load_all(client: Client) -> None:
    """Load every script into Redis, including those for users that may not load any."""
    await client.pipeline([("SCRIPT", "LOAD", source) for source in _sources()])
