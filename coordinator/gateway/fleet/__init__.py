"""Flower's supernodes as devices: the routes ``/v1/fleet/*``, which Flower calls its Fleet API.

An unchanged ``flower-supernode`` takes the gateway for a SuperLink. It gets the tasks of its
device as train messages, and what it replies goes the way of any device's update. Off unless
``gateway.flower_app`` is set; only then is anything here imported.
"""
