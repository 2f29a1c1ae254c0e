"""fedstream: asynchronous federated learning as a pipeline of services over Redis Streams."""

__version__ = "0.1.0"
