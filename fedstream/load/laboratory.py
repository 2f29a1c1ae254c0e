"""Starts the laboratory's devices, waits, ends them, and reports."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

from fedstream.broker.errors import ConfigError
from fedstream.load.habits import Habits
from fedstream.load.line import DeviceLine, LoadedGateway
from fedstream.load.load_device import LoadDevice
from fedstream.load.stand_ins import StandIns
from fedstream.load.tally import LoadTally
from fedstream.runtime.files import allow_files
from fedstream.runtime.garbage import short_pauses

if TYPE_CHECKING:
    from fedstream.device.address import GatewayAddress

_SPARE = 256  # open files beside the devices' connections
_LAG_S = 0.1  # between two looks at the laboratory's own lateness
_END_S = 10.0  # for giving up the tasks in hand


@dataclass(frozen=True)
class LoadOptions:
    """What to load a gateway with."""

    address: GatewayAddress
    invites: Mapping[int, str]  # by device: each of them takes part
    seconds: float  # counted
    warm_up_s: float = 0.0  # before that, not counted
    arrivals: float = 100.0  # devices per second that arrive at first
    wait_s: float = 50.0  # of a check-in
    models: bool = True  # download each model that a device doesn't have
    changes: bool = True  # or only what changed in it since the one that the device has
    habits: Habits = field(default_factory=Habits)
    seed: int = 0
    elsewhere: bool = False  # the gateway may be on another machine


@dataclass(frozen=True)
class LoadReport:
    """What devices did and heard."""

    devices: int
    seconds: float
    tally: LoadTally
    processor_s: float  # that the laboratory itself took
    memory: int  # bytes, the most that it had


async def load(options: LoadOptions, stop: asyncio.Event) -> LoadReport:
    """Load a gateway for as long as the options say, or until ``stop``. Raises ConfigError."""
    check(options)
    with short_pauses():
        return await _loaded(options, stop)


async def _loaded(options: LoadOptions, stop: asyncio.Event) -> LoadReport:
    tally = LoadTally()
    used = time.process_time()
    lives = [asyncio.create_task(life) for life in _lives(options, tally)]
    lag = asyncio.create_task(_watch(tally))
    ending = asyncio.create_task(_first(lives, stop))
    began = time.monotonic()
    if not await _done_within(ending, options.warm_up_s):
        tally.begin_anew()
        began = time.monotonic()
        await _done_within(ending, options.seconds)
    seconds = time.monotonic() - began
    every = {*lives, lag, ending}
    for one in every:
        one.cancel()
    done, late = await asyncio.wait(every, timeout=_END_S)
    tally.events["devices that did not end in time"] += len(late)
    for one in done:
        if not one.cancelled() and (error := one.exception()) is not None:
            raise error
    return LoadReport(len(lives), seconds, tally, time.process_time() - used, _most_memory())


def _lives(options: LoadOptions, tally: LoadTally) -> Iterator[Coroutine[None, None, None]]:
    """The devices' lives, in the order of their arrival."""
    stand_ins = StandIns()
    gateway = LoadedGateway(options.address.base, options.address.tls())
    rng = random.Random(options.seed)
    for place, (number, invite) in enumerate(sorted(options.invites.items())):
        traits = options.habits.device(options.seed, number)
        device = LoadDevice(
            number, invite, DeviceLine(gateway, tally, traits.bytes_per_s), options.habits,
            tally, stand_ins, rng, seed=options.seed, skew_s=traits.skew_s, wait_s=options.wait_s,
            models=options.models, changes=options.changes,
        )  # fmt: skip
        yield device.live(place / options.arrivals)


async def _first(lives: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait until all lives have ended, one has failed, or ``stop``."""
    failed = asyncio.create_task(_wait(lives))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({failed, stopped}, return_when="FIRST_COMPLETED")
    finally:
        failed.cancel()
        stopped.cancel()


async def _wait(lives: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(lives, return_when="FIRST_EXCEPTION")


async def _done_within(ending: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait({ending}, timeout=seconds)
    return bool(done)


def check(options: LoadOptions) -> None:
    """Raise ConfigError if this load is not wanted, or can't be made."""
    host = options.address.base.host or ""
    if not options.elsewhere and not _is_here(host):
        raise ConfigError(
            f"--url {options.address.url}: on another machine a load may be an attack; if it is "
            "yours to load, say --yes-elsewhere"
        )
    if not options.invites:
        raise ConfigError("no device has an invite")
    if not (options.seconds > 0 and options.arrivals > 0 and options.warm_up_s >= 0):
        raise ConfigError("--seconds and --arrivals must be above 0, and --warm-up not below")
    _allow_files(len(options.invites))


def _allow_files(devices: int) -> None:
    """Raise the limit of open files, as far as it may be. Raises ConfigError if that won't do."""
    most = allow_files(devices + _SPARE)
    if most is not None and most < devices + _SPARE:
        raise ConfigError(
            f"{devices} devices need as many connections, and this process may have {most} "
            "open files: raise that (ulimit -Hn), or name fewer devices"
        )


async def _watch(tally: LoadTally) -> None:
    """Note by how much the event loop is late: what devices see as latency may be that."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_LAG_S)
        tally.lag.add(max(0.0, time.monotonic() - began - _LAG_S))


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _most_memory() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
