"""``python -m experiments``: repeats a paper's experiment and compares results with the paper's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import reproduction
from experiments.page import PAGE, page, with_grids
from experiments.program import commit
from experiments.running import chosen, run
from experiments.showing import TABLE, show
from fedstream.cli.options import DataRoot, Jobs
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.runtime.text import did_you_mean

RESULTS = Path(__file__).parent / "results"
ALGORITHMS = RESULTS.parents[1] / "docs" / "algorithms.md"


def listed(names: Sequence[str] = ()) -> list[str]:
    """List the cells of the named experiments, or else all experiments, one per line.

    An experiment without cells is listed with its first commands. Raises ConfigError.
    """
    if names:
        known = catalogue_with(names)
        return [cell.label for name in names for cell in chosen(known[name], ())]
    return [
        f"{name:24} {len(one.cells):3} cells  {one.title}"
        + (f" ({one.before})" if not one.cells else "")
        for name, one in reproduction.catalogue().items()
    ]


def catalogue_with(names: Sequence[str]) -> dict[str, reproduction.Experiment]:
    """The catalogue, if it has all these experiments. Raises ConfigError."""
    known = reproduction.catalogue()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"unknown experiment {', '.join(unknown)}: `python -m experiments --list` lists all"
            f"{did_you_mean(unknown[0], known)}"
        )
    return known


def reproduce(
    names: Sequence[str],
    *,
    repeats: int | None,
    scale: float,
    cells: Sequence[str] = (),
    seed: int | None = None,
    processes: int | None,
    out: Path | None,
    again: bool,
    command: str,
    say: Callable[[str], object],
) -> None:
    """Run whatever is missing of the experiments, and write tables and pictures.

    Raises ConfigError for an unknown name, DataError if data is missing.
    """
    known = catalogue_with(names)
    if not names:
        raise ConfigError(f"name an experiment: {', '.join(known)}")
    if out is not None and len(names) > 1:
        raise ConfigError("--out takes the results of one experiment: name only one")
    program = commit()  # before results are written, which may be inside the checkout
    for name in names:
        folder = out or RESULTS / name
        results = run(
            known[name],
            folder,
            repeats=repeats,
            scale=scale,
            cells=cells,
            seed=seed,
            processes=processes,
            again=again,
            command=command,
            program=program,
            say=say,
        )
        show(known[name], results, folder)
        say(f"{name}: {folder / TABLE}")


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="experiments to run; --list names them"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="R",
            help="runs of every cell; default: as many as the experiment defines",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="only this cell, or a pattern such as 'p = 1, *'; repeatable"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="seed of the first repeat, usually 0; the next has N + 1",
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="divide the number of versions by S")
    ] = 1.0,
    data_root: DataRoot = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="folder for the results; default: experiments/results/NAME"
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="run again and replace existing results")
    ] = False,
    listed_only: Annotated[
        bool, typer.Option("--list", help="list the experiments, or a NAME's cells, and exit")
    ] = False,
    page_only: Annotated[
        bool,
        typer.Option(
            "--page", help="write the page of results and the tables of docs/algorithms.md"
        ),
    ] = False,
) -> None:
    """Repeat a paper's experiment: raw results, table, pictures, and which of its claims held.

    Existing results are not run again, so an interrupted command continues where it stopped.

    Exit codes: 0 done, 130 interrupted, 1 failed, 2 wrong command line.
    """
    if page_only:
        known = reproduction.catalogue()
        (RESULTS / PAGE).write_text(page(known, RESULTS))
        ALGORITHMS.write_text(with_grids(ALGORITHMS.read_text(), known, RESULTS))
        print(f"{RESULTS / PAGE}\n{ALGORITHMS}")
        return
    if data_root is not None:
        os.environ["FEDSTREAM_DATA"] = data_root  # also for tasks and processes of experiments' own
    try:
        if listed_only:
            print("\n".join(listed(names or ())))
            return
        reproduce(
            names or (),
            repeats=repeats,
            cells=cell or (),
            seed=seed,
            scale=scale,
            processes=jobs,
            out=out,
            again=again,
            command=f"python -m experiments {shlex.join(sys.argv[1:])}",
            say=print,
        )
    except FedstreamError as error:
        print(f"experiments: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("experiments: interrupted; the same command continues", file=sys.stderr)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
