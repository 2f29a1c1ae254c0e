"""Look into what a run has recorded. Nothing is ever written to a journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstream.cli.options import (
    OUTCOMES,
    AsJson,
    ChangedRules,
    MeasuredTask,
    RecordedConfig,
    TrustRecorded,
    named,
    one_of,
    recorded_programs,
)
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.terminal import Advance, adding, line, progress, verbatim

# Commands import what they need inside, so that `--help` is fast.
if TYPE_CHECKING:
    from fedstream.core.layout import Model
    from fedstream.journal import Segment
    from fedstream.journal.inspection import RecordedVersion

app = typer.Typer(help=__doc__, no_args_is_help=True)

Dir = Annotated[
    Path, typer.Argument(metavar="DIR", help="a run's folder, its journal folder or a segment file")
]


@contextmanager
def _bar(what: str, total: int, *, quiet: bool) -> Iterator[Advance]:
    """A progress bar over a journal's bytes."""
    with progress(what, total, quiet=quiet, parts=False) as step:
        yield adding(step, total)


def _columns(incomplete: str) -> list[str]:
    from fedstream.history.journal_text import NAMES

    return one_of(NAMES)(incomplete)


@app.command()
def show(
    path: Dir,
    device: Annotated[
        list[int] | None, typer.Option(metavar="N", help="only records of this device; repeatable")
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="A[..B]", help="only version A, or versions A to B")
    ] = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OUTCOME",
            autocompletion=one_of(OUTCOMES),
            help=f"only this outcome ({', '.join(OUTCOMES)}); repeatable",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="only the last N records that match")
    ] = None,
    norms: Annotated[
        bool,
        typer.Option(
            "--norms",
            help="also show each update's norm and its distance from the model it was mixed into; "
            "rebuilds every model",
        ),
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="write the records to this file instead"),
    ] = None,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
) -> None:
    """Show the records in order: what arrived, from whom, how late, and what became of it."""
    from fedstream.history import journal_text as pages
    from fedstream.journal import opened
    from fedstream.journal.errors import ONLY_SUMS

    outcomes = frozenset(named("--outcome", one, OUTCOMES) for one in outcome or ())
    first, end = _range(version)
    wanted = pages.Filter(frozenset(device or ()), outcomes, first, end)
    with recorded_programs(path, trust=trust, changed=changed or not norms), opened(path) as chain:
        if first is not None:
            chain = _from(chain, first)
        if norms and any(one.head.masked for one in chain):
            line(f"{ONLY_SUMS}: a single one has no norm and no distance", err=True)
        found = pages.lines(chain, wanted, norms=norms)
        chosen = found if last is None else iter(deque(found, maxlen=last))
        if table is not None:
            line(f"{pages.write_lines(table, chosen)} records written to {table}")
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
        raise ConfigError(f"--version {text}: expected a version, or a range such as 10..20")
    if (end := int(last or first)) < int(first):
        raise ConfigError(f"--version {text}: {end} is before {first}")
    return int(first), end


def _from(chain: list[Segment], version: int) -> list[Segment]:
    """Segments with records of this version or later.

    Raises JournalError if the journal does not have the version.
    """
    from fedstream.journal import JournalError, entries, newest_version, since

    since(chain, version)
    last = chain[-1]
    later = (entry for _, entry in entries(last, None) if entry.version >= version)
    if version > last.standing.version and next(later, None) is None:
        raise JournalError(
            f"{last.path.parent}: version {version} does not exist yet: the newest is "
            f"{newest_version(chain)}"
        )
    # The record that made this version may be the last one of the previous segment.
    return list(since(chain, max(version - 1, chain[0].standing.version)))


def _in_one_line(value: Any) -> str:
    from fedstream.history.report import as_json

    return " ".join(part.strip() for part in as_json(value).split("\n"))


@app.command()
def verify(
    path: Dir,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="rebuild and compare every version")
    ] = True,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    as_json: AsJson = False,
) -> None:
    """Read the journal and check it against its own digests.

    Checks version numbers, the checksums of messages, the digests of updates, and that each segment
    starts where the one before it ended. Unless --no-models is given, also rebuilds every version
    and compares outcomes, weights and digest.

    Exit codes: 0 intact (a torn tail from a crash is fine), 1 damaged.
    """
    from fedstream.history import journal_text as pages
    from fedstream.history.report import as_json as text
    from fedstream.journal import JournalError, counted_bytes, opened, uncounted
    from fedstream.journal.inspection import verify as verified

    verdicts = []
    allowed = recorded_programs(path, trust=trust, changed=changed)
    with allowed, opened(path) as chain:
        with _bar("verify", counted_bytes(chain), quiet=as_json) as read:
            for verdict in verified(chain, models=models, read=read):
                verdicts.append(verdict)
                if not as_json:
                    line(pages.verdict(verdict))
        others = [] if path.is_file() else uncounted(chain)
    records, versions = sum(v.records for v in verdicts), sum(v.versions for v in verdicts)
    damaged = [verdict for verdict in verdicts if verdict.damage is not None]
    if as_json:
        verbatim(
            text(
                {
                    "whole": not damaged,
                    "records": records,
                    "versions": versions,
                    "segments": [asdict(verdict) for verdict in verdicts],
                    "uncounted": others,
                }
            )
            + "\n"
        )
    else:
        for name in others:
            line(f"{name}  ignored: its writer was fenced, or it belongs to another journal")
    if damaged:
        raise JournalError(f"{path}: {len(damaged)} of {len(verdicts)} segments damaged")
    if not as_json:
        line(f"{records} records, {versions} versions, all intact")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a run's folder or its journal folder")],
    b: Annotated[Path, typer.Argument(metavar="B", help="the other run's")],
    as_json: AsJson = False,
) -> None:
    """Find the first version in which two runs differ, and why.

    Compares their records and digests. Exit codes: 0 identical, 1 different.
    """
    from fedstream.history.report import as_json as text
    from fedstream.journal import opened
    from fedstream.journal.inspection import divergence

    with opened(a) as ours, opened(b) as theirs:
        found = divergence(ours, theirs)
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


def _plain(made: RecordedVersion | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "version": made.version,
        "digest": made.digest,
        "strategy": made.strategy,
        "updates": [
            {
                "device": one.upload.device,
                "task": one.upload.task,
                "digest": one.upload.digest,
                "tau": one.upload.tau,
                "staleness": one.staleness,
                "weight": one.weight,
            }
            for one in made.updates
        ],
    }


@app.command()
def bisect(
    path: Dir,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="one of the task's metrics")
    ] = "accuracy",
    below: Annotated[
        float | None, typer.Option(metavar="X", help="the metric is bad below X")
    ] = None,
    above: Annotated[
        float | None, typer.Option(metavar="X", help="the metric, such as a loss, is bad above X")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="measure every N-th version; default: about 50 in all"
        ),
    ] = None,
    task: MeasuredTask = None,
    trust: TrustRecorded = False,
    config: RecordedConfig = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="set a configuration key; repeatable"),
    ] = None,
    changed: ChangedRules = False,
    as_json: AsJson = False,
) -> None:
    """Find the update with which a metric went from good to bad.

    Measures every N-th version, and the versions between which the run's own measurements went bad,
    up to the first bad version after a good one; then each version between these two. Reports the
    first change from good to bad there, and whether the run recovered from it. A dip that recovers
    between two measured versions goes unnoticed unless --every is 1.

    To measure with your own task, give --task or --trust-recorded-code: loading a task runs its
    code, and the recording may come from a stranger.

    Exit codes: 0 found, 1 the metric was never good, or never went bad afterwards.
    """
    from fedstream.history import bisect as search
    from fedstream.history import journal_text as pages
    from fedstream.history.measuring import judge, recorded_values
    from fedstream.history.report import as_json as text
    from fedstream.journal import opened
    from fedstream.settings.recording import settings_of

    limit = search.limit_of(below, above)
    with recorded_programs(path, trust=trust, changed=changed), opened(path) as chain:
        where = chain[0].path.parent
        settings = settings_of(where, config, sets or (), trusted=trust, task=task)
        measured = judge(settings, metric)

        def measure(version: int, model: Model) -> float:
            value = measured(version, model)
            if not as_json:
                line(f"version {version}: {metric} {value:.4f}")
            return value

        recorded = recorded_values(where, metric)
        found = search.search(chain, measure, limit.is_good, every, recorded=recorded)
    crossing = found.crossing
    said = found.in_words(metric, limit)
    if as_json:
        about = {"metric": metric, "found": crossing is not None, "text": said}
        about |= {"every": found.every, "measured": sorted(found.measured.items())}
        about |= {"recovered": found.recovered}
        verbatim(text(about | (asdict(crossing) if crossing is not None else {})) + "\n")
    else:
        line(said)
        for one in crossing.causes if crossing is not None else ():
            line(pages.cause(one))
        if crossing is not None and not crossing.causes:
            line("no update caused it: the run continued from a model in Redis")
    if crossing is None:
        raise typer.Exit(1)


@app.command()
def export(
    path: Dir,
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="file to write")],
    version: Annotated[
        int | None, typer.Option(min=0, metavar="V", help="default: the newest")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
) -> None:
    """Write a version's model as safetensors, rebuilt from the nearest checkpoint.

    Names, shapes and dtypes are those of the task's state_dict; the task itself is not needed. Tied
    tensors appear once, under the first of their names.
    """
    from fedstream.journal import SUFFIX, counted_bytes, newest_version, opened, since
    from fedstream.journal.inspection import model_at

    if out.suffix == SUFFIX:
        raise ConfigError(
            f"--out {out}: is the name of a journal segment; choose a name that ends in "
            ".safetensors"
        )
    if out.exists() and not force:
        raise ConfigError(f"--out {out}: already exists: choose another file or give --force")
    with recorded_programs(path, trust=trust, changed=changed), opened(path) as chain:
        number = newest_version(chain) if version is None else version
        from_there = since(chain, number)[:1]
        with _bar("export", counted_bytes(from_there), quiet=False) as read:
            model, digest = model_at(chain, number, read)
        head = chain[-1].head
    about = {"version": str(number), "digest": digest, "run": head.run, "task": head.task}
    _write(out, model, about)
    line(f"version {number} ({digest}) written to {out}")


def _write(out: Path, model: Model, about: dict[str, str]) -> None:
    """Write the model atomically: to a temporary file that is then renamed."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    values = model.tensors()
    tensors = {
        one.name: torch.from_numpy(values[one.name]).to(getattr(torch, one.dtype))
        for one in model.layout.without_controls().whole
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
        int, typer.Option(min=1, metavar="K", help="number of versions that the cosine looks ahead")
    ] = 10,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            autocompletion=_columns,
            help="column to sort by, such as max_distance; --json shows all names",
        ),
    ] = "device",
    ascending: Annotated[
        bool | None,
        typer.Option(
            "--ascending/--descending",
            help="default: ascending for devices, descending for numbers",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="also write the table to this file")
    ] = None,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    as_json: AsJson = False,
) -> None:
    """Show what each device contributed: outcomes, staleness, weight, loss and direction.

    Every number has its mean, median, 90th percentile and maximum. A terminal shows as many columns
    as fit, and always the column sorted by. The norm is that of x_new, the distance that of x_new -
    x, where x is the model that the update was mixed into.

    The mean cosine is between x_new - x and the model's movement in the K versions after the
    update's: around 0 or below, the other updates undid this one. Updates followed by fewer than K
    versions don't count. For models with more than 65,536 numbers, that many evenly spaced ones are
    used.
    """
    from fedstream.history import journal_text as pages
    from fedstream.history.report import as_json as text
    from fedstream.journal import counted_bytes, opened
    from fedstream.journal.contributions import stats as measured
    from fedstream.journal.errors import ONLY_SUMS

    sort = named("--sort", sort, pages.NAMES)
    with (
        recorded_programs(path, trust=trust, changed=changed),
        opened(path) as chain,
        _bar("stats", counted_bytes(chain), quiet=as_json) as read,
    ):
        shares = measured(chain, ahead, read)
        masked = any(one.head.masked for one in chain)
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
            f"{ONLY_SUMS}: a single one has no norm, distance and cosine"
            if masked
            else f"{used - weighted} of {used} updates were recorded without their weights: norms, "
            "distances and cosines are those of the others"
        )
