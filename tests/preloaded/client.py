"""Asks the server for a process, passes on what it is given, and ends as that process does.

``client.py SOCKET PYTHON NAME ARGUMENT...`` is a program NAME. Given are files, folder, environment
and signals. Only built-in modules are imported: it must start in hundredths of a second.
"""

import marshal
import posix
import sys
from _signal import SIG_DFL, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, signal  # type: ignore[import-not-found]
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

FORK_SERVER = "fedstream.local.fork_server"
_LOST = 70


def ended(address: str, arguments: list[str], files: tuple[int, ...]) -> int:
    """Exit code of a process with these arguments; negative: the signal that killed it."""
    connection = socket(AF_UNIX, SOCK_STREAM)
    connection.connect(address)
    asked = marshal.dumps((arguments, posix.getcwd(), posix.environ, posix.getpid()))
    given = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    head = len(asked).to_bytes(4, "big")
    connection.sendmsg([head], [(SOL_SOCKET, SCM_RIGHTS, given)])
    connection.sendall(asked)
    for number in (SIGHUP, SIGINT, SIGQUIT, SIGTERM):
        signal(number, lambda number, _frame: connection.sendall(bytes([number])))
    parent = posix.environ.get(b"FEDSTREAM_PARENT")  # `fedstream run`: a service ends with it
    if parent:
        connection.settimeout(1.0)
    while True:
        try:
            code = connection.recv(2)
        except TimeoutError:
            if parent and posix.getppid() != int(parent):
                connection.sendall(bytes([SIGTERM]))
                parent = None  # once: a second signal would kill it
        else:
            return int.from_bytes(code, "big", signed=True) if code else _LOST


def main() -> None:
    """`fedstream ARGUMENT...`, `python ... -m fedstream ARGUMENT...` and `python SCRIPT.py
    ARGUMENT...`; other Python as it is."""
    _, address, python, name, *arguments = sys.argv
    files: tuple[int, ...] = (0, 1, 2)
    if name == "python" and arguments and arguments[0].endswith(".py"):
        arguments.insert(0, "python")
    elif name == "python":
        module = arguments[arguments.index("-m") + 1] if "-m" in arguments else ""
        if module not in ("fedstream", "fedstream.api", FORK_SERVER):
            posix.execv(python, [python, *arguments])
        del arguments[: arguments.index("-m") + 2]
        if module == FORK_SERVER:  # its socket is number 3 there
            files = (*files, int(arguments.pop()))
        if module != "fedstream":
            arguments = ["-m", module]
    code = ended(address, arguments, files)
    if code < 0:
        if -code != SIGKILL:
            signal(-code, SIG_DFL)
        posix.kill(posix.getpid(), -code)
    posix._exit(code)


main()
