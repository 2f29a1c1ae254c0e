"""The load laboratory: many devices in one process that keep the protocol, and train nothing.

They enrol, check in, download, upload and misbehave at a real gateway, and all that they hear is
counted. :mod:`fedstream.load.habits` says how they behave, :mod:`fedstream.load.load_device` is one
of them, :mod:`fedstream.load.laboratory` starts and ends them, and :mod:`fedstream.load.tally`
counts.
"""
