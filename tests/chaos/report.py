"""Runs for people: a line when one ends, a table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments import machine
from fedstream.broker.keys import GATEWAY
from tests.chaos.account import USED
from tests.chaos.checks import LOST
from tests.chaos.driver import Outcome
from tests.chaos.formats import feeds_back

_COLUMNS = (
    "seed",
    "rule, sync",
    "faults",
    "versions",
    "admitted",
    "used",
    "refused",
    "admitted, gone with Redis",
    "open, given up with Redis",
    "taken back after a fall-back",
    "lost",
    "twice",
    "bits equal",
    "updaters fenced",
    "seconds",
)
_BITS = ("same_arithmetic", "same_bits", "same_vectors", "one_digest")  # the checks of them
_TOLD = 20  # complaints of a run: one fault of ours makes many


def told(outcome: Outcome) -> str:
    """A run in a line, and whatever did not hold."""
    said, plan = outcome.complaints, outcome.plan
    if not said:
        return f"{plan}: {len(plan.faults)} faults, {outcome.seconds:.0f} s, held"
    again = f"python -m tests.chaos --seed {plan.seed} --of {len(plan.faults)}"
    again += " --sentinels" if plan.sentinels else ""
    again += " --gateway" if plan.over_http else ""
    more = [f"and {len(said) - _TOLD} more"] if len(said) > _TOLD else []
    return "\n".join(
        [
            f"{plan}: FAILED, again by: {again}",
            f"  left in {outcome.folder}",
            *(f"  {fault}" for fault in plan.faults),
            *said[:_TOLD],
            *more,
        ]
    )


def came_over_http(outcome: Outcome) -> int:
    """Updates that were used and came through the gateway."""
    used = (one for one in outcome.facts.account.taken if one["outcome"] in USED)
    return sum(one["upload"].get("site") == GATEWAY for one in used)


def fed_back(outcome: Outcome) -> int:
    """Updates of the pool with error feedback that did not begin from zero."""
    return len(
        {
            (answer.upload["task"], answer.upload["attempt"])
            for life in outcome.facts.lives
            for answer in life.answers
            if answer.before is not None and feeds_back(answer.upload.get("format", "f32"))
        }
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """The results for people."""
    about = ", ".join(f"{name} {value}" for name, value in machine.described().items())
    faults = sum(len(outcome.plan.faults) for outcome in outcomes)
    failed = [str(outcome.plan.seed) for outcome in outcomes if outcome.complaints]
    verdict = f"NOT held: seeds {', '.join(failed)}" if failed else "all checks held"
    kinds: Counter[str] = Counter(
        str(fault.kind) for outcome in outcomes for fault in outcome.plan.faults
    )
    did: Counter[str] = Counter()
    for outcome in outcomes:
        did.update(outcome.did)
        later = {entry for life in outcome.facts.lives for entry in life.later}
        did["entries of a later release"] += len(later)
        did["updates used that came over HTTP"] += came_over_http(outcome)
        did["updates sent with what earlier ones left"] += fed_back(outcome)
    processes = "six processes"
    if any(outcome.plan.over_http for outcome in outcomes):
        processes = "eight processes, two replicas of a gateway and devices over HTTP"
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(_row(outcome) for outcome in outcomes)]
    return (
        "\n".join(
            [
                "# Faults",
                "",
                f"`make chaos`: pipelines of {processes}, two updaters on one journal among",
                "them, with faults at times drawn from a seed. docs/chaos.md says what they are,",
                "and what is checked after every run.",
                "",
                about,
                "",
                f"{faults} faults in {len(outcomes)} runs: {verdict}",
                "",
                "Faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())),
                "",
                "What some came to: " + ", ".join(f"{n} {what}" for what, n in sorted(did.items())),
                "",
                *("| " + " | ".join(row) + " |" for row in rows),
            ]
        )
        + "\n"
    )


def _row(outcome: Outcome) -> list[str]:
    plan, facts = outcome.plan, outcome.facts
    kinds = Counter(str(fault.kind) for fault in plan.faults)
    used = sum(record["outcome"] in USED for record in facts.account.taken)
    seen = {task for life in facts.lives for task in life.admitted} | facts.journalled
    found = Counter(complaint.partition(":")[0] for complaint in outcome.complaints)
    return [
        str(plan.seed),
        f"{plan.strategy}, {plan.sync}",
        ", ".join(f"{kind} {n}" if n > 1 else kind for kind, n in sorted(kinds.items())),
        str(facts.head[0]),
        str(len(seen)),
        str(used),
        str(facts.counts.get("refused", 0)),
        str(facts.lost_with_redis),
        str(facts.counts.get(LOST, 0)),
        str(sum(len(life.taken_back) for life in facts.lives)),
        str(found["none_lost"]),
        str(found["once"]),
        "no" if any(found[name] for name in _BITS) else "yes",
        str(outcome.fenced),
        f"{outcome.seconds:.0f}",
    ]
