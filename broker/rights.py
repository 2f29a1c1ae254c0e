"""Each role's rights in Redis: its keys and commands, for ACL users (Redis 7).

Each service has its own user, so Redis itself enforces the boundaries of the pipeline: a trainer
can't write a model, the queue or the lineage, and only the updater publishes. The rights follow
from what the services do. Redis checks commands inside scripts like any others, and requires read
and write access to a script's declared keys. Nobody has EVAL: only the scripts in ``broker/lua``
run inside Redis.

Trainers share one user per site, as a site's trainers trust each other. This user can append to the
site's inbox, take the site's tasks, write the site's updates, and write and read the site's
workspaces. Beyond that it can read the run's record, the newest version, the models, and a
strategy's state of the devices that the site was sent tasks for. It can't load scripts: services do
that. It can't read, claim or delete an inbox entry or an update, not even its own.

A gateway is a trainer of a site of its own that also keeps the register of its enrolled devices.
Its replicas share a user.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fedstream.broker.keys import GATEWAY, Keys
from fedstream.broker.ledger import (
    coordinator,
    evaluator,
    gateway,
    operator,
    scheduler,
    sinks,
    trainer,
    updater,
)
from fedstream.broker.ledger.base import Rights
from fedstream.broker.scripts import Script
from fedstream.broker.settings import in_lines
from fedstream.core.messages import POOL

# Commands that any of our connections may need: PING and ROLE as checks, TIME for the run's clock,
# the others for the handshake. Not SELECT: a user's key rights hold in every database, but clean-up
# covers only the run's database.
_CONNECTION = (
    "ping",
    "role",
    "time",
    "client|setname",
    "cluster|slots",
    "asking",
)

RIGHTS = {
    "coordinator": coordinator.RIGHTS,
    "scheduler": scheduler.RIGHTS,
    "updater": updater.RIGHTS,
    "evaluator": evaluator.RIGHTS,
    "trainer": trainer.RIGHTS,
    "gateway": gateway.RIGHTS,
    "sinks": sinks.RIGHTS,
    "operator": operator.RIGHTS,
}
ROLES = tuple(RIGHTS)
# Roles that many runs do without; each gets a user only if it has a password.
OPTIONAL = ("gateway", "sinks")

# Sites whose users are named after the role alone.
_OWN = {"trainer": POOL, "gateway": GATEWAY}

# Rights of Redis's own processes where sentinels are used, from Redis's documentation, and of the
# script that has a server read renewed passwords and certificates. They are not limited to our
# keys. A user is created only for those with a password.
PARTS = {
    "replica": "+psync +replconf +ping",
    "sentinel": (
        "allchannels +multi +exec +ping +info +role +publish +subscribe +slaveof +replicaof "
        "+config|rewrite +client|setname +client|kill +script|kill"
    ),
    "reload": "+acl|load +config|set",
}


def commands(rights: Rights) -> list[str]:
    """All commands that these rights allow, including those inside scripts, in lower case."""
    found = {*rights.commands}
    for script in rights.scripts:
        found |= {*_sent(script), "evalsha", "script|load"}
        found |= {"exists"} if script.undeclared else set()
    return sorted(found)


def rights_of(role: str, site: str | None = None) -> list[Rights]:
    """A role's rights: its own, then its selectors.

    ``site``: of trainers and gateways; None: the pool, or a run's only gateway.
    """
    site = site or (GATEWAY if role == "gateway" else POOL)
    tasks = ("tasks", f"tasks:{POOL}/*") if site == POOL else (f"tasks:{site}/*",)

    def named(names: Iterable[str]) -> tuple[str, ...]:
        each = (tasks if name == trainer.TASKS else (name.format(site=site),) for name in names)
        return tuple(name for some in each for name in some)

    whole = RIGHTS[role]
    first = replace(whole, commands=(*_CONNECTION, *whole.commands), apart=())
    return [
        replace(one, both=named(one.both), reads=named(one.reads), writes=named(one.writes))
        for one in (first, *whole.apart)
    ]


def rules(role: str, run: str, site: str | None = None) -> str:
    """A role's rights in a run as ACL rules, to be placed after the user's password.

    ``site``: of trainers and gateways.
    """
    first, *apart = (_rules(one, Keys(run).prefix) for one in rights_of(role, site))
    return " ".join(["resetkeys resetchannels", first, *(f"({one})" for one in apart)])


def _rules(rights: Rights, prefix: str) -> str:
    keys = [
        *(f"~{prefix}{name}" for name in rights.both),
        *(f"%R~{prefix}{name}" for name in rights.reads if name not in rights.both),
        *(f"%W~{prefix}{name}" for name in rights.writes if name not in rights.both),
    ]
    return " ".join([*keys, "-@all", *(f"+{command}" for command in commands(rights))])


def user_of(site: str, role: str = "trainer") -> str:
    """The name of the user that a site's trainers, or the replicas of its gateway, share."""
    return role if site == _OWN[role] else f"{role}-{site}"


def acl(
    run: str,
    passwords: dict[str, str],
    sites: Mapping[str, str] | None = None,
    gateways: Mapping[str, str] | None = None,
) -> str:
    """An ACL file for a server dedicated to this run, with a user for each role and site.

    ``passwords``: by role. ``sites``: passwords by site, for trainers of sites other than the pool.
    ``gateways``: passwords by site, for gateways whose site isn't named after the role. A user may
    have several passwords, one a line; the file contains only their hashes. The user ``health`` can
    only send PING (not answered while a script hangs) and has no password, since a probe can't
    supply one.
    """
    # The user `default` has no login, but Redis loads the append-only file with this user's rights
    # and would otherwise drop the writes of scripts (redis/redis#14541).
    lines = ["user default off resetpass allkeys allchannels +@all"]
    for name in (*ROLES, *PARTS):
        if name in passwords:
            may = rules(name, run) if name in RIGHTS else f"resetkeys -@all {PARTS[name]}"
            lines.append(f"user {name} on {_hashes(passwords[name])} {may}")
    for role, named in (("trainer", sites or {}), ("gateway", gateways or {})):
        for site, password in named.items():
            user = user_of(site, role)
            lines.append(f"user {user} on {_hashes(password)} {rules(role, run, site)}")
    lines.append("user health on nopass resetkeys resetchannels -@all +ping")
    return "\n".join(lines) + "\n"


def _hashes(password: str) -> str:
    """The hashes of the passwords in a secret, in the form of an ACL file."""
    return " ".join(f"#{hashlib.sha256(one.encode()).hexdigest()}" for one in in_lines(password))


_CALL = re.compile(
    r"redis\.p?call\('([A-Z]+)'(?:, '(CREATE|CONSUMERS|DELCONSUMER|GROUPS|STREAM|USAGE)')?"
)


def _sent(script: Script) -> Iterator[str]:
    """Find the commands in a script and in the prelude functions that it calls."""
    for command, part in _CALL.findall(script.shared + script.body):
        yield f"{command}|{part}".lower() if part else command.lower()
