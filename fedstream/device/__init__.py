"""The device's side of the protocol over HTTPS: its key, its gateway, its training.

A device checks in at a gateway, downloads the model that it is offered, trains it exactly as a
trainer would, and uploads the update. All that it has to remember is in a folder of its own: a
crash costs no finished work, and what a wire format lost of one update goes into the next.

Nothing here knows Redis. Model and task code never travel: a device runs what it was installed
with.
"""
