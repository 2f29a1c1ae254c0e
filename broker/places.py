"""Which node to talk to, where that changes: the master that sentinels name, or a cluster's node.

Pure but for the question, which whoever asks brings along. A run lives in one slot, so in a cluster
there is one node for all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fedstream.broker.errors import BrokerError, Unavailable
from fedstream.broker.settings import SentinelSettings, address

Address = tuple[str, int]
Ask = Callable[[Address, tuple[str, ...]], Awaitable[Any]]


class Guide(ABC):
    """Nodes that know where to go, asked in turn; the one that knew is asked first next time."""

    def __init__(self, nodes: Sequence[Address]) -> None:
        self.nodes = list(nodes)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.nodes)

    async def find(self, ask: Ask) -> Address:
        """Where to go now. Raises Unavailable; another BrokerError if each of the nodes refuses."""
        refusals: list[BrokerError] = []
        said = "no answer"
        for node in tuple(self.nodes):
            # Last the next time, unless it knows: those behind it must have their turn, whatever
            # becomes of this attempt.
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
            said = f"{node[0]}:{node[1]} knows none"
        if len(refusals) == len(self.nodes):
            raise refusals[0]
        raise Unavailable(f"{self._wanted} is not known to {self}: {said}")

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


class Sentinels(Guide):
    """They name the master, and another one after a fail-over."""

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


class Cluster(Guide):
    """Any node knows which one has a slot; those that it names can be asked as well."""

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
        """A row is: first slot, last slot, the master, its replicas."""
        found = None
        there = [self._named]
        for first, last, *nodes in reply:
            # A node that doesn't know its own name is the one that was asked.
            places = [(n[0].decode() if n[0] else asked[0], int(n[1])) for n in nodes]
            there += places
            if self.slot is None or first <= self.slot <= last:
                found = found or places[0]
        if found is not None:
            self.nodes = list(dict.fromkeys(there))  # and not those that are gone
        return found
