"""``fedstream reproduce``: repeats a paper's experiment and compares results with the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.errors import ConfigError

if TYPE_CHECKING:
    from fedstream.experiments.reproduction import Experiment

RESULTS = Path("experiments") / "results"


def listed() -> list[str]:
    """List the experiments, one per line."""
    return [
        f"{name:24} {len(one.cells):3} cells  {one.title}" for name, one in _experiments().items()
    ]


def reproduce(
    names: Sequence[str],
    *,
    repeats: int | None,
    scale: float,
    data_root: str | None,
    cells: Sequence[str] = (),
    seed: int = 0,
    processes: int | None,
    out: Path | None,
    again: bool,
    command: str,
    say: Callable[[str], object],
) -> None:
    """Run whatever is missing of the experiments, and write tables and pictures.

    Raises ConfigError for an unknown name, DataError if data is missing.
    """
    from fedstream.experiments.program import commit
    from fedstream.experiments.running import run
    from fedstream.experiments.showing import TABLE, show

    known = _experiments()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown experiment {', '.join(unknown)}; known: {', '.join(known)}")
    if not names:
        raise ConfigError(f"name an experiment: {', '.join(known)}")
    if out is not None and len(names) > 1:
        raise ConfigError("--out takes the results of one experiment: name only one")
    program = commit()  # before results are written, which may be inside the checkout
    for name in names:
        folder = out or RESULTS / name
        results = run(
            known[name], folder, repeats=repeats, scale=scale, data_root=data_root,
            cells=cells, seed=seed, processes=processes, again=again, command=command,
            program=program, say=say,
        )  # fmt: skip
        show(known[name], results, folder)
        say(f"{name}: {folder / TABLE}")


def _experiments() -> dict[str, Experiment]:
    try:
        from fedstream.experiments.reproduction import catalogue
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}: experiments need a checkout of the repository, and {Path.cwd()} is not one"
        ) from error
    return catalogue()
