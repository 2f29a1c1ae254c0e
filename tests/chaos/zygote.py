"""The fork server of `fedstream run`, whose services get the seams before they begin.

    python -m tests.chaos.zygote FD

FD is the number of its Unix socket: see :mod:`fedstream.local.fork_server`.
"""

from __future__ import annotations

import importlib
from runpy import run_module
from typing import Any

from fedstream.local import fork_server
from tests.chaos import seams

_PRELOADED = (
    "fedstream.cli.device",
    "fedstream.coordinator.gateway.service",
    "fedstream.device.process",
    "fedstream.settings.config",
    "fedstream.trainer.vector",
    "tests.chaos.task",
    "uvloop",
)


def main() -> None:
    """Until the other side of the socket is gone."""
    for name in _PRELOADED:
        importlib.import_module(name)

    def with_seams(*arguments: Any, **options: Any) -> Any:
        seams.install()
        return run_module(*arguments, **options)

    fork_server.run_module = with_seams  # type: ignore[attr-defined]
    fork_server.main()


if __name__ == "__main__":
    main()
