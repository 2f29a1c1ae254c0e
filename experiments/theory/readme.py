"""README.md, written from the results: every figure in it comes from a file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.theory.claims import TheoremClaim

_BEFORE = """\
# Theory against measurement

`python -m experiments.theory [name ...]` measures, draws and writes this file; names are
{names}.
The server's rules are the classes of `fedstream.strategies`, as in production, in float32; devices
are quadratics in d = 10 with known constants ([quadratics.py](quadratics.py)), or sums of cosines
([weak.py](weak.py)), so that each bound is a number; `schedule` trains on the digits. Settings are
at the head of each module. Where a text names no centres, noise or starting point, ours are there
too: figures are comparable with another program's, not equal. A verdict needs five repeats, and
every comparison more than two standard errors from 0 ([reproduction.py](../reproduction.py)).

| source | claim | measured | verdict |
|---|---|---|---|
"""

_AFTER = """
What 'held' covers: these settings, not the theorem in general; a bound that is far above what is
measured holds easily, and the pictures show how far. The floor of AFA-CD depends on the direction u
of the centres through |A u|^2: another u than ours (all ones, of length 1) gives another figure by
the same formula. AFA-CS keeps the sum of the devices' vectors as it changes and computes it anew
every 100 versions: its error ends at what float32 rounds off between two of these.

AFA-CS at a fixed m: each G serves for about M/m versions at weight 1/M, so its noise enters with
weight 1/m as in AFA-CD, and the step sqrt(M/T) of corollary 3 makes it larger. The first term of
the bound does fall with M, which is why the error may fall before it rises.

What no setting can show: a bound of FedAsync's theorems 1 and 2 below the starting gap, since their
proofs bound that gap by less than their last term; the workshop edition's theorem 4.3, whose
condition on rho fails at every first local step; AFL's theorem 4 with noise for ever, since
condition (7) bounds E|G_t|^2 from below; and an error of order tau^2 in AFL's corollaries, where
small steps give order tau.
"""


def page(
    settings: Mapping[str, Sequence[TheoremClaim]], how: Mapping[str, Mapping[str, Any]]
) -> str:
    """The README: one row per claim, the pictures, and how each setting was measured."""
    rows = [claim for claims in settings.values() for claim in claims]
    table = "".join(
        f"| {_cell(row.source)} | {_cell(row.claim)} | {_cell(row.measured)} | {row.verdict} |\n"
        for row in rows
    )
    shown = "".join(
        f"\n## {name}\n\n![{name}](results/{name}.png)\n\n"
        f"{about['seconds']} s on {about['date']}, {about['processor']}, one core; "
        f"Python {about['python']}, numpy {about['numpy']},\n"
        f"commit {about.get('commit', 'not recorded')}: [{name}.json](results/{name}.json)\n"
        for name, about in how.items()
    )
    names = ", ".join(f"`{name}`" for name in settings)
    return _BEFORE.format(names=names) + table + _AFTER + shown


def _cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("*", "\\*")
