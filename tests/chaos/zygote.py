"""Starts services by forking: what takes seconds to import is imported once for all of them.

    python -m tests.chaos.zygote

reads a line of JSON for each process to start (its arguments, environment and log) and writes one
when it has begun and one when it has ended. The processes end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

from fedstream.runtime import parent

_PRELOADED = (
    "fedstream.cli.app", "fedstream.cli.services", "fedstream.settings.services",
    "fedstream.settings.config", "uvloop", "torch", "tests.chaos.task",
    "fedstream.trainer.vector", "tests.chaos.seams",
    "fedstream.cli.device", "fedstream.device.life", "fedstream.coordinator.gateway.service",
)  # fmt: skip


def _say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(asked: dict[str, Any]) -> NoReturn:
    """The service, in the process that was forked for it."""
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(asked["env"], **{parent.VARIABLE: str(os.getppid())})
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        from fedstream.cli.app import main
        from tests.chaos import seams

        seams.install()
        sys.argv = ["fedstream", *asked["argv"]]
        main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Until standard input ends."""
    for name in _PRELOADED:
        __import__(name)
    waking, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _say(ready=os.getpid())
    asked = b""
    while True:
        readable, _, _ = select.select([0, waking], [], [])
        if waking in readable:
            os.read(waking, 4096)
            _reap()
        if 0 not in readable:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        asked += more
        while b"\n" in asked:
            line, _, asked = asked.partition(b"\n")
            wanted = json.loads(line)
            child = os.fork()
            if not child:
                _become(wanted)
            _say(begun=child, id=wanted["id"])


if __name__ == "__main__":
    main()
