"""How much an update weighs by its staleness: the strategy's own rule, asked once for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from fedstream.strategies import Strategy

_STEP = 7  # versions: by which a rule is asked again, to see whether it depends on the version
_SAME = 1e-9  # relative; less may come from the C library


@dataclass(frozen=True)
class WeightRule:
    """What a strategy gives an update that arrives now, by its staleness."""

    weights: tuple[float | None, ...]  # by staleness, as asked; None: the rule has no answer
    notes: tuple[str, ...]  # sentences: what else decides how far an update moves the model


def weight_rule(
    rule: Strategy, version: int, late: Sequence[int], *, last: int, samples: int
) -> WeightRule:
    """Ask a rule for the weights of updates that are so many versions late, in ascending order.

    ``version``: the newest; ``last``: the one at which the run ends; ``samples``: of a usual
    device. A rule of the user's own that raises gives no weights, and a note that says so.
    """
    base = max(version, late[-1])  # early in a run nothing can be that late yet
    try:
        asked = [float(rule.weigh(base, base - d, samples)) for d in late]
        notes = tuple(_notes(rule, late, asked, base, last, samples))
    except Exception as error:
        said = f"The rule could not be asked: it raised {type(error).__name__}: {error}"[:300]
        return WeightRule((None,) * len(late), (said,))
    weights = tuple(
        0.0 if rule.is_too_stale(d) else weight if isfinite(weight) else None
        for d, weight in zip(late, asked, strict=True)
    )
    return WeightRule(weights, notes)


def _notes(
    rule: Strategy, late: Sequence[int], usual: list[float], base: int, last: int, samples: int
) -> Iterator[str]:
    first = late[-1] + 1  # version at which something can be that late
    if all(usual[0] == weight for weight in usual):
        yield "The weight does not depend on staleness."
    others = {max(first, at) for at in (base + 1, base + _STEP, base // 2, last - 1)} - {base}
    if not all(_alike(usual, [rule.weigh(at, at - d, samples) for d in late]) for at in others):
        end = max(last - 1, first)
        fresh = rule.weigh(end, end, samples)
        yield (
            f"Adaptive: the weight also changes with the version. The line is for version "
            f"{base + 1:,}; for version {end + 1:,}, an update that is not late weighs {fresh:.4g}."
        )
    if not _alike(usual, [rule.weigh(base, base - d, 2 * samples + 1) for d in late]):
        yield (
            "Adaptive: the weight also depends on how many samples a device has. The line is for "
            f"{samples:,} samples."
        )
    if rule.by_steps:
        yield "What a device sends is also divided by its local steps and its learning rate."
    if rule.batch > 1:
        yield f"{rule.batch:,} updates make a version, each with its weight."
    if rule.max_staleness == 0:
        yield "Late updates are dropped."
    elif rule.max_staleness is not None:
        yield f"Updates that are more than {rule.max_staleness:,} versions late are dropped."


def _alike(some: list[float], others: list[float]) -> bool:
    return all(abs(a - b) <= _SAME * max(abs(a), abs(b)) for a, b in zip(some, others, strict=True))
