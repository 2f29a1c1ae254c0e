"""fedstream: asynchronous federated learning as a pipeline of services over Redis Streams."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["Task", "__version__", "by_classes", "by_dirichlet", "contiguous", "iid"]

if TYPE_CHECKING:
    from fedstream.trainer.partitions import by_classes, by_dirichlet, contiguous, iid
    from fedstream.trainer.task import Task
else:  # hidden from type checkers: with __getattr__, they would accept any name
    _FROM = {
        "Task": "fedstream.trainer.task",
        "by_classes": "fedstream.trainer.partitions",
        "by_dirichlet": "fedstream.trainer.partitions",
        "contiguous": "fedstream.trainer.partitions",
        "iid": "fedstream.trainer.partitions",
    }

    def __getattr__(name: str) -> object:
        """Import the names for users' tasks on first use, so that commands start without numpy."""
        if name not in _FROM:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_FROM[name]), name)
