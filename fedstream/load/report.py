"""What a load found, as plain values and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedstream.terminal import cell, console, counted, line

if TYPE_CHECKING:
    from fedstream.load.laboratory import LoadReport
    from fedstream.load.tally import Latencies

_MEGA = 1e6


def plain(found: LoadReport) -> dict[str, Any]:
    """The report for JSON. Durations are in milliseconds, unless their names say seconds."""
    tally = found.tally
    return {
        "devices": found.devices,
        "seconds": found.seconds,
        "updates_per_s": tally.receipts["admitted"] / found.seconds,
        "answers": {
            route: {
                str(status): count
                for (other, status), count in sorted(tally.answers.items())
                if other == route
            }
            for route in sorted({route for route, _ in tally.answers})
        },
        "latency_ms": {route: _ms(one) for route, one in sorted(tally.latencies.items())},
        "task_ms": _ms(tally.turns),
        "receipts": _counts(tally.receipts),
        "refusals": _counts(tally.refusals),
        "events": _counts(tally.events),
        "ended": _counts(tally.ended),
        "bytes": {"sent": tally.sent, "received": tally.received},
        "laboratory": {
            "lag_ms": _ms(tally.lag), "processor_s": found.processor_s, "memory": found.memory,
        },
    }  # fmt: skip


def _ms(found: Latencies) -> dict[str, float]:
    return {
        "count": found.count,
        "p50": 1000 * found.quantile(0.5),
        "p99": 1000 * found.quantile(0.99),
        "max": 1000 * found.most_s,
    }


def _counts(found: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(found.items()) if count}


def show(report: Mapping[str, Any]) -> None:
    """Print a report, as :func:`plain` returns it."""
    _show_routes(report)
    for what in ("receipts", "refusals", "events", "ended"):
        if report[what]:
            line()
            line({"ended": "devices that ended early"}.get(what, what))
            for name, count in report[what].items():
                line(f"  {count:>8}  {name}")
    seconds, lag = report["seconds"], report["laboratory"]["lag_ms"]
    sent, received = (report["bytes"][way] / _MEGA for way in ("sent", "received"))
    line()
    line(
        f"{counted(report['devices'], 'device')}, {seconds:.1f} s: "
        f"{report['updates_per_s']:.1f} updates/s admitted; sent {sent:.1f} MB, "
        f"received {received:.1f} MB"
    )
    line(
        f"the laboratory took {report['laboratory']['processor_s']:.1f} s of processor time and "
        f"{report['laboratory']['memory'] / _MEGA:.0f} MB, and was late by {lag['p99']:.1f} ms "
        f"(p99), at most {lag['max']:.1f} ms"
    )


def _show_routes(report: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("request")
    table.add_column("answers")
    for name in ("p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right")
    rows = []
    for route, found in report["latency_ms"].items():
        answers = report["answers"][route].items()
        rows.append((route, "  ".join(f"{status}: {count}" for status, count in answers), found))
    rows.append(("offer to receipt", str(report["task_ms"]["count"]), report["task_ms"]))
    for route, answers, found in rows:
        times = (f"{found[name]:.1f}" for name in ("p50", "p99", "max"))
        table.add_row(cell(route), cell(answers), *times)
    console().print(table)
