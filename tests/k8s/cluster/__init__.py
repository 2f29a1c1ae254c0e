"""A cluster of one machine: it runs the rendered manifests' pods as processes.

As much of Kubernetes as our manifests use and faults in them need: Deployments and StatefulSets
with their rolling updates, init containers, environment, mounts, a read-only root where the kernel
has Landlock, probes, restarts, hooks and grace, Services that lead to ready pods. The rest of a
manifest (users, network policies, budgets, requests, placement) is checked in `policy`.
"""

from tests.k8s.cluster.cluster import Cluster
from tests.k8s.cluster.kubelet import Pod
from tests.k8s.cluster.manifests import Manifest, Manifests, Unsupported, kubectl, read, rendered

__all__ = [
    "Cluster",
    "Manifest",
    "Manifests",
    "Pod",
    "Unsupported",
    "kubectl",
    "read",
    "rendered",
]
