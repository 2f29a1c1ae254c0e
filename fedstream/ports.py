"""A port that is kept for a process of ours: until it has started, and while it restarts."""

from __future__ import annotations

import socket
import sys
from typing import Any, Self


class HeldPort:
    """A port that nobody else is given until it is closed; a context manager that closes it.

    A socket is bound to it and never listens. A process of ours can listen there all the same, as
    one that sets SO_REUSEADDR may (asyncio and Redis do), while the kernel gives the port to no
    connection and no socket that asks for any. Elsewhere than on Linux the two exclude each other,
    so that there it was only free a moment ago.
    """

    def __init__(
        self,
        address: Any = ("127.0.0.1", 0),
        family: socket.AddressFamily = socket.AF_INET,
    ) -> None:
        """Port 0: any that is free. Raises OSError if somebody listens there, or nobody may."""
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Others may have it again."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
