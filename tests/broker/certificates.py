"""Certificates for servers that a test starts, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import trustme

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: str, cwd: Path) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


def authority(folder: Path, name: str, *, days: int = 2) -> None:
    """NAME.crt and NAME.key, signed by itself. Python 3.13 asks what an authority's key is for."""
    openssl(
        "req",
        "-x509",
        *_KEY,
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.crt",
        "-subj",
        f"/CN={name}",
        "-days",
        str(days),
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
        cwd=folder,
    )


def signed(folder: Path, name: str, by: str, *addresses: str, days: int = 2) -> None:
    """NAME.crt and NAME.key for IP addresses."""
    openssl(
        "req",
        *_KEY,
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
        "-subj",
        f"/CN={name}",
        cwd=folder,
    )
    names = ",".join(f"IP:{address}" for address in addresses)
    (folder / f"{name}.ext").write_text(
        f"subjectAltName={names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    openssl(
        "x509",
        "-req",
        "-in",
        f"{name}.csr",
        "-CA",
        f"{by}.crt",
        "-CAkey",
        f"{by}.key",
        "-CAcreateserial",
        "-out",
        f"{name}.crt",
        "-days",
        str(days),
        "-extfile",
        f"{name}.ext",
        cwd=folder,
    )


def is_accepted(name: str, host: str) -> bool:
    """Whether OpenSSL, as Python uses it, accepts a certificate with this name for ``host``."""
    authority = trustme.CA()
    ours, theirs = ssl.create_default_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.configure_trust(ours)
    authority.issue_cert(name).configure_cert(theirs)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(back, there, server_hostname=host)
    server = theirs.wrap_bio(there, back, server_side=True)
    try:
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError:
        return False
    return True
