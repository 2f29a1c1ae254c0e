"""Simulation: a whole run in one process, in virtual time, without Redis.

    from fedstream.simulation import simulate

    outcome = simulate(read(Path("run.toml")))

:mod:`arrivals` plans who trains when and from which version, :mod:`training` trains, and
:mod:`engine` passes the updates to the server's rule.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["Arrival", "RoundOver", "SimulationResult", "VersionMade", "plan", "simulate"]

if TYPE_CHECKING:
    from fedstream.simulation.arrivals import Arrival, RoundOver, plan
    from fedstream.simulation.engine import SimulationResult, VersionMade, simulate
else:  # lazy: every service imports this package for its settings and must start fast
    _FROM = {"Arrival": "arrivals", "RoundOver": "arrivals", "plan": "arrivals"}

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_FROM.get(name, 'engine')}"), name)
