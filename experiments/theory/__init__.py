"""Theory against measurement: the papers' theorems on quadratics, with the bound drawn in.

``python -m experiments.theory [name ...]`` measures, draws and writes README.md. The server's rules
are the classes of ``fedstream.strategies``; only the devices are simulated.
"""
