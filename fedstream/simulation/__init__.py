"""Simulation: a whole run in one process, in virtual time, without Redis.

    from pathlib import Path

    from fedstream.settings.config import read
    from fedstream.simulation import simulate

    result = simulate(read(Path("run.toml")))

:mod:`arrivals` plans the devices' tasks, :mod:`training` trains, and :mod:`engine` passes the
updates to the server's rule.
"""

from fedstream.simulation.arrivals import Arrival, RoundOver, plan
from fedstream.simulation.engine import SimulationResult, VersionMade, simulate

__all__ = ["Arrival", "RoundOver", "SimulationResult", "VersionMade", "plan", "simulate"]
