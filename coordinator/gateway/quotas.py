"""How many requests a second a device and an address may make."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.runtime.limits import Buckets

_REMEMBERED = 100_000  # of each kind


class Quota:
    """So many requests a second for each device, or for each address; twice as many at once."""

    def __init__(
        self, what: str, per_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: monotonic seconds."""
        self._what = what
        self._buckets = Buckets(per_s, at_once=max(2.0, 2 * per_s), remembered=_REMEMBERED)
        self._clock = clock

    def take(self, who: Hashable) -> None:
        """Charge one request. Raises Refusal if there were too many."""
        now = self._clock()
        if self._buckets.wait_s(who, now):
            raise Refusal(
                429,
                "too many requests",
                f"too many requests of this {self._what}: slow down",
                retry_after_s=1.0,
            )
        self._buckets.charge(who, now)


class Quotas:
    """What a request is charged to: its address first, then its device, once that is known."""

    def __init__(self, device_rate: float, address_rate: float) -> None:
        """Both in requests per second."""
        self._device = Quota("device", device_rate)
        self._address = Quota("address", address_rate)

    def take_address(self, network: str) -> None:
        """Charge a request to where it comes from. Raises Refusal if there were too many."""
        self._address.take(network)

    def take_device(self, device: int) -> None:
        """Charge it to its device, too. Raises Refusal likewise."""
        self._device.take(device)
