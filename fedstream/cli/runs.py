"""Commands about recorded runs: list, compare, ui, report, privacy, track."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedstream import private
from fedstream.cli.options import (
    TRACKERS,
    AsJson,
    ChangedRules,
    DataRoot,
    MeasuredTask,
    RecordedConfig,
    TrustRecorded,
    one_of,
    recorded_programs,
)
from fedstream.core.errors import ConfigError
from fedstream.runtime import process
from fedstream.terminal import adding, console, line, verbatim

_PICTURE, _TABLE, _NUMBERS = "comparison.png", "comparison.csv", "comparison.json"


def list_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder that contains runs, or a run")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs, the newest last: state, strategy, accuracy, updates per second, date.

    A run that can't be read is listed with the reason. A killed run counts as interrupted, and a
    journal that does not say whether its run is over as unfinished.
    """
    with process.importing():
        from fedstream.history import listing, report

    rows = listing.listed(folder)
    if as_json:
        verbatim(report.as_json(rows) + "\n")
    elif rows:
        listing.show(rows)
    else:
        line(f"{folder}: no runs there")


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or journals")
    ],
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="compare this metric of the task; default: accuracy"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE",
            help="show what it took to reach this value; default: the best that every run reached",
        ),
    ] = None,
    goal: Annotated[
        Literal["max", "min"] | None,
        typer.Option(
            help="default: as the task declares it (Task.goal), or as the metric is well known"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="folder for the files; default: comparison-TIME beside the first run",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: their numbers, what differs in their configuration, and their curves.

    The picture shows the metric over versions, updates and seconds.
    """
    with process.importing():
        from fedstream.history import comparison, report

    found = comparison.compare(folders, metric=metric, target=target, goal=goal)
    if out is None:
        now = datetime.now().astimezone()
        out = folders[0].absolute().parent / f"comparison-{now:%Y%m%d-%H%M%S}"
    for name in (_PICTURE, _TABLE, _NUMBERS):
        if (out / name).exists():
            raise ConfigError(f"--out {out}: already contains {name}: choose another folder")
    if not as_json:
        line(repr(found))
        line()
    with report.usable(out):
        files = found.write(out, picture=_PICTURE, table=_TABLE, numbers=_NUMBERS)
    if as_json:
        about = found.as_numbers() | {"files": [str(file) for file in files]}
        verbatim(report.as_json(about) + "\n")
    else:
        line("\n".join(str(file) for file in files))


def privacy(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run or its journal")],
    delta: Annotated[
        float,
        typer.Option(min=1e-300, max=0.5, metavar="DELTA", help="state epsilon at this delta"),
    ] = 1e-5,
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="also write all devices to this file"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """State what a private run has told of its devices: policy, sums, epsilon, assumptions.

    Everything is computed again from the journal; the helper is not asked.
    """
    with process.importing():
        from fedstream.history import report
        from fedstream.journal import opened

    with opened(folder) as chain:
        if not chain[-1].head.masked:
            if as_json:
                verbatim(report.as_json(None) + "\n")
            else:
                line(f"{folder}: not a private run: the server saw every single update")
            return
        with process.importing(), private.importing("`fedstream privacy`"):
            from fedstream.history.privacy import statement

        found = statement(chain, delta)
    if table is not None:
        written = found.write_table(table)
    if as_json:
        verbatim(report.as_json(found.as_numbers()) + "\n")
    else:
        console().print(found.page())
        if table is not None:
            line(f"{written} devices written to {table}")


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder of a run or of its journal")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="a run to compare it with")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")
    ] = 0,
    host: Annotated[
        str,
        typer.Option(metavar="HOST", help="address to listen on; whoever reaches it sees the run"),
    ] = "127.0.0.1",
    task: MeasuredTask = None,
    config: RecordedConfig = None,
    data_root: DataRoot = None,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
) -> None:
    """Look at a recorded run in the browser, version by version. Ends with Ctrl-C.

    Nothing of the run is changed, and nobody else can reach the page unless --host says so: there
    is no password.

    Bisect and 'what if' measure models with the run's task. To measure with your own, give --task
    or --trust-recorded-code: loading a task runs its code.
    """
    with process.importing():
        import asyncio

        from fedstream.history.index import reading_ahead
        from fedstream.journal import journal_of, stored_bytes

        both = [journal_of(one) for one in (folder, other) if one is not None]
        with reading_ahead(both) as is_reading:
            from fedstream.history.recorded_run import RecordedRun
            from fedstream.history.ui import pages
            from fedstream.history.ui.server import serve
            from fedstream.history.ui.work import TaskAccess
            from fedstream.runtime.plugins import allowed
            from fedstream.terminal import progress

            if is_reading:
                pages.prepare()

    def ready(at: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        line(f"http://{shown}:{at}/  (Ctrl-C ends it)")

    def opened(path: Path, other: RecordedRun | None = None) -> RecordedRun:
        total = stored_bytes(journal_of(path))
        with progress("reading the journal", total, quiet=False, parts=False) as step:
            found = RecordedRun(path, adding(step, total), other=other)
        for text in found.columns.damage:
            line(f"fedstream: {text}: what follows is not shown", err=True)
        return found

    with recorded_programs(folder, trust=trust, changed=changed):
        beside = None if other is None else opened(other)
        access = TaskAccess(task, config, data_root, trusted=trust, changed=allowed().changed)
        asyncio.run(serve(opened(folder, beside), host, port, ready, access))


def report_run(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder of a run or of its journal")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for the files; default: report-N in the run's"),
    ] = None,
    task: MeasuredTask = None,
    config: RecordedConfig = None,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    data_root: DataRoot = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every",
            min=0,
            metavar="N",
            help="measure every N-th version; 0: none; default: those in metrics.csv, or about 50",
        ),
    ] = None,
    html: Annotated[
        bool,
        typer.Option("--html", help="also write the pages of `fedstream ui` as one file"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write summary, table and picture of a run from its journal alone.

    Models are rebuilt and measured if the run left no measurements. A built-in task is loaded by
    default; a task of your own only if you name it or trust the recorded one, and a strategy of
    your own only if you trust it.
    """
    with process.importing():
        from fedstream.history import report, reporting, summary
        from fedstream.journal import newest_version, opened
        from fedstream.runtime.plugins import allowing
        from fedstream.terminal import progress

    with opened(folder) as chain:
        versions = newest_version(chain)
    with (
        allowing(recorded=trust, changed=changed),
        progress("report", versions, quiet=as_json) as step,
    ):
        found = reporting.write(
            folder,
            out,
            config=config,
            task=task,
            trusted=trust,
            data_root=data_root,
            every=every,
            step=step,
        )
        if html:
            from fedstream.history.recorded_run import RecordedRun
            from fedstream.history.ui import single

            made = found.files[0].parent
            run = RecordedRun(folder, metrics=made / report.METRICS)
            found.files.append(single.write(run, made))
    for note in found.notes:
        line(f"fedstream: {note}", err=True)
    if as_json:
        files = {"files": [str(file) for file in found.files]}
        verbatim(report.as_json(found.numbers | files) + "\n")
        return
    for name, value in summary.rows(found.numbers):
        line(f"{name:<10} {value}")
    for file in found.files:
        line(file)


def track(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder of a run or of its journal")
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="NAME",
            autocompletion=one_of(TRACKERS),
            help=f"the tracker: {', '.join(TRACKERS)}; repeatable; default: those of the run",
        ),
    ] = None,
    trust: TrustRecorded = False,
) -> None:
    """Write a finished run to trackers, adding only the versions that they lack.

    A tracker for which the run's run.toml has a table gets its options from there.
    """
    from fedstream.history import tracking
    from fedstream.history.record import RunRecord

    run = RunRecord(folder)
    for sink in tracking.sinks_of(run, to or (), trusted=trust):
        done = tracking.track(run, sink)
        how = "complete" if done.complete else f"the run is {run.state}"
        line(
            f"{done.sink}: {done.versions} versions and {done.measurements} measurements written; "
            f"{how}"
        )
