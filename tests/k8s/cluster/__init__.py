"""A cluster of one machine: it runs rendered manifests as processes.

What a manifest says is done as Kubernetes documents it, as far as this goes: Deployments and
StatefulSets with their rolling updates, init containers, environment, mounts, a read-only root
where the kernel has Landlock, probes, restarts, hooks and grace, Services that lead to ready pods,
disruption budgets, KEDA's ScaledObjects. What a pod wants beyond that raises `Unsupported` rather
than being left out. There is one node and no CPU to share out: users, network policies, Ingress,
requests and where pods are put have nothing here that could hold them.
"""

from tests.k8s.cluster.cluster import Cluster, Refused
from tests.k8s.cluster.kubelet import Manners, Pod
from tests.k8s.cluster.manifests import Manifest, Manifests, Unsupported, kubectl, read, rendered

__all__ = [
    "Cluster",
    "Manifest",
    "Manifests",
    "Manners",
    "Pod",
    "Refused",
    "Unsupported",
    "kubectl",
    "read",
    "rendered",
]
