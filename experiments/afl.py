"""AFL's experiments: the columns of its tables, which all tasks share."""

from __future__ import annotations

SYNC: dict[str, object] = {"simulation.staleness.kind": "none"}
ASYNC: dict[str, object] = {"simulation.staleness.kind": "recent", "simulation.staleness.of": 5}
PRECISION = (
    "Devices train in bfloat16, or in float32 on a machine where that is faster; the server "
    "computes in float32."
)
COLUMNS = tuple(
    (arriving, steps)
    for arriving in ("synchronous", "asynchronous")
    for steps in ("constant", "dynamic")
)


def constant(c: int) -> dict[str, object]:
    """H = c."""
    return {"scheduler.steps.kind": "fixed", "scheduler.steps.n": c}


def dynamic(c: int) -> dict[str, object]:
    """H uniform on [1, 2c]."""
    return {"scheduler.steps.kind": "uniform", "scheduler.steps.c": c}


def column(arriving: str, steps: str, c: int) -> dict[str, object]:
    """One of ``COLUMNS``."""
    return {
        **(SYNC if arriving == "synchronous" else ASYNC),
        **(constant(c) if steps == "constant" else dynamic(c)),
    }
