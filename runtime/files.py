"""How many files, and so connections, this process may open."""

from __future__ import annotations

import resource


def allow_files(wanted: int) -> int | None:
    """Raise the limit of open files to ``wanted``, as far as it may be, and never lower it.

    Returns the limit; None: there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
