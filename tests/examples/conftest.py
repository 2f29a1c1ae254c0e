"""The quick programs of the tests of ``fedstream.run``."""

from tests.fedstream.api.conftest import python

__all__ = ["python"]
