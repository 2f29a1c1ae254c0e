"""The protocol between a gateway and its devices over HTTPS, version 1.

Bodies are JSON (:mod:`fedstream.protocol.messages`), some headers have a syntax of their own
(:mod:`fedstream.protocol.headers`), and a device that enrols or asks for a token signs its request
(:mod:`fedstream.protocol.signatures`). Pure: no sockets, no clock, no Redis.
"""
