"""End-to-end tests of the manifests on a real cluster: ``make cluster-test``."""
