"""What the search for garbage looks through, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEARCHED = """
import gc, time, weakref
from fedstream.runtime.process import short_pauses

class Ring:
    def __init__(self):
        self.me = self

now = 0.0
before = gc.get_threshold()
with short_pauses(lambda: now):
    kept, gone = Ring(), weakref.ref(Ring())
    gc.collect()
    assert gone() is None            # garbage that is new is found
    assert gc.get_freeze_count()
    assert len(gc.get_objects()) < 1000  # what stays is not looked through again
    later = weakref.ref(kept)
    del kept
    now = 599.0
    gc.collect()
    assert later() is not None
    now = 601.0
    gc.collect()
    assert later() is None           # until ten minutes are over
    circles = [Ring() for _ in range(60_000)]
    later = weakref.ref(circles[0])
    gc.collect()
    del circles
    now = 608.0
    gc.collect()
    assert later() is not None
    now = 612.0
    gc.collect()
    assert later() is None           # or there is much more, which is looked at every ten seconds
gc.collect()
assert not gc.get_freeze_count()
assert gc.get_threshold() == before
"""


@pytest.mark.process
def test_what_stays_is_searched_every_ten_minutes_and_if_there_is_much_more() -> None:
    subprocess.run([sys.executable, "-c", SEARCHED], check=True)
