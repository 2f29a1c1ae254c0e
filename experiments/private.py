"""``python -m experiments.private [NAME ...]``: accuracy, privacy and speed of private runs.

Live runs of ``fedstream run``, with Redis, services and helper as processes of their own:

accuracy    plain FedBuff beside private sums, with and without noise, on the digits
audit       an estimate of epsilon from canary devices (:mod:`experiments.canaries`)
crowd       100 devices over HTTPS

A finished run has a row in ``runs.csv``, and is not run again. ``show`` writes table and picture
from the results so far; every other name ends with it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from experiments import canaries
from experiments.canaries import Scores
from experiments.machine import described
from experiments.program import commit
from experiments.reproduction import KeyValues, inline_toml
from experiments.showing import mean_and_deviation
from experiments.theory.pictures import FAINT, MAIN
from fedstream.history.pictures import STYLE
from fedstream.private import accounting

RESULTS = Path(__file__).parent / "results" / "private"
RUNS, SCORES, TABLE, PICTURE = "runs.csv", "scores.csv.gz", "table.md", "audit.png"
DELTA = 1e-5
_LIMIT_S = 280.0  # of a run
_PROGRAM = (sys.executable, "-m", "fedstream")


@dataclass(frozen=True, eq=False)
class LiveCell:
    """A configuration that is run once for each seed."""

    name: str
    sets: KeyValues
    options: Sequence[str] = ("--private",)
    seeds: int = 5

    @property
    def words(self) -> list[str]:
        """The options of `fedstream run`, without seed and folder."""
        given = [f"{key}={inline_toml(value)}" for key, value in self.sets.items()]
        return [*self.options, *(word for one in given for word in ("--set", one))]


@dataclass(frozen=True)
class LiveRow:
    """A run's result: a row of runs.csv. Accuracies are 0 for a task without test data."""

    cell: str
    seed: int
    last: float
    best: float
    late: float
    """mean accuracy over the last third of the measurements"""
    versions: int
    updates: int
    refused: int
    devices: int
    """that took part in a private run"""
    participations: int
    """of the device with most"""
    epsilon: float | None
    """of that device at DELTA, by the accountant; None: without bound"""
    seconds: float
    updates_per_s: float
    journal: str
    """what `fedstream journal verify` and `fedstream replay` said"""
    commit: str


_RULE: KeyValues = {"strategy.name": "fedbuff"}
_FEW: KeyValues = {
    **_RULE,
    "task.devices": 20,
    "strategy.buffer_size": 5,
    "run.versions": 150,
    "evaluator.every": 5,
}
_MANY: KeyValues = {
    **_RULE,
    "task.devices": 100,
    "task.partition.kind": "iid",
    "strategy.buffer_size": 50,
    "run.versions": 20,
    "evaluator.every": 1,
}
_AUDITED: KeyValues = {
    **_RULE,
    "task.name": "experiments.canaries:canaries",
    "strategy.buffer_size": 50,
    "run.versions": 18,
    "private.terms.clip": canaries.NORM,
    "private.terms.participations": 2,
}
ACCURACY = {  # and the cells that they are compared with
    LiveCell("plain", _FEW, ()): None,
    LiveCell("private", {**_FEW, "private.terms.clip": 20.0}): "plain",
    LiveCell("plain, K = 50", _MANY, (), seeds=3): None,
    LiveCell(
        "private with noise, K = 50",
        {**_MANY, "private.terms.sigma": 2.2, "private.terms.participations": 12},
        seeds=3,
    ): "plain, K = 50",
}
AUDITS = {  # by sigma
    sigma: LiveCell(
        f"audit, sigma = {sigma:g}", {**_AUDITED, "private.terms.sigma": sigma}, seeds=3
    )
    for sigma in (0.0, 1.0, 2.0, 4.0)
}
CROWD = LiveCell(
    "100 devices over HTTPS",
    {**_RULE, "task.devices": 100, "strategy.buffer_size": 20, "run.versions": 25},
    ("--private", "--devices-over-http", "100"),
    seeds=1,
)
CELLS = {"accuracy": (*ACCURACY,), "audit": (*AUDITS.values(),), "crowd": (CROWD,), "show": ()}


def main(names: Sequence[str]) -> int:
    """Run what is missing, and show all results; return the exit status."""
    if unknown := [name for name in names if name not in CELLS]:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(CELLS)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    there = {(row.cell, row.seed) for row in _rows()}
    for seed in range(max(cell.seeds for cell in ACCURACY)):
        for name in names or CELLS:
            for cell in CELLS[name]:
                if seed < cell.seeds and (cell.name, seed) not in there:
                    add(_run(cell, seed))
                    about = json.dumps(described(), indent=1)
                    (RESULTS / "about.json").write_text(about + "\n")
    show()
    return 0


def _run(cell: LiveCell, seed: int) -> LiveRow:
    """One run, in a folder that is deleted afterwards."""
    print(f"{cell.name}, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        seeded = ["run.seed"] if "task.name" in cell.sets else ["run.seed", "task.seed"]
        seeds = [word for key in seeded for word in ("--set", f"{key}={seed}")]
        _call("run", *cell.words, *seeds, "--out", str(out))
        verified = _call("journal", "verify", str(out)).splitlines()[-1]
        replayed = next(x for x in _call("replay", str(out)).splitlines() if "identical" in x)
        summary = json.loads((out / "summary.json").read_text())
        table = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
        measured = [float(row["accuracy"]) for row in table if row.get("accuracy")] or [0.0]
        told = json.loads(_call("privacy", "--json", str(out))) or {"devices": []}
        if cell in AUDITS.values():
            sent, unsent = canaries.scores(canaries.released(out / "journal"), _limit(cell))
            keep_scores(cell, seed, sent, unsent)
    return LiveRow(
        cell=cell.name,
        seed=seed,
        last=round(measured[-1], 4),
        best=round(max(measured), 4),
        late=round(float(np.mean(measured[-max(1, len(measured) // 3) :])), 4),
        versions=summary["versions"],
        updates=summary["updates"],
        refused=sum(summary["refused"].values()),
        devices=len(told["devices"]),
        participations=max((device["sums"] for device in told["devices"]), default=0),
        epsilon=told.get("epsilon"),
        seconds=round(summary["seconds"], 1),
        updates_per_s=round(summary["updates_per_s"], 1),
        journal=f"{verified}; {replayed}",
        commit=commit(),
    )


def _call(*words: str) -> str:
    """Run a fedstream command; return its output. Raises CalledProcessError, TimeoutExpired."""
    done = subprocess.run(  # noqa: S603  (no words but ours)
        [*_PROGRAM, *words], check=True, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S
    )
    return done.stdout.strip()


def _limit(cell: LiveCell) -> int:
    """The policy's limit on a device's participations."""
    return int(str(cell.sets["private.terms.participations"]))


# raw results


def _rows() -> list[LiveRow]:
    if not (RESULTS / RUNS).exists():
        return []
    with (RESULTS / RUNS).open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> LiveRow:
    read: dict[str, Any] = {"str": str, "int": int, "float": float}
    read["float | None"] = lambda text: float(text) if text else None
    return LiveRow(
        **{field.name: read[str(field.type)](line[field.name]) for field in fields(LiveRow)}
    )


def add(row: LiveRow) -> None:
    """Write all rows, in the cells' order."""
    order = [cell.name for cells in CELLS.values() for cell in cells]
    rows = sorted([*_rows(), row], key=lambda one: (order.index(one.cell), one.seed))
    with (RESULTS / RUNS).open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(LiveRow)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(one) for one in rows)


def _score_lines() -> list[dict[str, str]]:
    if not (RESULTS / SCORES).exists():
        return []
    text = gzip.decompress((RESULTS / SCORES).read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def _all_scores() -> dict[str, tuple[Scores, Scores]]:
    """The audits' scores by cell: of canaries that took part, and of directions never sent."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for line in _score_lines():
        kinds = found.setdefault(line["cell"], ([], []))
        kinds[line["sent"] == "0"].append(float(line["cosine"]))
    return {cell: (np.array(sent), np.array(unsent)) for cell, (sent, unsent) in found.items()}


def keep_scores(cell: LiveCell, seed: int, sent: Scores, unsent: Scores) -> None:
    """Add an audit's scores to the raw results."""
    lines = _score_lines()
    for is_sent, scores in (("1", sent), ("0", unsent)):
        of = {"cell": cell.name, "seed": str(seed), "sent": is_sent}
        lines += [{**of, "cosine": f"{score:.4g}"} for score in scores]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    (RESULTS / SCORES).write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


# table and picture


def show() -> None:
    """Write the table and the picture of all results so far."""
    rows: dict[str, list[LiveRow]] = {}
    for row in _rows():
        rows.setdefault(row.cell, []).append(row)
    lines = [
        "# Private runs",
        "",
        f"By `python -m experiments.private`. Every run: [{RUNS}]({RUNS}), [{SCORES}]({SCORES}).",
        *_accuracy(rows),
        *_audit(rows),
        *_crowd(rows),
    ]
    (RESULTS / TABLE).write_text("\n".join(lines) + "\n")


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> list[str]:
    head = [" | ".join(columns), " | ".join(["---"] * len(columns))]
    body = [" | ".join(str(value) for value in line) for line in lines]
    return ["", f"## {title}", "", *(f"| {line} |" for line in [*head, *body]), ""]


def _accuracy(rows: dict[str, list[LiveRow]]) -> list[str]:
    lines, notes = [], []
    for cell, plain in ACCURACY.items():
        found = rows.get(cell.name, [])
        if not found:
            continue
        epsilons = [row.epsilon for row in found if row.epsilon is not None]
        most = max(row.participations for row in found)
        spent = f"{max(epsilons):.2f}" if epsilons else "none"
        figures = [mean_and_deviation([getattr(row, of) for row in found]) for of in _OF]
        lines.append([cell.name, len(found), *figures, most or "-", spent])
        others = {row.seed: row for row in rows.get(plain or "", [])}
        pairs = [(row, others[row.seed]) for row in found if row.seed in others]
        if pairs:
            apart = (mean_and_deviation(_differences(pairs, of), sign="+") for of in _OF)
            said = ", ".join(f"{of} {figure}" for of, figure in zip(_OF, apart, strict=True))
            notes.append(f"- {cell.name} against {plain}, seed by seed: {said}.")
    columns = ["FedBuff", "seeds", *_OF, "most sums of a device", "its epsilon"]
    return [*_table("Accuracy on the digits", columns, lines), *notes]


_OF = ("last", "best", "late")


def _differences(pairs: Sequence[tuple[LiveRow, LiveRow]], of: str) -> list[float]:
    return [getattr(one, of) - getattr(other, of) for one, other in pairs]


def _audit(rows: dict[str, list[LiveRow]]) -> list[str]:
    known, lines, titles = _all_scores(), [], {}
    scores = {sigma: known[cell.name] for sigma, cell in AUDITS.items() if cell.name in known}
    for sigma, (sent, unsent) in scores.items():
        cell = AUDITS[sigma]
        found = rows[cell.name][0].epsilon
        accountant = "no bound" if found is None else f"{found:.2f}"
        spent = _limit(cell) / (2 * sigma**2) if sigma else None
        exact = f"{accounting.gaussian_epsilon(spent, DELTA):.2f}" if spent else "no bound"
        estimates = [_estimated(by, sent, unsent) for by in _ESTIMATES]
        cosines = [mean_and_deviation(kind) for kind in (sent, unsent)]
        lines.append([f"{sigma:g}", sent.size, *cosines, *estimates, exact, accountant])
        noise = f"sigma {sigma:g}, epsilon {exact}" if sigma else "no noise"
        titles[sigma] = f"{noise}: estimated {estimates[1].partition(' ')[0]}"
    columns = ["sigma", "canaries", "cosine if sent", "if not sent", "estimate (95%)"]
    columns += ["with a common deviation", "of Gaussian noise", "accountant"]
    if scores:
        _draw(scores, titles)
    said = f"{canaries.LEARNERS} devices learn beside the canaries; delta {DELTA:g}."
    return [*_table("Audit by canaries", columns, lines), said, "", f"![Cosines]({PICTURE})"]


_ESTIMATES = (canaries.epsilon, canaries.common_epsilon)


def _estimated(by: Callable[[Scores, Scores, float], float], sent: Scores, unsent: Scores) -> str:
    low, high = canaries.interval(by, sent, unsent, DELTA)
    return f"{by(sent, unsent, DELTA):.2f} ({low:.2f} to {high:.2f})"


def _draw(scores: dict[float, tuple[Scores, Scores]], titles: dict[float, str]) -> None:
    """Histograms of the scores, without and with noise."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(8.0, 5.2), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True).flat
        edges = np.linspace(-0.1, max(sent.max() for sent, _ in scores.values()) + 0.02, 61)
        for axes, (sigma, (sent, unsent)) in zip(panels, scores.items(), strict=False):
            for values, colour, label in ((unsent, FAINT, "never sent"), (sent, MAIN, "took part")):
                axes.hist(values, edges, density=True, color=colour, alpha=0.75, label=label)
            axes.set_title(titles[sigma], fontsize=9)
            axes.set_yticks([])
        figure.axes[0].legend(fontsize=8)
        figure.supxlabel("cosine of a canary with the sums that it took part in", fontsize=9)
        figure.savefig(RESULTS / PICTURE, dpi=100, metadata={"Software": None})


def _crowd(rows: dict[str, list[LiveRow]]) -> list[str]:
    lines = [
        [
            row.versions,
            row.devices,
            row.updates,
            row.seconds,
            row.updates_per_s,
            row.refused,
            row.last,
        ]
        for row in rows.get(CROWD.name, [])
    ]
    columns = ["versions", "devices", "updates", "seconds", "updates/s", "refused", "accuracy"]
    notes = [f"Journal: {row.journal}." for row in rows.get(CROWD.name, [])]
    return [
        *_table(f"{CROWD.name}: `fedstream run {' '.join(CROWD.words)}`", columns, lines),
        *notes,
    ]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
