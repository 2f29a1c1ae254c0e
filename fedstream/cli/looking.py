"""Commands that inspect or delete a run, and the one that makes Redis's ACL file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import POOL, check_name
from fedstream.cli.options import (
    AsJson,
    Config,
    DataRoot,
    RunName,
    Sets,
    TrustRecorded,
    Url,
    ask,
    leave,
    settings_of,
)
from fedstream.runtime.signals import INTERRUPTED
from fedstream.terminal import confirm, line, verbatim


def status(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="ask a coordinator's HTTP there, and not Redis"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How a run is now."""
    from fedstream.observe import report
    from fedstream.observe import status as page

    if url is None:
        about = ask(config, redis, run, page.read)
    elif redis is not None:
        raise ConfigError("--url asks a coordinator, --redis asks Redis: one of the two")
    else:
        settings = settings_of(config)
        about = page.fetch(url, run or settings.run.name, settings.http.token)
    if as_json:
        verbatim(report.as_json(about) + "\n")
    else:
        page.show(about)


def top(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="print one picture and end")] = False,
) -> None:
    """Watch a run: rate, staleness, queue, trainers, accuracy. `q` or Ctrl-C ends it."""
    from fedstream.observe.top import watch

    ask(config, redis, run, lambda client, keys: watch(client, keys, once=once))


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of a run, or its journal")],
    begin: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="V", help="only what came after version V"),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="V", help="stop at this version")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="another rule: strategy.alpha=0.3; repeatable"
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="device=N", help="leave a device's updates out; repeatable"),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="measure every N-th version and the last; 0: none. If not given: none, or about "
            "10 if another rule is replayed",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="to measure by")] = None,
    trust: TrustRecorded = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="instead of the run's own run.toml"),
    ] = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="for table and picture; DIR/replay-N if not given"),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="feed the updates to coordinator and updater there"),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="with --redis: the run there, not run.name"),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="X",
            help="with --redis: at most X times as fast as it was; 1 if not given",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a run's versions again from its journal, and compare them bit for bit.

    With --set or --without: by another rule on the same updates, beside the recorded one. Nobody is
    trained again: --without keeps what the other devices' recorded updates inherited from the one
    that is left out.

    To measure by a task of one's own takes --task, or --trust-recorded-task: loading a task runs
    its program, and a recording may be a stranger's.

    With --redis: the recorded updates go through live services, which have no scheduler and no
    trainers.

    Exit codes: 0 identical, 130 interrupted, 1 not identical or damaged, 2 a wrong command line.
    """
    from fedstream.observe import report
    from fedstream.recordings import replay as page

    if redis is not None:
        from fedstream.journal.inspection import journal_of
        from fedstream.operate import feed

        others = {
            "--from": begin, "--until": until, "--set": sets, "--without": without, "--out": out,
            "--evaluate-every": evaluate_every, "--task": task, "--data-root": data_root,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value not in (None, [])]:
            raise ConfigError(
                f"--redis feeds all updates as they were, to live services: without {given[0]}"
            )
        settings = settings_of(config, redis=redis, run=run)
        fed, to_the_end = feed.feed(settings, journal_of(folder), 1.0 if speed is None else speed)
        if as_json:
            verbatim(report.as_json(feed.numbers(fed)) + "\n")
        else:
            feed.show(fed)
        leave(0 if to_the_end else INTERRUPTED)
    for option, value in (("--run", run), ("--speed", speed)):
        if value is not None:
            raise ConfigError(f"{option} is for --redis URL, which is not given")
    code = page.replay(
        folder, begin=begin, until=until, every=evaluate_every, sets=sets or (),
        without=without or (), config=config,
        task=task, trusted=trust, data_root=data_root, out=out, as_json=as_json,
    )  # fmt: skip
    leave(code)


def doctor(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Look at Redis, the run in it, the journal's volume, the task and its data: what to change.

    Exit codes: 0 nothing is wrong, warnings aside; 1 there are problems; 2 a wrong configuration.
    """
    from fedstream.doctor import checkup as page
    from fedstream.observe import report

    settings = settings_of(config, sets, redis=redis, run=run)
    # Redis's address and the run's name alone don't say how the run should be configured.
    configured = config is not None or bool(settings.model_fields_set - {"redis", "run"})
    findings = asyncio.run(page.examine(settings, configured=configured))
    if as_json:
        verbatim(report.as_json(page.summary(findings)) + "\n")
    else:
        page.show(findings)
    leave(page.exit_code(findings))


def purge(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="without asking")] = False,
    force: Annotated[bool, typer.Option("--force", help="even while services are alive")] = False,
) -> None:
    """Delete everything that a run has in Redis."""
    from fedstream.operate import presence

    name = run or settings_of(config).run.name
    if not yes:
        there = ask(
            config, redis, run, lambda client, keys: presence.purgeable(client, keys, force=force)
        )
        confirm(f"Delete run {name!r}, {there} keys?")
    deleted = ask(
        config, redis, run, lambda client, keys: presence.purge(client, keys, force=force)
    )
    line(f"{deleted} keys of run {name!r} deleted")


def acl(
    config: Config = None,
    run: RunName = None,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a site besides the pool; repeatable"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="instead of printing it")] = None,
) -> None:
    """Make Redis's ACL file: a user for every role, with only the keys and commands it needs.

    Passwords come from the environment: FEDSTREAM_PASSWORD_COORDINATOR, and so on for SCHEDULER,
    UPDATER, EVALUATOR, TRAINER and OPERATOR; the file holds their hashes. Redis 7 or later.

    Without --site the users are those of the sites in coordinator.sites. The trainers of site
    hospital-a are the user trainer-hospital-a, with FEDSTREAM_PASSWORD_SITE_HOSPITAL_A.
    """
    from fedstream.coordinator.sites import served
    from fedstream.operate import acl as page

    settings = settings_of(config)
    name = check_name("--run", run) if run else settings.run.name
    known = served(settings.coordinator.sites, settings.coordinator.trusted_sites)
    sites = site or [one for one in known if one != POOL]
    text = page.file_of(name, os.environ, sites)
    if out is None:
        verbatim(text)
    else:
        page.write(out, text)
