"""Checks of the manifests in k8s/ without a cluster: ``make k8s-check``.

Each check is a function of rendered objects that yields a line for each fault. In
``test_manifests.py`` manifests are broken, and each check reports it.
"""
