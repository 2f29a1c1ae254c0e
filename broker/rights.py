"""What each role may do in Redis: its keys, and its commands. For users by ACL (Redis 7).

A service has a user of its own, so that Redis itself holds the boundaries of the pipeline: a
trainer can't write a model, the queue or the lineage, and nobody but the updater publishes. What is
said here follows from what the services do; commands inside scripts are checked like any others,
and of a script's declared keys Redis asks for both rights. Nobody has EVAL: what runs inside Redis
is what is in ``broker/lua``.

Trainers have a user for each site, whose trainers trust each other. It can append to the site's own
inbox, take the site's own tasks, write its own updates, and write and read its own workspaces; of
the rest it sees the run's record, the newest version, the models, and what a strategy remembers of
the devices that it was given tasks of. It can load no script: services do. Neither an inbox nor an
update can it read, claim or delete, what it wrote itself included.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fedstream.broker.keys import POOL, Keys
from fedstream.broker.scripts import Script, prelude

# What every connection of ours may need: PING and ROLE look at Redis, the others set it up.
_CONNECTION = (
    "ping", "role", "select", "client|setname", "cluster|slots", "asking",
)  # fmt: skip
_TASKS = "{tasks}"  # the streams of a site's tasks
_BLOB_READ = ("hget", "hmget")
_BLOB_WRITE = ("multi", "exec", "hset", "pexpire")

# What `look` counts and reads, in one step, where it does not count inboxes; of most of it only the
# length.
_LOOKED_AT = (
    "run", "head", "open", "admitted", "queue", "triggers", "sites", "counts", "alive",
    "kept", "dead", "owners", "pool", "events", "models",
)  # fmt: skip


@dataclass(frozen=True)
class Rights:
    """Of one role: names of keys as in :class:`Keys`, with ``*`` for what a name goes on with."""

    both: tuple[str, ...] = ()  # read and written
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # sent by the service itself
    scripts: tuple[str, ...] = ()  # whose commands are needed too
    apart: tuple[Rights, ...] = ()  # selectors: other commands for other keys


RIGHTS = {
    "coordinator": Rights(
        both=(
            "triggers", "inbox:*", "tasks", "tasks:*", "open", "admitted", "ended", "counts",
            "events", "trainers", "alive", "owners", "pool", "rates", "letters", "sites",
            "update:*", "queued:*", "control:*", "quarantine:*",
        ),
        reads=("run", "head", "lineage", "kept", "models", "model:*", "device:*"),
        writes=("queue", "dead"),
        commands=(
            "xgroup|create", "xreadgroup", "time", "zrangebyscore", "zmscore", "hgetall", "info",
            "type", "sadd", *_BLOB_READ,
        ),
        scripts=(
            "dispatch", "close_round", "admit", "announce", "relay", "bury", "claim", "reap",
            "leave", "measure", "settle_unserved", "find_lost", "drop_copies", "mend",
            "look", "scan", "withdraw", "age_letters",
        ),
        apart=(  # what sites never let expire
            Rights(reads=("update:*", "workspace:*", "tasks:*"), commands=("pttl", "strlen")),
            Rights(writes=("update:*", "workspace:*", "tasks:*"), commands=("pexpire",)),
        ),
    ),
    "scheduler": Rights(
        both=("leader:scheduler", "tokens", "open", "counts"),
        reads=_LOOKED_AT,
        writes=("triggers",),
        commands=("xread", "xadd", "info"),
        scripts=("acquire", "hold", "yield", "trigger", "look"),
    ),
    "updater": Rights(
        both=(
            "leader:updater", "tokens", "run", "head", "kept", "lineage", "model:*", "models",
            "queue", "open", "admitted", "ended", "counts", "events", "queued:*", "device:*",
            "rates", "letters",
        ),
        reads=_LOOKED_AT,
        writes=("dead",),
        commands=(
            "xread", "xrange", "xlen", "hget", "hgetall", "hkeys", "hlen", "hstrlen", "persist",
            "zrange", "unlink", "info", *_BLOB_READ, *_BLOB_WRITE,
        ),
        scripts=(
            "acquire", "hold", "yield", "create", "commit", "hand_out", "retire", "bury", "look",
        ),
    ),
    "evaluator": Rights(
        both=("run",),  # it ends a run whose target is reached
        reads=("head", "models", "model:*"),
        writes=("events",),
        commands=("xread", "hgetall", *_BLOB_READ),
        scripts=("tell", "finish_run"),
    ),
    "trainer": Rights(
        reads=("run", "head", "model:*", "control:{site}/*"),
        commands=("hgetall", "info", "multi", "exec", "discard", *_BLOB_READ),
        apart=(
            Rights(both=(_TASKS, "update:{site}/*"), commands=("evalsha",)),
            Rights(
                both=(_TASKS,),
                commands=(
                    "xgroup|create", "xreadgroup", "xpending", "xclaim", "xrange", "xack", "xdel",
                ),
            ),
            Rights(writes=("update:{site}/*",), commands=("hset", "hexists", "pexpire")),
            Rights(both=("workspace:{site}/*",), commands=("getrange", "set", "unlink")),
            Rights(writes=("inbox:{site}",), commands=("xadd", "xlen", "exists")),
        ),
    ),
    # Whoever looks (status, top, doctor), mends (dead) and deletes (purge). `replay --redis` plays
    # scheduler and trainer.
    "operator": Rights(
        both=("*",),
        commands=(
            "script|kill", "function|kill", "client|kill",
            "scan", "exists", "type", "ttl", "pttl", "time", "info", "dbsize", "config|get",
            "acl|whoami", "acl|dryrun", "acl|getuser", "acl|log", "memory|usage", "client|list",
            "slowlog|get",
            "get", "hget", "hgetall", "hlen", "hmget", "hkeys", "hvals", "zrange", "zcard",
            "zscore", "zrangebyscore", "xlen", "xrange", "xrevrange", "xread", "xpending",
            "xinfo|stream", "xinfo|groups", "xinfo|consumers", "xadd", "xdel", "xgroup|create",
            "xreadgroup", "unlink", "hincrby", *_BLOB_WRITE,
        ),
        scripts=(
            "look", "measure", "bury", "retry", "tell", "acquire", "hold", "yield", "trigger",
            "claim", "finish_task", "find_lost", "mend", "may",
        ),
    ),
}  # fmt: skip
ROLES = tuple(RIGHTS)

# Of Redis's own parts where there are sentinels: named by Redis's documentation, they have no keys
# of ours in particular. A user is made only for those that have a password.
PARTS = {
    "replica": "+psync +replconf +ping",
    "sentinel": (
        "allchannels +multi +exec +ping +info +role +publish +subscribe +slaveof +replicaof "
        "+config|rewrite +client|setname +client|kill +script|kill"
    ),
}


def commands(rights: Rights) -> list[str]:
    """Every command that these rights allow, inside scripts as well, in lower case."""
    found = {*rights.commands}
    for name in rights.scripts:
        script = Script(name)
        found |= {*_sent(script.body), "evalsha", "script|load"}
        found |= {"exists"} if script.undeclared else set()
    return sorted(found)


def rights_of(role: str, site: str = POOL) -> list[Rights]:
    """What a role may do; of a trainer, those of this site. Each stands by itself."""
    tasks = ("tasks", f"tasks:{POOL}/*") if site == POOL else (f"tasks:{site}/*",)

    def named(names: Iterable[str]) -> tuple[str, ...]:
        each = (tasks if name == _TASKS else (name.format(site=site),) for name in names)
        return tuple(name for some in each for name in some)

    whole = RIGHTS[role]
    first = replace(whole, commands=(*_CONNECTION, *whole.commands), apart=())
    return [
        replace(one, both=named(one.both), reads=named(one.reads), writes=named(one.writes))
        for one in (first, *whole.apart)
    ]


def rules(role: str, run: str, site: str = POOL) -> str:
    """A role's rights in a run, as Redis's ACL has them: what follows the user's password.

    ``site``: of a trainer.
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


def user_of(site: str) -> str:
    """The name of the user of a site's trainers."""
    return "trainer" if site == POOL else f"trainer-{site}"


def acl(run: str, passwords: dict[str, str], sites: Mapping[str, str] | None = None) -> str:
    """An ACL file for a server that serves this run: a user for each role and site, and no others.

    ``passwords`` are by role, those of ``sites`` besides the pool by site; only their hashes are in
    the file. ``health`` may say PING, which a script that does not end keeps from being answered,
    and needs no password: a probe has none to show.
    """
    # Nobody can be `default`, but Redis reads an append-only file with its rights: without them it
    # drops what scripts wrote (redis/redis#14541).
    lines = ["user default off resetpass allkeys allchannels +@all"]
    for name in (*ROLES, *PARTS):
        if name in passwords:
            digest = hashlib.sha256(passwords[name].encode()).hexdigest()
            may = rules(name, run) if name in RIGHTS else f"resetkeys -@all {PARTS[name]}"
            lines.append(f"user {name} on #{digest} {may}")
    for site, password in (sites or {}).items():
        digest = hashlib.sha256(password.encode()).hexdigest()
        lines.append(f"user {user_of(site)} on #{digest} {rules('trainer', run, site)}")
    lines.append("user health on nopass resetkeys resetchannels -@all +ping")
    return "\n".join(lines) + "\n"


_CALL = re.compile(
    r"redis\.p?call\('([A-Z]+)'(?:, '(CREATE|CONSUMERS|DELCONSUMER|GROUPS|STREAM)')?"
)


def _sent(script: str) -> Iterator[str]:
    """The commands in a script, and in what it calls of the prelude."""
    shared = prelude()
    waiting, known = [script], set[str]()
    while waiting:
        body = waiting.pop()
        for command, part in _CALL.findall(body):
            yield f"{command}|{part}".lower() if part else command.lower()
        for name in shared.keys() - known:
            if re.search(rf"\b{name}\(", body):
                known.add(name)
                waiting.append(shared[name])
