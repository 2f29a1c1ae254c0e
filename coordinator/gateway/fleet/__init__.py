"""Flower's supernodes as devices: the routes ``/v1/fleet/*``, which Flower calls its Fleet API.

An unchanged ``flower-supernode`` takes the gateway for a SuperLink. The supernode gets its device's
tasks as train messages, and the gateway handles its replies like any device's update. The routes
exist only with ``gateway.flower_app``; otherwise nothing here is imported.
"""
