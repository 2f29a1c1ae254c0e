"""The limit of open files, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
import resource
from fedstream.runtime.files import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
print(allow_files({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("wanted", "expected"), [(100, "100 100 128"), (1000, "128 128 128"), (10, "64 64 128")]
)
def test_limit_is_raised_as_far_as_it_may_be(wanted: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(wanted=wanted)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == expected
