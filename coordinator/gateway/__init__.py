"""The gateway: devices outside the cluster, over HTTPS.

To Redis a gateway is the trainer of a site of its own, which owns the devices present at it.
:mod:`fedstream.coordinator.gateway.device_sessions` keeps the present devices and their tasks,
:mod:`fedstream.coordinator.gateway.app` answers requests, and
:mod:`fedstream.coordinator.gateway.service` is the process.
"""
