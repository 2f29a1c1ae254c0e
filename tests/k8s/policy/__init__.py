"""What is checked of the manifests in k8s/ without a cluster: ``make k8s-check``.

Each check is a function of rendered objects that yields a line for whatever is wrong; the tests in
``test_manifests.py`` break manifests and see each of them say so.
"""
