"""`fedstream plan`: what a number of devices over HTTPS needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstream.broker.errors import ConfigError
from fedstream.cli.options import AsJson
from fedstream.terminal import console, line, verbatim

if TYPE_CHECKING:
    from fedstream.planning import Fleet, Forecast, Rules, StepCosts


_LEAST = 0.01  # smaller numbers are shown as below this


def plan(
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="how many have enrolled")],
    parameters: Annotated[
        int, typer.Option(metavar="P", min=1, help="of the model, float32")
    ] = 61_706,
    model_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="wire.model: what a task downloads")
    ] = "f32",
    update_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="wire.update: what it uploads")
    ] = "f32",
    changes: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="of a model's bytes that what changed in it takes; default: as measured for its "
            "format; 1: whole models are sent (gateway.changes_bytes = 0)",
        ),
    ] = None,
    batch: Annotated[
        float, typer.Option(metavar="N", help="updates that make a version, as with fedbuff")
    ] = 1.0,
    online: Annotated[
        float, typer.Option(metavar="SHARE", help="of the time that a device is present")
    ] = 0.25,
    tasks_a_day: Annotated[
        float, typer.Option(metavar="N", help="tasks of a device in a day")
    ] = 1.0,
    sessions_a_day: Annotated[
        float, typer.Option(metavar="N", help="times a day that a device connects anew")
    ] = 2.0,
    train_s: Annotated[
        float, typer.Option(metavar="S", help="that a task takes on a device")
    ] = 60.0,
    peak: Annotated[
        float, typer.Option(metavar="X", help="the busiest hour's traffic over the mean")
    ] = 2.0,
    full: Annotated[
        float, typer.Option(metavar="SHARE", min=0.01, max=1, help="of a core that may be used")
    ] = 0.6,
    per_replica: Annotated[
        int, typer.Option(metavar="N", min=1, help="devices present at a gateway's replica")
    ] = 20_000,
    address_arrivals: Annotated[
        float,
        typer.Option(
            metavar="N",
            min=0.01,
            help="gateway.address_arrivals: new connections a second that a gateway takes from an "
            "address",
        ),
    ] = 200.0,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="what `python -m benchmarks.gateway` measured on your machine"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what devices over HTTPS need: requests, bytes, cores, replicas. Contacts nobody.

    From what each step cost where it was measured; prints all that it assumes.
    """
    from fedstream.planning import (
        CHANGES,
        Fleet,
        Rules,
        StepCosts,
        bytes_of,
        forecast,
    )
    from fedstream.wire import format_of

    fleet = Fleet(
        devices, bytes_of(parameters, model_format), bytes_of(parameters, update_format),
        changes=CHANGES.get(format_of(model_format).kind, 1.0) if changes is None else changes,
        batch=batch, online=online, tasks_a_day=tasks_a_day, sessions_a_day=sessions_a_day,
        train_s=train_s, peak=peak,
    )  # fmt: skip
    each = StepCosts() if costs is None else StepCosts.measured(_read(costs))
    rules = Rules(full=full, devices=per_replica, address_arrivals=address_arrivals)
    found = forecast(fleet, each, rules)
    if as_json:
        told = {
            "fleet": asdict(fleet), "costs": asdict(each), "rules": asdict(rules),
            "forecast": asdict(found),
        }  # fmt: skip
        verbatim(json.dumps(told, indent=2) + "\n")
        return
    _show(found)
    _show_arrivals(found, rules)
    _show_assumptions(fleet, each, rules)


def _read(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs {file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--costs {file}: not the results of `python -m benchmarks.gateway`")
    return found


def rows(found: Forecast) -> dict[str, str]:
    """A forecast as people read it: values by what they are of."""
    return {
        "devices present": _many(found.present),
        "check-ins": f"{_many(found.check_ins)}/s",
        "tasks": f"{_many(found.tasks)}/s",
        "heartbeats": f"{_many(found.heartbeats)}/s",
        "new connections": f"{_many(found.arrivals)}/s",
        "tokens": f"{_many(found.tokens)}/s",
        "downloads that are changes": f"{found.changes:.1%}",
        "models, down": f"{_many(found.down_gb)} GB a day",
        "updates, up": f"{_many(found.up_gb)} GB a day",
        "in the busiest hour, down": f"{_many(found.down_mbit)} Mbit/s",
        "in the busiest hour, up": f"{_many(found.up_mbit)} Mbit/s",
        "Redis's commands": f"{_many(found.redis_commands)}/s",
        "Redis's memory": f"{_many(found.redis_gb)} GB",
        **{f"cores, {role}": _many(one) for role, one in found.cores.items()},
        "gateways": f"{found.replicas:,}",
        "a gateway's memory": f"{found.replica_gb:.2f} GB",
    }


def _show(found: Forecast) -> None:
    _table(rows(found))
    line()
    most = _many(found.most_tasks_a_day)
    if found.runs == 1:
        line(f"One run takes this, and up to {most} tasks a day of a device.")
    else:
        fewer = f"ask each device for {most} tasks a day at most, or " if most != "0" else ""
        line(
            "One run does not take this: its updater and Redis work on one core each. To change "
            f"that, {fewer}divide the devices over {found.runs} runs."
        )


def _show_arrivals(found: Forecast, rules: Rules) -> None:
    if found.replica_arrivals <= rules.address_arrivals:
        return
    most, asked = _many(rules.address_arrivals), _many(found.replica_arrivals)
    line(
        f"A gateway takes {most} new connections a second from an address, and this asks {asked} "
        "of each. If many devices share an address, raise gateway.address_arrivals, or set "
        "gateway.proxies if it is your proxy's."
    )


def _show_assumptions(fleet: Fleet, costs: StepCosts, rules: Rules) -> None:
    line()
    line("Assumed:")
    _table(
        {
            "a task": f"{_many(fleet.model_bytes)} bytes down, {_many(fleet.update_bytes)} up, "
            f"{fleet.train_s:g} s of training, a heartbeat every {fleet.heartbeat_s:g} s",
            "a device": f"present {fleet.online:.0%} of the time, {fleet.tasks_a_day:g} tasks and "
            f"{fleet.sessions_a_day:g} connections a day",
            "a model": f"{1 / fleet.batch:.3g} versions for an update; what changed in it takes "
            f"{fleet.changes:.0%} of its bytes and a gateway {costs.changes_ms_per_mb:.2f} ms for "
            f"a MB of it, if the older one is among the newest {rules.models >> 20} MiB of models",
            "the busiest hour": f"{fleet.peak:g} times the mean; rates and cores are of that hour",
            "a check-in": f"waits {fleet.poll_s:g} s, and the next comes {fleet.retry_s:g} s later",
            "a gateway": f"{rules.devices} devices, {rules.full:.0%} of a core, {rules.spare} to "
            f"spare, {rules.address_arrivals:g} new connections a second from an address",
            "gateway's processor time": f"{costs.arrival_ms:.2f} ms for a connection with its "
            f"token, {costs.check_in_ms:.2f} ms for a check-in, {costs.beat_ms:.2f} ms for a "
            "heartbeat",
            "a task's processor time": "; ".join(
                f"{role} {one.ms:.2f} ms + {one.ms_per_mb:.2f} ms/MB"
                for role, one in costs.tasks().items()
            ),
            "gateway's memory": f"{costs.gateway_mb:.0f} MB + {costs.device_kb:.0f} kB for a "
            "device that is present",
            "Redis": f"{costs.task_commands:.1f} commands for a task, "
            f"{costs.check_in_commands:.2f} ({costs.check_in_redis_ms:.2f} ms) for a check-in, "
            f"{costs.token_redis_ms:.2f} ms for a token; {costs.registered_bytes:.0f} bytes for a "
            f"device, {costs.models_kept} models, updates for a second",
        }
    )


def _table(rows: dict[str, str]) -> None:
    from fedstream.observe.display import two_columns

    console().print(two_columns(rows.items()))


def _many(number: float) -> str:
    """A number for people: three digits, with commas above a thousand, and nothing tiny."""
    if 0 < number < _LEAST:
        return f"below {_LEAST}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
