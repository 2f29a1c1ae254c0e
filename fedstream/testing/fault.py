"""What the checks raise."""

from __future__ import annotations


class Fault(AssertionError):
    """What is wrong with a rule of somebody's own."""
