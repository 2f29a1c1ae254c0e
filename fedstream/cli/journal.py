"""Look into what a run has recorded. Nothing is ever written to a journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.cli.options import OUTCOMES, TrustRecorded, named, one_of
from fedstream.terminal import Step, adding, line, progress, verbatim

# Commands import what they need inside, so that `--help` is fast.
if TYPE_CHECKING:
    from fedstream.broker.layout import Model
    from fedstream.journal import Segment
    from fedstream.journal.inspection import Made

app = typer.Typer(help=__doc__, no_args_is_help=True)

Dir = Annotated[
    Path, typer.Argument(metavar="DIR", help="a run's folder, its journal's, or one segment's file")
]
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]


@contextmanager
def _bar(what: str, total: int, *, quiet: bool) -> Iterator[Step]:
    """Progress bar over the bytes of a journal."""
    with progress(what, total, quiet=quiet, parts=False) as step:
        yield adding(step, total)


def _columns(incomplete: str) -> list[str]:
    from fedstream.recordings.pages import NAMES

    return one_of(NAMES)(incomplete)


@app.command()
def show(
    path: Dir,
    device: Annotated[
        list[int] | None, typer.Option(metavar="N", help="only this device's; repeatable")
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="A[..B]", help="only of this version, or from A to B")
    ] = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUTCOME",
            autocompletion=one_of(OUTCOMES),
            help=f"only what ended so: {', '.join(OUTCOMES)}; repeatable",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="only the last N of these lines")
    ] = None,
    norms: Annotated[
        bool,
        typer.Option(
            "--norms",
            help="also the norm of what was sent, and the distance of x_new from x, which it was "
            "mixed into: makes every model again",
        ),
    ] = False,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write them there instead")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="an object in each line")] = False,
) -> None:
    """The records in order: what arrived, from whom, how late, and what became of it."""
    from fedstream.journal.inspection import opened
    from fedstream.recordings import pages

    outcomes = frozenset(named("--outcome", one, OUTCOMES) for one in outcome or ())
    first, end = _range(version)
    wanted = pages.Filter(frozenset(device or ()), outcomes, first, end)
    with opened(path) as chain:
        if first is not None:
            chain = _from(chain, first)
        found = pages.lines(chain, wanted, norms=norms)
        chosen = found if last is None else iter(deque(found, maxlen=last))
        if table is not None:
            line(f"{pages.write_lines(table, chosen)} records are in {table}")
            return
        if not as_json:
            pages.show(chosen, norms=norms)
            return
        for found_line in chosen:
            verbatim(_in_one_line(pages.facts(*found_line)) + "\n")


def _range(text: str | None) -> tuple[int | None, int | None]:
    """First and last version of ``A`` or ``A..B``. Raises ConfigError."""
    if text is None:
        return None, None
    first, dots, last = text.partition("..")
    if not first.isdecimal() or not (last.isdecimal() or not dots):
        raise ConfigError(f"--version {text}: must be a version, or two as in 10..20")
    if (end := int(last or first)) < int(first):
        raise ConfigError(f"--version {text}: {end} comes before {first}")
    return int(first), end


def _from(chain: list[Segment], version: int) -> list[Segment]:
    """Segments with records of this version or later.

    Raises JournalError if the journal does not have the version.
    """
    from fedstream.journal import JournalError
    from fedstream.journal.inspection import entries, newest, since

    since(chain, version)
    last = chain[-1]
    later = (entry for _, entry in entries(last, None) if entry.version >= version)
    if version > last.standing.version and next(later, None) is None:
        raise JournalError(
            f"{last.path.parent}: version {version} is not there: the newest is {newest(chain)}"
        )
    # The record that made this version may be the last one of the previous segment.
    return list(since(chain, max(version - 1, chain[0].standing.version)))


def _in_one_line(value: Any) -> str:
    from fedstream.observe.report import as_json

    return " ".join(part.strip() for part in as_json(value).split("\n"))


@app.command()
def verify(
    path: Dir,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="rebuild every version and compare it")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Read the journal and compare it with what it says of itself.

    Each message with its checksum, the bytes of each update with its digest, the versions' numbers
    with one another, and each segment's beginning with the end of the one before; and unless
    --no-models, every version is rebuilt: its outcomes, weights and digest must come out again.

    Exit codes: 0 all is whole (a torn tail, as a crash leaves it, is), 1 something is damaged.
    """
    from fedstream.journal import JournalError, inspection
    from fedstream.observe.report import as_json as text
    from fedstream.recordings import pages

    verdicts = []
    with inspection.opened(path) as chain:
        with _bar("verify", inspection.counting(chain), quiet=as_json) as read:
            for verdict in inspection.verify(chain, models=models, read=read):
                verdicts.append(verdict)
                if not as_json:
                    line(pages.verdict(verdict))
        others = [] if path.is_file() else inspection.uncounted(chain)
    records, versions = sum(v.records for v in verdicts), sum(v.versions for v in verdicts)
    damaged = [verdict for verdict in verdicts if verdict.damage is not None]
    if as_json:
        verbatim(
            text(
                {
                    "whole": not damaged, "records": records, "versions": versions,
                    "segments": [asdict(verdict) for verdict in verdicts], "uncounted": others,
                }
            )
            + "\n"
        )  # fmt: skip
    else:
        for name in others:
            line(f"{name}  does not count: its writer was fenced, or its journal is another")
    if damaged:
        raise JournalError(f"{path}: {len(damaged)} of {len(verdicts)} segments damaged")
    if not as_json:
        line(f"{records} records, {versions} versions, all whole")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run's folder or its journal's")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another's")],
    as_json: AsJson = False,
) -> None:
    """The first version in which two runs part, and why, by their records and digests.

    Exit codes: 0 they are the same, 1 they part.
    """
    from fedstream.journal.inspection import opened, parting
    from fedstream.observe.report import as_json as text

    with opened(a) as ours, opened(b) as theirs:
        found = parting(ours, theirs)
    if as_json:
        about = {"why": found.why, "text": found.text, "first": found.first}
        about |= {"version": found.version, "a": _plain(found.a), "b": _plain(found.b)}
        verbatim(text(about) + "\n")
    elif found.version is None:
        line(found.text)
    else:
        line(f"version {found.version}: {found.text}")
    if found.version is not None:
        raise typer.Exit(1)


def _plain(made: Made | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "version": made.version, "digest": made.digest, "strategy": made.strategy,
        "updates": [
            {
                "device": one.upload.device, "task": one.upload.task, "digest": one.upload.digest,
                "tau": one.upload.tau, "staleness": one.staleness, "weight": one.weight,
            }
            for one in made.updates
        ],
    }  # fmt: skip


@app.command()
def bisect(
    path: Dir,
    metric: Annotated[str, typer.Option(metavar="NAME", help="of the task's metrics")] = "accuracy",
    below: Annotated[
        float | None, typer.Option(metavar="X", help="the metric is bad below X")
    ] = None,
    above: Annotated[
        float | None, typer.Option(metavar="X", help="the metric is bad above X, such as a loss")
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="versions; so that there are about 50")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="to measure by")] = None,
    trust: TrustRecorded = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="instead of the run's run.toml"),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a configuration key; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The update with which a metric went bad, that had been good before.

    Every N-th version is measured, up to the first that is bad after a good one; then each version
    in between. So what is found is a real crossing, and the first one between those two; a fall
    that recovers between two measured versions goes unseen, unless --every is 1.

    To measure by a task of one's own takes --task, or --trust-recorded-task: loading a task runs
    its program, and a recording may be a stranger's.

    Exit codes: 0 found, 1 the metric never was good, or never went bad afterwards.
    """
    from fedstream.journal.inspection import opened
    from fedstream.observe.report import as_json as text
    from fedstream.recordings import bisect as search
    from fedstream.recordings import pages
    from fedstream.settings.recording import settings_of

    bound = below if below is not None else above
    if bound is None or (below is not None and above is not None):
        raise ConfigError("one of --below and --above: which value of the metric is bad?")
    if isnan(bound):
        raise ConfigError(f"--{'below' if below is not None else 'above'} nan: must be a number")

    def is_good(value: float) -> bool:  # NaN is not good
        return value >= bound if below is not None else value <= bound

    with opened(path) as chain:
        where = chain[0].path.parent
        settings = settings_of(where, config, sets or (), trusted=trust, task=task)
        measured = search.judge(settings, metric)

        def measure(version: int, model: Model) -> float:
            value = measured(version, model)
            if not as_json:
                line(f"version {version}: {metric} {value:.4f}")
            return value

        found = search.search(chain, measure, is_good, every)
    crossing = found.crossing
    side = f"{'below' if below is not None else 'above'} {bound:g}"
    if crossing is not None:
        said = (
            f"{metric} went {side} with version {crossing.version}: "
            f"{crossing.before:.4f} before, {crossing.after:.4f} after"
        )
    elif found.ever_good:
        said = f"{metric} never went {side} in the {len(found.measured)} versions measured"
    else:
        said = f"{metric} was never anything but {side} in the {len(found.measured)} measured"
    if as_json:
        about = {"metric": metric, "found": crossing is not None, "text": said}
        about |= {"every": found.every, "measured": sorted(found.measured.items())}
        verbatim(text(about | (asdict(crossing) if crossing is not None else {})) + "\n")
    else:
        line(said)
        for one in crossing.causes if crossing is not None else ():
            line(pages.cause(one))
        if crossing is not None and not crossing.causes:
            line("no update did it: the run went on from a model of Redis")
    if crossing is None:
        raise typer.Exit(1)


@app.command()
def export(
    path: Dir,
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="the file to make")],
    version: Annotated[
        int | None, typer.Option(min=0, metavar="V", help="the newest if not given")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:
    """A version's model as safetensors, rebuilt from the nearest checkpoint.

    Names, shapes and dtypes are those of the task's state_dict, for which the task itself is not
    needed; a tensor that is tied has the first of its names only.
    """
    from fedstream.journal import SUFFIX
    from fedstream.journal.inspection import counting, model_at, newest, opened, since

    if out.suffix == SUFFIX:
        raise ConfigError(f"--out {out}: is a journal's name, and no journal is ever written to")
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: is there already: name another file, or --force")
    with opened(path) as chain:
        number = newest(chain) if version is None else version
        from_there = since(chain, number)[:1]
        with _bar("export", counting(from_there), quiet=False) as read:
            model, digest = model_at(chain, number, read)
        head = chain[-1].head
    about = {"version": str(number), "digest": digest, "run": head.run, "task": head.task}
    _write(out, model, about)
    line(f"version {number} ({digest}) is in {out}")


def _write(out: Path, model: Model, about: dict[str, str]) -> None:
    """Write the model atomically: to a temporary file that is then renamed."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    values = model.tensors()
    tensors = {
        one.name: torch.from_numpy(values[one.name]).to(getattr(torch, one.dtype))
        for one in model.layout.without_controls().tensors
    }
    aside = out.with_name(f".{out.name}.tmp")
    try:
        save_file(tensors, aside, metadata=about)
        aside.replace(out)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else error
        raise FedstreamError(f"--out {out}: cannot be written: {why}") from error


@app.command()
def stats(
    path: Dir,
    ahead: Annotated[
        int, typer.Option(min=1, metavar="K", help="versions that the cosine looks ahead")
    ] = 10,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            autocompletion=_columns,
            help="by this one, such as max_distance: --json names them all",
        ),
    ] = "device",
    ascending: Annotated[
        bool | None,
        typer.Option(
            "--ascending/--descending", help="devices ascend, numbers descend if not given"
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write the table there")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What each device brought: outcomes, staleness, weight, loss, and where its updates point.

    Of each number there are mean, median, 90th percentile and maximum; a terminal shows as many
    columns as it has room for, the one that is sorted by among them. The norm is that of x_new, the
    distance that of x_new - x, x being the model that it was mixed into.
    mean cosine is the one between x_new - x and the way the model went in the K versions after the
    one with the update in it: about 0 or less says that the others undid it. Updates that fewer
    than K versions followed are left out of it; of a model of more than 65,536 numbers so many,
    evenly spaced, stand for the whole.
    """
    from fedstream.journal.inspection import counting, opened
    from fedstream.journal.shares import stats as measured
    from fedstream.observe.report import as_json as text
    from fedstream.recordings import pages

    sort = named("--sort", sort, pages.NAMES)
    with opened(path) as chain, _bar("stats", counting(chain), quiet=as_json) as read:
        shares = measured(chain, ahead, read)
    rows = pages.rows(shares, sort, ascending=ascending)
    used = sum(share.staleness.count for share in shares.values())
    weighted = sum(share.norm.count for share in shares.values())
    if table is not None:
        pages.write_rows(table, rows)
    if as_json:
        about = {"ahead": ahead, "updates": used, "with_weights": weighted, "devices": rows}
        verbatim(text(about) + "\n")
        return
    pages.show_rows(rows, sort)
    if weighted < used:
        line(
            f"{used - weighted} of {used} updates were recorded without their weights: norms, "
            "distances and cosines are of the others"
        )
