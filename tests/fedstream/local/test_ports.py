"""A port that is held is ours: for a process that listens there, and for nobody else."""

from __future__ import annotations

import socket
import sys

import pytest

from fedstream.local.supervisor import HeldPort

_IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since 6.3: the ports that the kernel chooses from

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="held on Linux alone")


def only(port: int) -> socket.socket:
    """A socket for which the kernel has to choose this port, or fail."""
    choosing = socket.socket()
    try:
        choosing.setsockopt(
            socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, (port | port << 16).to_bytes(4, sys.byteorder)
        )
    except OSError:
        choosing.close()
        pytest.skip("this kernel lets nobody narrow the choice of ports")
    return choosing


def test_held_port_is_not_given_away_until_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with HeldPort() as held:
            with only(held.number) as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", 0))
            with only(held.number) as client, pytest.raises(OSError, match="Cannot assign"):
                client.connect(server.getsockname())
        with only(held.number) as client:
            client.connect(server.getsockname())
            assert client.getsockname()[1] == held.number


def test_our_process_can_listen_on_a_held_port_repeatedly() -> None:
    with HeldPort() as held:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", held.number)) as ours:
                socket.create_connection(ours.getsockname()).close()
                with pytest.raises(OSError, match="in use"):
                    HeldPort(("127.0.0.1", held.number))
