"""The device's side of the protocol over HTTPS: its key, its gateway, its training.

A device checks in at a gateway, downloads the offered model, trains it exactly as a trainer would,
and uploads the update. Its state is in a folder, so a crash loses no finished work, and the error
feedback of one update goes into the next.

Nothing here uses Redis. Code never travels: a device runs its installed task.
"""
