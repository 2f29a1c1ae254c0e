"""Flower's client apps as tasks: an unchanged ``ClientApp`` trains inside our trainers.

Importing this package loads neither flwr nor torch; using it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["FlowerTask", "task"]

if TYPE_CHECKING:
    from fedstream.flower.client import FlowerTask, task
else:

    def __getattr__(name: str) -> object:
        """Import the public names on first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fedstream.flower import client

        return getattr(client, name)
