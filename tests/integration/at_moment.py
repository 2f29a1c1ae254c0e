"""`fedstream`, which sends itself a signal just before something happens for the n-th time.

``at_moment.py SIGTERM subprocess.Popen fedstream 1 run --out ...``: the moment is an event of
Python's audit hooks, its first argument (any: ``-``; else it has to contain this), and how many
times that may pass. So a moment is the same one however slow the machine is.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

_number = signal.Signals[sys.argv[1]]
_event, _about = sys.argv[2:4]
_moments = iter(range(int(sys.argv[4]), -1, -1))
_us = os.getpid()  # children inherit no hook, but a fork before exec has it


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event != _event or os.getpid() != _us:
        return
    if _about != "-" and _about not in " ".join(map(str, arguments)):
        return
    if next(_moments, None) == 0:
        os.kill(_us, _number)


sys.argv[1:] = sys.argv[5:]
sys.addaudithook(_heard)
runpy.run_module("fedstream", run_name="__main__", alter_sys=True)
