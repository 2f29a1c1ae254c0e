"""The Secret that component redis-tls wants, for a cluster of this machine."""

from __future__ import annotations

from pathlib import Path

from tests.broker.certificates import authority, signed
from tests.k8s.cluster import Cluster, Manifest


def redis_tls(folder: Path, cluster: Cluster) -> tuple[Manifest, Path]:
    """A certificate for whatever address Redis or a Sentinel may have, and its authority's."""
    authority(folder, "ca")
    signed(folder, "redis", "ca", *cluster.addresses)
    files = {"tls.crt": "redis.crt", "tls.key": "redis.key", "ca.crt": "ca.crt"}
    secret: Manifest = {
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "fedstream-redis-tls", "namespace": "fedstream"},
        "stringData": {key: (folder / name).read_text() for key, name in files.items()},
    }  # fmt: skip
    return secret, folder / "ca.crt"
