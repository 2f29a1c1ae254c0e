"""Commands that inspect or delete a run, check a deployment, make ACL files, and list plug-ins."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedstream.cli.options import (
    AsJson,
    ChangedRules,
    Config,
    DataRoot,
    MeasuredTask,
    RecordedConfig,
    RunName,
    Sets,
    StrategyName,
    TaskName,
    TrustRecorded,
    Url,
    ask,
    live_settings,
    recorded_programs,
    settings_of,
)
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL
from fedstream.runtime.process import INTERRUPTED
from fedstream.terminal import cell, confirm, console, line, verbatim


def status(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="ask the coordinator at this URL instead of Redis"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the current state of a run."""
    from fedstream.history import report
    from fedstream.history import status as page

    if url is None:
        about = ask(config, redis, run, page.read)
    elif redis is not None:
        raise ConfigError("--url asks a coordinator and --redis asks Redis: give only one")
    else:
        from fedstream.coordinator.access import tokens_of

        # Without the table redis, as Redis is not asked.
        asked = ("run.name", "http.token", "http.token_file")
        settings = live_settings(config, redis=None, run=run, keys=asked)
        tokens = tokens_of(settings.http)
        token = tokens.now()[0] if tokens is not None else None
        about = page.fetch(url, settings.run.name, token)
    if as_json:
        verbatim(report.as_json(about) + "\n")
    else:
        page.show(about)


def top(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="print one snapshot and exit")] = False,
) -> None:
    """Watch a run: rate, staleness, queue, trainers, accuracy. Quit with q or Ctrl-C."""
    from fedstream.history.top import watch

    journal = Path(live_settings(config, redis=redis, run=run).journal.dir)
    ask(config, redis, run, lambda client, keys: watch(client, keys, journal, once=once))


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder of a run or of its journal")
    ],
    begin: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="V", help="start after version V"),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="V", help="stop at this version")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="replay with another rule, as in strategy.alpha=0.3; repeatable",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="device=N", help="leave out this device's updates; repeatable"),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="measure every N-th version and the last; 0: none. Default: none, or about 10 "
            "versions with --set or --without",
        ),
    ] = None,
    task: MeasuredTask = None,
    strategy: StrategyName = None,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    config: RecordedConfig = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for the table and picture; default: DIR/replay-N"),
    ] = None,
    skip_update_digests: Annotated[
        bool,
        typer.Option(
            "--skip-update-digests",
            help="don't check the digest of every update; versions are still compared",
        ),
    ] = False,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="feed the updates to the live services of this Redis"),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="with --redis: name of the run there, instead of run.name"
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="X",
            help="with --redis: feed at most X times as fast as recorded; default: 1",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a run's versions from its journal and compare them bit for bit.

    With --strategy, --set or --without, also apply another rule to the same updates and compare
    the two. Devices don't train again: with --without, the other devices' recorded updates keep the
    influence of the device that is left out.

    To measure with your own task, give --task or --trust-recorded-code: loading a task runs its
    code, and the recording may come from a stranger. So does loading the recording's strategy, if
    that isn't built in.

    With --redis, feed the recorded updates to a live coordinator and updater, without a scheduler
    or trainers.

    Exit codes: 0 identical, 130 interrupted, 1 different or damaged, 2 wrong command line.
    """
    from fedstream.history import replay as page
    from fedstream.history import report

    if redis is not None:
        from fedstream.journal import journal_of
        from fedstream.operate import feed

        others = {
            "--from": begin,
            "--until": until,
            "--set": sets,
            "--strategy": strategy,
            "--without": without,
            "--out": out,
            "--evaluate-every": evaluate_every,
            "--task": task,
            "--data-root": data_root,
            "--skip-update-digests": skip_update_digests or None,
        }
        if given := [name for name, value in others.items() if value not in (None, [])]:
            raise ConfigError(
                f"--redis feeds all updates unchanged to live services: leave out {given[0]}"
            )
        settings = live_settings(config, redis=redis, run=run)
        fed, to_the_end = feed.feed(settings, journal_of(folder), 1.0 if speed is None else speed)
        if as_json:
            verbatim(report.as_json(feed.numbers(fed)) + "\n")
        else:
            feed.show(fed)
        raise typer.Exit(0 if to_the_end else INTERRUPTED)
    for option, value in (("--run", run), ("--speed", speed)):
        if value is not None:
            raise ConfigError(f"{option} needs --redis URL")
    with recorded_programs(folder, trust=trust, changed=changed):
        code = page.replay(
            folder,
            strategy=strategy,
            begin=begin,
            until=until,
            every=evaluate_every,
            sets=sets or (),
            without=without or (),
            config=config,
            task=task,
            trusted=trust,
            data_root=data_root,
            out=out,
            check_updates=not skip_update_digests,
            as_json=as_json,
        )
    raise typer.Exit(code)


def doctor(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    task: TaskName = None,
    sets: Sets = None,
    trust: TrustRecorded = False,
    as_json: AsJson = False,
) -> None:
    """Check Redis, the run in it, the journal's volume, the task and its data.

    Says what to change. Loading your own task or strategy runs its code, and a file may come from a
    stranger: name it (--task, --set), or trust the file of --config. The file of FEDSTREAM_CONFIG
    is trusted, as the services here run its code.

    Exit codes: 0 no problems (warnings don't count), 1 problems found, 2 wrong configuration.
    """
    from fedstream.doctor import checkup as page
    from fedstream.history import report

    own = config is not None and str(config) == os.environ.get("FEDSTREAM_CONFIG")
    settings = settings_of(config, sets, trusted=trust or own, redis=redis, run=run, task=task)
    # Redis's address and the run's name alone don't say how the run should be configured.
    configured = config is not None or bool(settings.model_fields_set - {"redis", "run"})
    findings = asyncio.run(page.examine(settings, configured=configured))
    if as_json:
        verbatim(report.as_json(page.summary(findings)) + "\n")
    else:
        page.show(findings)
    raise typer.Exit(page.exit_code(findings))


def purge(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="don't ask for confirmation")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="purge even while services are running")
    ] = False,
) -> None:
    """Delete all of a run's keys from Redis."""
    from fedstream.operate import presence

    name = live_settings(config, redis=redis, run=run).run.name
    for database, keys in ask(
        config, redis, run, lambda client, _keys: presence.elsewhere(client)
    ).items():
        there = presence.in_words(database, keys)
        line(f"fedstream: {there}: purge leaves that database alone", err=True)
    if not yes:
        count = ask(
            config, redis, run, lambda client, keys: presence.purgeable(client, keys, force=force)
        )
        confirm(f"Delete run {name!r} ({count} keys)?")
    deleted = ask(
        config, redis, run, lambda client, keys: presence.purge(client, keys, force=force)
    )
    line(f"{deleted} keys of run {name!r} deleted")


def acl(
    config: Config = None,
    run: RunName = None,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a site other than the pool; repeatable"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write it to this file instead of stdout")
    ] = None,
    passwords: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="read passwords from its files, named after the users, not from the environment",
        ),
    ] = None,
    reload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="make a password, in this file, for a user reload, who may have "
            "Redis read its users and certificates again",
        ),
    ] = None,
) -> None:
    """Write Redis's ACL file: a user per role, with access to only what the role needs.

    Passwords come from the environment: FEDSTREAM_PASSWORD_COORDINATOR, and likewise for SCHEDULER,
    UPDATER, EVALUATOR, TRAINER and OPERATOR. The file contains their hashes. Needs Redis 7 or
    later. A user may have several passwords, one a line, of which services use the first.

    Without --site, the sites are those in coordinator.sites. The trainers of a site hospital-a
    share the user trainer-hospital-a, whose password is FEDSTREAM_PASSWORD_SITE_HOSPITAL_A.

    If gateway.site is among the sites, the replicas of that gateway share the user gateway, with
    FEDSTREAM_PASSWORD_GATEWAY. A gateway of another site, such as clinics, is the user
    gateway-clinics, with FEDSTREAM_PASSWORD_SITE_CLINICS.
    """
    from fedstream.broker.client import Client
    from fedstream.coordinator.sites import served
    from fedstream.operate import acl as page

    settings = live_settings(config, redis=None, run=run)
    if database := Client(settings.redis, "").database:
        raise ConfigError(
            f"redis.url names database {database}, but a run whose Redis has users must be in "
            "database 0: users have the same rights in every database, and may not change theirs"
        )
    known = served(settings.coordinator.sites, settings.coordinator.trusted_sites)
    named = site or [one for one in known if one != POOL]
    gateways = [one for one in named if one == settings.gateway.site]
    trainers = [one for one in named if one not in gateways]
    secret = None if reload is None else secrets.token_hex(32)
    text = page.file_of(
        settings.run.name, os.environ, trainers, gateways, folder=passwords, reload=secret
    )
    if reload is not None and secret is not None:
        page.write(reload, secret)
    if out is None:
        verbatim(text)
    else:
        page.write(out, text)


def plugins(as_json: AsJson = False) -> None:
    """List the strategies, solvers and the like that a configuration can name.

    Lists built-in plug-ins, and those that installed packages announce by entry points; the latter
    are loaded to see whether they work. Plug-ins of your own need no list: path/to/file.py:Name,
    package.module:Name. Exit codes: 0 all work, 1 one doesn't.
    """
    from fedstream.settings.plugin_sources import listed

    found = list(listed())
    if as_json:
        verbatim(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("key", "name", "from"):
            table.add_column(column, no_wrap=True)
        for one in found:
            table.add_row(cell(one.key), cell(one.name), cell(one.source))
        console().print(table)
        for one in found:
            if one.problem:
                line(f"{one.key} = {one.name}: {one.problem}", err=True)
    if any(one.problem for one in found):
        raise typer.Exit(1)
