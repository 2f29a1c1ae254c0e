"""fedstream: asynchronous federated learning as a pipeline of services over Redis Streams."""

from trainer.partitions import by_classes, iid
from trainer.task import Task

__version__ = "0.1.0"
__all__ = ["Task", "__version__", "by_classes", "iid"]
