"""Ends services' waits in the run's own Redis, so that they stop at once.

A service waits there for up to a second at a time, and a wait must not be cancelled: Redis may have
answered already. Ended by Redis itself, it comes to nothing, as if its second were over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fedstream.broker.client import Client


async def end_waits(client: Client, names: Collection[str]) -> None:
    """End every wait of the clients of these names. Raises FedstreamError.

    Needs the rights to CLIENT LIST and CLIENT UNBLOCK.
    """
    listing = await client.call("CLIENT", "LIST", "TYPE", "NORMAL")
    if waiting := list(_waiting(listing.decode(errors="replace"), names)):
        await client.pipeline([("CLIENT", "UNBLOCK", number) for number in waiting])


def _waiting(listing: str, names: Collection[str]) -> Iterator[str]:
    """Ids of the clients that are blocked, from the reply to CLIENT LIST."""
    for line in listing.splitlines():
        about = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if about.get("name") in names and "b" in about.get("flags", ""):
            yield about["id"]
