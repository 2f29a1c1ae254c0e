"""Discovery of the node to talk to: the master named by sentinels, or the node of a cluster slot.

Does no I/O: the caller passes in the function that asks a node. A run lives in one slot, so in a
cluster a single node serves the whole run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fedstream.broker.settings import SentinelSettings, address
from fedstream.core.errors import BrokerError, Unavailable

Address = tuple[str, int]
Ask = Callable[[Address, tuple[str, ...]], Awaitable[Any]]


class Discovery(ABC):
    """Nodes that know the current address, asked in turn; the node that knew last comes first."""

    def __init__(self, nodes: Sequence[Address]) -> None:
        self.nodes = list(nodes)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.nodes)

    async def find(self, ask: Ask) -> Address:
        """Find the current node.

        Raises Unavailable if no node knows; if all refuse, the first refusal (a BrokerError).
        """
        refusals: list[BrokerError] = []
        said = "no answer"
        for node in tuple(self.nodes):
            # Move the node to the end unless it knows: the other nodes must be asked even if this
            # attempt is cut short.
            self._put(node, last=True)
            try:
                found = self._read(node, await ask(node, self._question))
            except BrokerError as error:
                said = str(error)
                if not error.retriable:
                    refusals.append(error)
                continue
            if found is not None:
                self._put(node, last=False)
                return found
            said = f"{node[0]}:{node[1]} knows no master"
        if len(refusals) == len(self.nodes):
            raise refusals[0]
        raise Unavailable(f"{self._wanted} is unknown to {self}: {said}")

    def _put(self, node: Address, *, last: bool) -> None:
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes.insert(len(self.nodes) if last else 0, node)

    @property
    @abstractmethod
    def _question(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def _wanted(self) -> str: ...

    @abstractmethod
    def _read(self, asked: Address, reply: Any) -> Address | None: ...


class Sentinels(Discovery):
    """Sentinels, which name the master and, after a fail-over, its successor."""

    def __init__(self, settings: SentinelSettings) -> None:
        super().__init__([address(node) for node in settings.nodes])
        self._master = settings.master

    @property
    def _question(self) -> tuple[str, ...]:
        return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)

    @property
    def _wanted(self) -> str:
        return f"the master {self._master!r} (redis.sentinel.master)"

    def _read(self, asked: Address, reply: Any) -> Address | None:
        return (reply[0].decode(), int(reply[1])) if reply else None


class Cluster(Discovery):
    """A cluster. Each of its nodes knows the node of every slot, and names further nodes to ask."""

    def __init__(self, node: Address) -> None:
        super().__init__([node])
        self._named = node
        self.slot: int | None = None  # None: any node will do

    @property
    def _question(self) -> tuple[str, ...]:
        return ("CLUSTER", "SLOTS")

    @property
    def _wanted(self) -> str:
        return f"the node of slot {self.slot}"

    def _read(self, asked: Address, reply: Any) -> Address | None:
        """Read rows of the form: first slot, last slot, master, replicas."""
        found = None
        there = [self._named]
        for first, last, *nodes in reply:
            # A node without a name is the one that was asked.
            places = [(n[0].decode() if n[0] else asked[0], int(n[1])) for n in nodes]
            there += places
            if self.slot is None or first <= self.slot <= last:
                found = found or places[0]
        if found is not None:
            self.nodes = list(dict.fromkeys(there))  # drops nodes that are gone
        return found
