"""Devices outside the cluster: `fedstream device`, each a process with a key and no Redis.

An operator invites them, and again those whom Redis has forgotten, which are then started anew: a
device that was known waits for minutes until the gateway may know it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from fedstream.broker.keys import GATEWAY
from fedstream.core.digest import digest_of
from fedstream.core.errors import BrokerError
from tests.chaos.services import Child, Zygote
from tests.chaos.watcher import Lives
from tests.support import EveryRole, wait_until

_AGAIN_S = 0.2  # before a device that was killed begins again
_ENDS_S = 90.0  # after the run, on a machine as busy as it is
# What a device says last that Redis has forgotten: its invite, or that it enrolled.
_FORGOTTEN = ("no such invite", "unknown device")


class Phones:
    """Processes by device; each is started again when it was killed, and ends with the run."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        ledger: EveryRole,
        server: Lives,
        settings: Mapping[str, str],
        *,
        devices: tuple[int, ...],
        url: str,
    ) -> None:
        self._zygote = zygote
        self._folder = folder
        self._ledger = ledger
        self._server = server
        self._invites = {device: f"{device}-{'i' * 32}" for device in devices}
        self._known_in = 0  # the last life of Redis in which the operator saw to it
        self._too_late: set[int] = set()  # forgotten, and the run is over: nobody is invited to it
        self._operator: asyncio.Task[None] | None = None
        self._url = url
        ours = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
        self._env = ours | dict(settings) | {"OMP_NUM_THREADS": "1"}
        self._children: dict[int, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self.findings: list[str] = []
        self.killed = 0
        self.forgotten = 0  # times that Redis did not know one any more

    async def start(self, stuck_s: float) -> None:
        """Invite all devices, once there is a run, and start them; until all have enrolled."""
        await wait_until(self._invite, timeout=stuck_s, what="devices are invited")
        self._operator = asyncio.create_task(self._operate(), name="operator")
        for device, invite in self._invites.items():
            keeper = asyncio.create_task(self._keep(device, invite), name=f"device-{device}")
            self._keepers.append(keeper)
        await wait_until(self._have_all_enrolled, timeout=stuck_s, what="all devices have enrolled")

    async def _have_all_enrolled(self) -> bool:
        enrolled, _, _ = await self._ledger.access(GATEWAY)
        return self._invites.keys() <= enrolled.keys()

    async def _invite(self) -> bool:
        """Invite those that Redis does not know, and have them start anew; whether that worked."""
        life = self._server.life
        try:
            enrolled, _, _ = await self._ledger.access(GATEWAY)
            unknown = {
                device: digest_of(invite.encode())
                for device, invite in self._invites.items()
                if device not in enrolled
            }
            verdict, _ = await self._ledger.invite(GATEWAY, unknown, seconds=3600)
        except BrokerError:
            return False
        if verdict not in ("invited", "finished"):  # there is no run yet
            return False
        if verdict == "finished":
            self._too_late |= unknown.keys()
        self._known_in = life
        for device in unknown.keys() & self._children.keys():
            self._children[device].signal(signal.SIGKILL)
            self.forgotten += 1
        return True

    async def _operate(self) -> None:
        """Whenever Redis has come back, see who has to be invited again."""
        while True:
            await self._server.up.wait()
            if self._server.life != self._known_in:
                await self._invite()
            await asyncio.sleep(_AGAIN_S)

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
        working = [*self._keepers, *([self._operator] if self._operator else [])]
        for one in working:
            one.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for child in self._children.values():
            child.signal(signal.SIGKILL)
            await child.wait()

    async def _keep(self, device: int, invite: str) -> None:
        begun = 0
        while True:
            begun, known_in = begun + 1, self._known_in
            log = self._folder / f"device-{device}.{begun}.log"
            key = self._folder / f"device-{device}.pem"
            argv = [
                "device",
                "--url",
                self._url,
                "--task",
                "tests.chaos.task:task",
                "--invite",
                invite,
                "--key",
                str(key),
            ]
            child = self._children[device] = await self._zygote.fork(argv, self._env, log)
            code = await child.wait()
            if code == 0 or device in self._too_late:
                return
            await self._server.up.wait()  # which says in what life it is
            was_forgotten = self._server.life != known_in and any(
                said in child.last_words for said in _FORGOTTEN
            )
            if not child.killed and not was_forgotten:
                self.findings.append(f"device {device} exited with {code}:\n{child.last_words}")
            await asyncio.sleep(_AGAIN_S)
