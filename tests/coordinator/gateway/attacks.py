"""Malformed and misleading requests that a gateway must refuse."""

from __future__ import annotations

from tests.coordinator.gateway.raw import request

HIDDEN = b"GET /v1/openapi.json HTTP/1.1\r\nHost: gateway\r\n\r\n"


def body(*headers: str, said: bytes) -> bytes:
    """A check-in with headers that say where its body ends, and a request hidden behind it."""
    return request("POST", "/v1/check-in", *headers) + said + HIDDEN


CHUNKED = "Transfer-Encoding: chunked"
# A proxy and the gateway could disagree about where these end: what is behind would be a request
# that the proxy has not seen.
SMUGGLED = {
    "length, then chunks": body("Content-Length: 4", CHUNKED, said=b"0\r\n\r\n"),
    "chunks, then length": body(CHUNKED, "Content-Length: 4", said=b"0\r\n\r\n"),
    "two lengths": body("Content-Length: 2", "Content-Length: 50", said=b"{}"),
    "a length twice": body("Content-Length: 2", "Content-Length: 2", said=b"{}"),
    "a list of lengths": body("Content-Length: 2, 2", said=b"{}"),
    "a length with a sign": body("Content-Length: +2", said=b"{}"),
    "a negative length": body("Content-Length: -2", said=b"{}"),
    "a length in hexadecimal": body("Content-Length: 0x2", said=b"{}"),
    "a length beyond all integers": body("Content-Length: " + "9" * 30, said=b"{}"),
    "a space before the colon": body("Content-Length : 2", said=b"{}"),
    "a header that goes on in the next line": body("X: a\r\n b", said=b""),
    "a coding in the next line": body("Transfer-Encoding:\r\n chunked", said=b"0\r\n\r\n"),
    "an unknown coding": body("Transfer-Encoding: xchunked", said=b"0\r\n\r\n"),
    "chunks and another coding": body(f"{CHUNKED}, identity", said=b"0\r\n\r\n"),
    "chunks twice": body(CHUNKED, CHUNKED, said=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": body(CHUNKED, said=b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "HTTP/1.0": HIDDEN.replace(b"HTTP/1.1", b"HTTP/1.0") + HIDDEN,
    "a chunk's size with a prefix": body(CHUNKED, said=b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a chunk beyond all integers": body(CHUNKED, said=b"F" * 17 + b"\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than its size": body(CHUNKED, said=b"2\r\n{}XX0\r\n\r\n"),
    "chunks that end in bare line feeds": body(CHUNKED, said=b"2\n{}\n0\n\n"),
    "a line feed in a chunk's extension": body(CHUNKED, said=b"2;\n\r\n{}\r\n0\r\n\r\n"),
    "a length in the trailer": body(CHUNKED, said=b"2\r\n{}\r\n0\r\nContent-Length: 9\r\n\r\n"),
    "bare line feeds": HIDDEN.replace(b"\r\n", b"\n"),
    "a bare line feed": b"GET / HTTP/1.1\r\nHost: gateway\nX: y\r\n\r\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: gateway\rX: y\r\n\r\n",
    "a NUL in a header": body("X: a\0b", said=b""),
    "a NUL in a header's name": body("X\0: a", said=b""),
    "two hosts": body("Host: elsewhere", said=b""),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space before the method": b" " + HIDDEN,
    "a NUL in the path": b"GET /v1/models/\0 HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "bytes above 127 in the path": b"GET /v1/models/\xff HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "a host that is none": b"GET http://[::1/ HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "a port that is none": b"GET http://x:99999999/ HTTP/1.1\r\nHost: gateway\r\n\r\n",
}

SMUGGLED |= {
    f"{what}, kept alive": attack.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
    for what, attack in SMUGGLED.items()
}

ZEROS = "0" * 64
# Target -> status and reason.
TRICKS = {
    "/v1%2Fopenapi.json": (404, "no such route"),
    "/v1/models/../openapi.json": (404, "no such route"),
    "/v1/models/%2e%2e/openapi.json": (404, "no such route"),
    "/v1/models/..%2f..%2fetc%2fpasswd": (404, "superseded"),
    "/v1/models/%00": (404, "superseded"),
    "/v1/models/%zz%ff": (404, "superseded"),
    f"/v1/models/{ZEROS}%0d%0aX-Evil:%20yes": (404, "superseded"),
    f"/v1/models/{ZEROS}/": (404, "no such route"),
    "/v1/models/" + "9" * 8000: (404, "superseded"),
    "//v1//openapi.json": (404, "no such route"),
    "//elsewhere/v1/openapi.json": (404, "no such route"),
    "//[::1/": (404, "no such route"),
    "/v1/tasks/%2e%2e/heartbeat": (405, "method"),
    "*": (400, "malformed"),
    "/v1/models/" + "9" * 9000: (400, "malformed"),
}
