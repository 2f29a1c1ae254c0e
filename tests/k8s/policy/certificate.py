"""The names in Redis's certificate, against those that the pods of a rendering connect to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from fedstream.broker.settings import address
from fedstream.doctor.certificates import in_words, is_idle_star
from fedstream.settings.services import ROLES
from tests.k8s.cluster.manifests import Manifests
from tests.k8s.policy.settings import read
from tests.k8s.policy.workloads import workloads


def redis_hosts(manifests: Manifests) -> list[str]:
    """The hosts at which services reach Redis and the Sentinels over TLS. Raises ConfigError."""
    found: dict[str, None] = {}
    for workload in workloads(manifests):
        for container in workload.containers:
            if container.get("args", [""])[0] not in ROLES:
                continue
            redis = read(manifests, workload, container).redis
            url = urlsplit(redis.url)
            hosts = [url.hostname or ""]
            if redis.sentinel is not None:
                servers = manifests.get("StatefulSet", "redis")["spec"]
                pods = [f"redis-{n}.{servers['serviceName']}" for n in range(servers["replicas"])]
                hosts = [*(address(node)[0] for node in redis.sentinel.nodes), *pods]
            if url.scheme == "rediss":
                found |= dict.fromkeys(hosts)
    return list(found)


def missing(manifests: Manifests, names: Sequence[str]) -> Iterator[str]:
    """What a certificate with these names lacks. Raises ConfigError."""
    for host in redis_hosts(manifests):
        if not any(covers(name, host) for name in names):
            yield (
                f"is not for {host}, to which services connect (it {in_words(names)}): issue it "
                f"again with {host} too, and make the Secret fedstream-redis-tls anew"
            )


def covers(name: str, host: str) -> bool:
    """Whether a certificate's name is for ``host``, as OpenSSL compares: a star is one label."""
    name, host = name.lower(), host.lower()
    if name.startswith("*.") and not is_idle_star(name):
        return name[1:] == host[host.find(".") :]
    return name == host
