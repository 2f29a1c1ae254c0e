"""The Lua scripts: state changes that belong together, each checked and done in one step.

A script names the keys it touches in its first lines, ``-- keys: open counts``; they arrive in the
script as ``key.open`` and ``key.counts``. Keys not fixed in number (blobs) come behind them, as
``rest``. What several scripts share is in ``lua/prelude.lua``.

Redis takes every declared key of a script for read and written. So a key that a script only reads,
or only writes, for a user who has no other right to it, is named in a second line, ``-- undeclared:
run head``, and put together inside from the run's prefix; the commands on it are checked all the
same. Undeclared keys lie in the run's one slot like the others.

Redis decides at a script's start whether memory is short, and then fails its first write that takes
memory. So every script that takes memory makes such a write before it frees or deletes anything
(``guard``): out of memory, it does nothing at all rather than half.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fedstream.broker.client import Argument, Client, Command
from fedstream.broker.errors import NoScript

_LUA = files(__package__) / "lua"


def prelude() -> dict[str, str]:
    """The functions that scripts share, by name."""
    text = (_LUA / "prelude.lua").read_text()
    return dict(re.findall(r"^local function (\w+)\((.*?)^end$", text, re.MULTILINE | re.DOTALL))


class Script:
    """One script of ``broker/lua``. Who meets a Redis that does not know it loads them all."""

    def __init__(self, name: str) -> None:
        body = self.body = (_LUA / f"{name}.lua").read_text()
        first = re.match(r"-- keys:([a-z_ ]*)\n", body)
        if first is None:
            raise ValueError(f"lua/{name}.lua does not begin with '-- keys: ...'")
        second = re.match(r".*\n-- undeclared:([a-z_ ]*)\n", body)
        self.name = name
        self.keys = first.group(1).split()
        self.undeclared = second.group(1).split() if second else []
        table = [f"{key} = KEYS[{n}]" for n, key in enumerate(self.keys, 1)]
        table += [f"{key} = prefix .. '{key}'" for key in self.undeclared]
        header = "local prefix = table.remove(ARGV)\n" if self.undeclared else ""
        header += f"local key = {{{', '.join(table)}}}\nlocal first_rest = {len(self.keys) + 1}\n"
        if self.undeclared:
            # While a cluster moves the slot some keys are there and some here: fail before a write.
            header += (
                f"redis.call('EXISTS', {', '.join(f'key.{key}' for key in self.undeclared)})\n"
            )
        text = header + (_LUA / "prelude.lua").read_text() + body
        self.source = text.encode()
        self._sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    def command(
        self, keys: Mapping[str, str], *arguments: Argument, rest: Sequence[str] = ()
    ) -> Command:
        """The command that runs it, for a pipeline. Raises NoScript there if Redis forgot it."""
        named = [*(keys[name] for name in self.keys), *rest]
        prefix = (keys["prefix"],) if self.undeclared else ()
        return ("EVALSHA", self._sha, len(named), *named, *arguments, *prefix)

    async def __call__(
        self,
        client: Client,
        keys: Mapping[str, str],
        *arguments: Argument,
        rest: Sequence[str] = (),
        ahead: Sequence[Command] = (),
    ) -> Any:
        """Runs it. Repeats it only where Redis says that it does not know the script.

        Raises NoScript where this user may load none: somebody else does.

        ``ahead``: commands that go before it in the same write. If one of them fails, that is
        raised, but the script has run: it must look for itself.
        """
        command = self.command(keys, *arguments, rest=rest)
        try:
            return (await client.pipeline([*ahead, command]))[-1]
        except NoScript:
            if not client.loads_scripts:
                raise
            await load_all(client)
            return await client.call(*command)


@cache
def _sources() -> tuple[bytes, ...]:
    names = sorted(file.name for file in _LUA.iterdir() if file.name.endswith(".lua"))
    return tuple(
        Script(name.removesuffix(".lua")).source for name in names if name != "prelude.lua"
    )


async def load_all(client: Client) -> None:
    """Makes Redis know every script there is: also those of users who may load none."""
    await client.pipeline([("SCRIPT", "LOAD", source) for source in _sources()])
