"""A port reserved for a child process until it has started and while it restarts."""

from __future__ import annotations

import socket
import sys
from typing import Any, Self

_ANSWER_S = 0.1  # this machine takes or refuses a connection at once


class HeldPort:
    """Port reserved until closed; a context manager closes it.

    A socket is bound to the port but never listens. A process that sets SO_REUSEADDR (asyncio and
    Redis do) can still listen there, while the kernel assigns the port to no connection and no
    socket that asks for any free one. This works on Linux only. Elsewhere the two sockets exclude
    each other, so the port is released at once and another process may take it.
    """

    def __init__(
        self,
        address: Any = ("127.0.0.1", 0),
        family: socket.AddressFamily = socket.AF_INET,
    ) -> None:
        """Reserve a port; 0 means any free one.

        Raises OSError if another process listens there or this user may not.
        """
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
        """Release the port."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def is_answering(host: str, port: int) -> bool:
    """Whether a process takes connections there by now. ``host``: where it listens."""
    try:
        socket.create_connection((host, port), _ANSWER_S).close()
    except OSError:
        return False
    return True
