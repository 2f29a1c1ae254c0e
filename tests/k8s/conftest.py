"""Addresses for what a test starts, and the programs that a test needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import pytest

Net: TypeAlias = Callable[[str], str]


def missing(what: str) -> NoReturn:
    """Skips the test; in CI it fails."""
    if os.environ.get("FEDSTREAM_CI") == "1":
        pytest.fail(f"{what}; in CI it has to be there")
    pytest.skip(what)


@pytest.fixture
def net() -> Net:
    """Gives each name an address in 127.0.0.0/8, which no other process of the tests uses."""
    addresses: dict[str, str] = {}

    def address(name: str) -> str:
        number = len(addresses) + 1
        prefix = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
        return addresses.setdefault(name, f"{prefix}.{number}")

    return address
