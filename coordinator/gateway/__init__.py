"""The gateway: devices outside the cluster, over HTTPS.

To Redis it is a trainer of a site of its own, which owns the devices that are present at it; to a
device it is the run. :mod:`fedstream.coordinator.gateway.desk` knows who is present and whose task
is whose, :mod:`fedstream.coordinator.gateway.app` answers requests, and
:mod:`fedstream.coordinator.gateway.service` is the process.
"""
