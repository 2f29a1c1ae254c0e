"""``python -m tests.k8s.policy``: all checks of k8s/, with what was found and how much there was.

With ``--certificate FILE [OVERLAY]`` only whether Redis's certificate names all that the pods of an
overlay connect to.

Exit codes: 0 all is well, 1 something is not, 2 kubectl or checkov is missing. Without kubectl it
says so and leaves with 0, unless the environment says FEDSTREAM_CI=1: there nothing is skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fedstream.broker.settings import address
from fedstream.coordinator.gateway.certificate import certificate_in
from fedstream.core.errors import ConfigError
from fedstream.doctor.certificates import in_words, is_idle_star
from fedstream.settings.services import ROLES
from tests.k8s.manifests import (
    ADDITIONS,
    K8S,
    Manifests,
    combinations,
    components,
    kubectl,
    overlays,
    rendered,
    renderings,
)
from tests.k8s.policy.checks import CHECKS, durable, findings
from tests.k8s.policy.linters import PROGRAM, VERSIONS, checkov, exceptions
from tests.k8s.policy.settings import read
from tests.k8s.workloads import workloads


def main() -> int:
    """Renders, checks, prints. The exit code."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="k8s-check")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    default = K8S / "overlays" / "production-aof"
    parser.add_argument("overlay", type=Path, nargs="?", default=default)
    given = parser.parse_args()
    if kubectl() is None:
        sys.stderr.write("k8s-check: skipped: kubectl is not on PATH\n")
        return 2 if os.environ.get("FEDSTREAM_CI") == "1" else 0
    if given.certificate is not None:
        return _certificate(given.certificate, given.overlay)
    if not PROGRAM.is_file():
        sys.stderr.write(
            f"k8s-check: {PROGRAM} is not installed: run make .venv-checkov/installed\n"
        )
        return 2
    wrong: list[str] = []
    try:
        found = {name: render() for name, render in renderings().items()}
    except AssertionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for name, manifests in found.items():
        wrong += [f"{name}: {line}" for line in findings(manifests)]
        if name.startswith("overlay production"):
            wrong += [f"{name}: {line}" for line in durable(manifests)]
    verdict = checkov(found, exceptions())
    wrong += [f"checkov: {line}" for line in verdict.wrong]
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    objects = sum(len(list(manifests)) for manifests in found.values())
    excepted = ", ".join(f"{check} {times}" for check, times in verdict.excepted.items())
    sys.stdout.write(
        f"rendered    {len(overlays())} overlays, {len(components())} components in "
        f"{len(combinations())} combinations on the base, {len(ADDITIONS)} on production: "
        f"{objects} objects\n"
        f"schemas     Kubernetes {' and '.join(VERSIONS)}, KEDA, Prometheus operator\n"
        f"checks      {len(CHECKS)} on each rendering: {len(CHECKS) * len(found)}\n"
        f"checkov     {verdict.passed} passed, {sum(verdict.excepted.values())} excepted with "
        f"their reason ({excepted})\n"
        f"k8s-check   {len(wrong)} wrong, {time.monotonic() - began:.0f} s\n"
    )
    return 1 if wrong else 0


def _certificate(file: Path, overlay: Path) -> int:
    """Says which names the certificate lacks. The exit code."""
    try:
        lacks = list(lacking(rendered(overlay), certificate_in(file.read_bytes()).names))
    except OSError as error:
        lacks = [f"cannot be read: {error.strerror}"]
    except (AssertionError, ConfigError) as error:
        lacks = [f"cannot be compared with the names in {overlay}: {error}"]
    sys.stderr.writelines(f"{file}: {line}\n" for line in lacks)
    return 1 if lacks else 0


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


def lacking(manifests: Manifests, names: Sequence[str]) -> Iterator[str]:
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


if __name__ == "__main__":
    sys.exit(main())
