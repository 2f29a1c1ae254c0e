"""A plugin of pytest: a test that failed runs again, and what counts is how that went.

On a busy machine a test fails by itself now and then; it has noticed nothing.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item: pytest.Function, nextitem: pytest.Item | None) -> bool:
    """In place of pytest's own, which tells of each test what happened the first time."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    # One that hung would hang again, and nobody stops it: pytest-timeout does so once.
    if any(report.failed and "pytest-timeout" not in report.longreprtext for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
