"""fedstream: asynchronous federated learning as a pipeline of services over Redis Streams."""

from importlib import import_module
from typing import TYPE_CHECKING

from fedstream.core import __version__

__all__ = [
    "Comparison",
    "ConfigError",
    "DataError",
    "FedstreamError",
    "Interrupted",
    "Mean",
    "Partition",
    "Policy",
    "RunFailed",
    "RunRecord",
    "Solver",
    "Task",
    "Traffic",
    "__version__",
    "by_classes",
    "by_dirichlet",
    "compare",
    "contiguous",
    "iid",
    "open",
    "run",
    "simulate",
]

if TYPE_CHECKING:
    from fedstream.api.live import run
    from fedstream.api.run_folder import Interrupted, RunFailed
    from fedstream.api.virtual import simulate
    from fedstream.coordinator.policies import Policy, Traffic
    from fedstream.core.errors import ConfigError, DataError, FedstreamError
    from fedstream.history.comparison import Comparison, compare
    from fedstream.history.record import RunRecord
    from fedstream.history.record import open_run as open  # noqa: A004  (only as fedstream.open)
    from fedstream.trainer.partitions import Partition, by_classes, by_dirichlet, contiguous, iid
    from fedstream.trainer.solvers import Solver
    from fedstream.trainer.task import Mean, Task
else:  # hidden from type checkers: with __getattr__, they would accept any name
    _FROM = {  # module, and the name there
        "Comparison": ("fedstream.history.comparison", "Comparison"),
        "ConfigError": ("fedstream.core.errors", "ConfigError"),
        "DataError": ("fedstream.core.errors", "DataError"),
        "FedstreamError": ("fedstream.core.errors", "FedstreamError"),
        "Interrupted": ("fedstream.api.run_folder", "Interrupted"),
        "Mean": ("fedstream.trainer.task", "Mean"),
        "Partition": ("fedstream.trainer.partitions", "Partition"),
        "Policy": ("fedstream.coordinator.policies", "Policy"),
        "RunFailed": ("fedstream.api.run_folder", "RunFailed"),
        "RunRecord": ("fedstream.history.record", "RunRecord"),
        "Solver": ("fedstream.trainer.solvers", "Solver"),
        "Task": ("fedstream.trainer.task", "Task"),
        "Traffic": ("fedstream.coordinator.policies", "Traffic"),
        "by_classes": ("fedstream.trainer.partitions", "by_classes"),
        "by_dirichlet": ("fedstream.trainer.partitions", "by_dirichlet"),
        "compare": ("fedstream.history.comparison", "compare"),
        "contiguous": ("fedstream.trainer.partitions", "contiguous"),
        "iid": ("fedstream.trainer.partitions", "iid"),
        "open": ("fedstream.history.record", "open_run"),
        "run": ("fedstream.api.live", "run"),
        "simulate": ("fedstream.api.virtual", "simulate"),
    }

    def __getattr__(name: str) -> object:
        """Import the names for users' tasks on first use, so that commands start without numpy."""
        if name not in _FROM:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _FROM[name]
        return getattr(import_module(module), attribute)
