"""The Lua scripts: state changes that belong together, each checked and done in one step.

A script names the keys it touches in its first line, ``-- keys: open counts``; they arrive in the
script as ``key.open`` and ``key.counts``. Keys not fixed in number (blobs) come behind them, as
``rest``. What several scripts share is in ``lua/prelude.lua``.

Redis decides at a script's start whether memory is short, and then fails its first write that takes
memory. So every script that takes memory makes such a write before it frees or deletes anything
(``guard``): out of memory, it does nothing at all rather than half.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from broker.client import Argument, Client, Command
from broker.errors import NoScript

_LUA = files("broker") / "lua"


class Script:
    """One script of ``broker/lua``, loaded into Redis when first needed."""

    def __init__(self, name: str) -> None:
        body = (_LUA / f"{name}.lua").read_text()
        first = re.match(r"-- keys:([a-z_ ]*)\n", body)
        if first is None:
            raise ValueError(f"lua/{name}.lua does not begin with '-- keys: ...'")
        self.name = name
        self.keys = first.group(1).split()
        table = ", ".join(f"{key} = KEYS[{n}]" for n, key in enumerate(self.keys, 1))
        header = f"local key = {{{table}}}\nlocal first_rest = {len(self.keys) + 1}\n"
        text = header + (_LUA / "prelude.lua").read_text() + body
        self.source = text.encode()
        self._sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    def command(
        self, keys: Mapping[str, str], *arguments: Argument, rest: Sequence[str] = ()
    ) -> Command:
        """The command that runs it, for a pipeline. Raises NoScript there if Redis forgot it."""
        named = [*(keys[name] for name in self.keys), *rest]
        return ("EVALSHA", self._sha, len(named), *named, *arguments)

    async def __call__(
        self,
        client: Client,
        keys: Mapping[str, str],
        *arguments: Argument,
        rest: Sequence[str] = (),
        ahead: Sequence[Command] = (),
    ) -> Any:
        """Runs it. Repeats it only where Redis says that it does not know the script.

        ``ahead``: commands that go before it in the same write. If one of them fails, that is
        raised, but the script has run: it must look for itself.
        """
        command = self.command(keys, *arguments, rest=rest)
        try:
            return (await client.pipeline([*ahead, command]))[-1]
        except NoScript:
            return await client.call("EVAL", self.source, *command[2:])
