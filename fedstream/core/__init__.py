"""The vocabulary of all services: layout, digests, messages, records, errors, wire formats.

Nothing here does I/O.
"""

__version__ = "0.2.0"
