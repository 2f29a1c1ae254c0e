"""Follows a page from its first block to its last, as somebody would who has a clone."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.docs.elsewhere import not_run
from tests.docs.pages import COMMANDS, FILES, Block, blocks
from tests.docs.shell import GUARD_S, Beside, Shell

# What goes on until somebody ends it: readers open another terminal.
_SERVICES = "coordinator|scheduler|updater|trainer|evaluator|helper|top"
_GOES_ON = re.compile(rf"(\w+=\S*|\\\n|\s)*(redis-server|fedstream ({_SERVICES}))\s")


class Reader:
    """One page. Everything in it that could be wrong has to be used before the block ends.

    ``instead``: text that stands for something else on the reader's machine, such as an address.
    """

    def __init__(self, page: str, shell: Shell, instead: Mapping[str, str]) -> None:
        self.shell = shell
        self.folder = shell.folder
        self.said: dict[str, str] = {}  # by command, as it stands on the page
        self._instead = instead
        self._used: set[str] = set()
        self._left: list[tuple[Block, str]] = [
            (block, text)
            for block in blocks(page)
            if block.language in (*COMMANDS, *FILES)
            for text in (block.commands() if block.language in COMMANDS else [block.text])
        ]

    def follow(self, until: str = "", *, fails: Mapping[str, int] | None = None) -> None:
        """Types all commands before the next file, or before the one that begins with ``until``.

        ``fails``: exit codes other than 0, by what commands begin with. Commands that go on are
        begun; :meth:`begin` is for those that only this page lets go on.
        """
        codes = dict(fails or {})
        while self._left and self._left[0][0].language in COMMANDS:
            block, command = self._left[0]
            if until and command.startswith(until):
                return
            if _GOES_ON.match(command) and "--once" not in command.partition("#")[0]:
                self.begin()
                continue
            del self._left[0]
            if entry := not_run(command):
                entry.check(command)
                continue
            code, said = self.shell.run(self._typed(command))
            [expected] = [n for text, n in codes.items() if command.startswith(text)] or [0]
            assert code == expected, f"{block.place}: {command}: exit code {code}:\n{said}"
            self.said[command] = said
        assert not until, f"no command begins with {until!r}"

    def begin(self, known: Mapping[str, str] | None = None) -> Beside:
        """Types the next command in another terminal, with what is ``known`` by now filled in."""
        _, command = self._left.pop(0)
        for text, other in (known or {}).items():
            command = command.replace(text, other)
        return self.shell.begin(self._typed(command))

    def given(self, command: str) -> str:
        """Types what the page takes for granted: what it printed."""
        code, said = self.shell.run(command)
        assert code == 0, f"{command}: exit code {code}:\n{said}"
        return said

    def text(self, language: str) -> str:
        """The next block, which is no command."""
        block, text = self._left.pop(0)
        assert block.language == language, f"{block.place} is {block.language}"
        return text

    def save(self, name: str, language: str = "python") -> Path:
        """Writes the next block into a file."""
        file = self.folder / name
        file.write_text(self.text(language))
        return file

    def python(self) -> str:
        """Runs the next block: what it printed."""
        return self.given(f"python {self.save('block.py')}")

    def wait(self, one: Beside, pattern: str) -> None:
        """Waits for what a command says that goes on."""
        until = time.monotonic() + GUARD_S
        while not re.search(pattern, one.log.read_text()):
            assert time.monotonic() < until, f"{one.command}: no {pattern}: {one.log.read_text()}"
            time.sleep(0.05)

    def ready(self) -> None:
        """Waits until every service that goes on says that it can work."""
        for one in self.shell.beside:
            if "redis-server" not in one.command:
                self.wait(one, "health_port")
                [port] = re.findall(r"health_port\W+(\d+)", one.log.read_text())
                until = time.monotonic() + GUARD_S
                while not _is_ready(int(port)):
                    assert time.monotonic() < until, f"{one.command}: {one.log.read_text()}"
                    time.sleep(0.05)

    def stop(self) -> None:
        """Ctrl-C in every other terminal; each command ends well."""
        for one, code in self.shell.interrupt():
            expected = 130 if "fedstream top" in one.command else 0
            assert code == expected, f"{one.command}: exit code {code}: {one.log.read_text()}"

    def _typed(self, command: str) -> str:
        for text, other in self._instead.items():
            if text in command:
                self._used.add(text)
                command = command.replace(text, other)
        return command

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            left = "\n".join(f"{block.place}: {text}" for block, text in self._left)
            assert not left, f"not followed to its end:\n{left}"
            unused = self._instead.keys() - self._used
            assert not unused, f"not on the page: {unused}"


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
            return True
    except OSError:
        return False
