"""Devices outside the cluster: `fedstream device`, each a process with a key and no Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from fedstream.broker.digest import digest_of
from fedstream.broker.errors import BrokerError
from fedstream.broker.keys import GATEWAY
from tests.chaos.services import Child, Zygote
from tests.support import EveryRole, wait_until

_AGAIN_S = 0.2  # before a device that was killed begins again
_ENDS_S = 90.0  # after the run, on a machine as busy as it is


class Phones:
    """Processes by device; each is started again when it was killed, and ends with the run."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        ledger: EveryRole,
        settings: Mapping[str, str],
        *,
        devices: tuple[int, ...],
        url: str,
    ) -> None:
        self._zygote = zygote
        self._folder = folder
        self._ledger = ledger
        self._devices = devices
        self._url = url
        ours = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
        self._env = ours | dict(settings) | {"OMP_NUM_THREADS": "1"}
        self._children: dict[int, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self.findings: list[str] = []
        self.killed = 0

    async def start(self, stuck_s: float) -> None:
        """Invite all devices, once there is a run, and start them."""
        invites = {device: f"{device}-{'i' * 32}" for device in self._devices}

        async def are_invited() -> bool:
            try:
                verdict, _ = await self._ledger.invite(
                    GATEWAY,
                    {device: digest_of(said.encode()) for device, said in invites.items()},
                    seconds=3600,
                )
            except BrokerError:
                return False
            return verdict == "invited"

        await wait_until(are_invited, timeout=stuck_s, what="devices are invited")
        for device, invite in invites.items():
            keeper = asyncio.create_task(self._keep(device, invite), name=f"device-{device}")
            self._keepers.append(keeper)

    def crash(self, share: float) -> None:
        """Kill one of those that are at work."""
        alive = [child for child in self._children.values() if not child.ended]
        if alive:
            alive[int(share * len(alive))].signal(signal.SIGKILL)
            self.killed += 1

    async def over(self) -> None:
        """Wait until all have heard that the run is over; who has not is a finding."""
        if not self._keepers:
            return
        _, late = await asyncio.wait(self._keepers, timeout=_ENDS_S)
        for keeper in late:
            self.findings.append(f"{keeper.get_name()} did not hear that the run is over")

    async def stop(self) -> None:
        """End those that are still there."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for child in self._children.values():
            child.signal(signal.SIGKILL)
            await child.wait()

    async def _keep(self, device: int, invite: str) -> None:
        begun = 0
        while True:
            begun += 1
            log = self._folder / f"device-{device}.{begun}.log"
            key = self._folder / f"device-{device}.pem"
            argv = [
                "device", "--url", self._url, "--task", "tests.chaos.task:task",
                "--invite", invite, "--key", str(key),
            ]  # fmt: skip
            child = self._children[device] = await self._zygote.fork(argv, self._env, log)
            code = await child.wait()
            if code == 0:
                return
            if not child.killed:
                self.findings.append(f"device {device} exited with {code}:\n{child.last_words}")
            await asyncio.sleep(_AGAIN_S)
