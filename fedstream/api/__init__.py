"""fedstream from Python: live runs and simulations, started from a script or a notebook.

Everything here is imported lazily by :mod:`fedstream`, under the names that users know.
"""
