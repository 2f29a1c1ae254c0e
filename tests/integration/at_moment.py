"""`fedstream`, which sends itself a signal just before something happens for the first time.

``at_moment.py SIGTERM subprocess.Popen fedstream run --out ...``: the moment is an event of
Python's audit hooks with arguments that contain the next word. So a moment is the same one however
slow the machine is.
"""

from __future__ import annotations

import os
import signal
import sys

_number = signal.Signals[sys.argv[1]]
_event, _about = sys.argv[2:4]
_moments = iter([_event])
_us = os.getpid()  # children inherit no hook, but a fork before exec has it


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if event != _event or os.getpid() != _us:
        return
    if _about in " ".join(map(str, arguments)) and next(_moments, None):
        os.kill(_us, _number)


sys.argv[1:] = sys.argv[4:]
sys.addaudithook(_heard)
from fedstream.__main__ import main  # noqa: E402  (this, too, may be the moment)

main()
