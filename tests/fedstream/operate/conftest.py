"""Commands about a run, as an operator gives them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.cli.app import main
from tests.support import Hand

Command = Callable[..., Coroutine[Any, Any, tuple[int, str, str]]]


@pytest.fixture
def command(
    hand: Hand,
    redis: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Runs a command about the run: exit code, stdout and stderr; ``said``: to a question."""

    async def run(*arguments: str, said: str = "") -> tuple[int, str, str]:
        where = ("--redis", redis.url, "--run", hand.keys.name)
        monkeypatch.setattr("typer.confirm", lambda *_, **__: said == "y" or sys.exit(1))

        def ended() -> int:
            with pytest.raises(SystemExit) as end:
                main([*arguments, *where])
            return int(end.value.code or 0)

        return await asyncio.to_thread(ended), *capsys.readouterr()

    return run
