"""What each role may do in Redis: its keys, and its commands. For users by ACL (Redis 7).

A service has a user of its own, so that Redis itself holds the boundaries of the pipeline: a
trainer can't write a model, the queue or the lineage, and nobody but the updater publishes. What is
said here follows from what the services do; commands inside scripts are checked like any others,
and of a script's declared keys Redis asks for both rights.

All trainers share one user, so one may read or overwrite another's update, workspace or entry in
the register: updates are told apart by their digests, and what does not match is refused. They may
write any trigger, since anarchic devices write their own: one that lies can end a round early. The
ends of rounds in a stream of their own would not change that: a trainer may also take all tasks but
its own away, and wait for the time-out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from broker.keys import Keys
from broker.scripts import Script, prelude

# What every connection of ours may need: PING and ROLE look at Redis, the others set it up.
_CONNECTION = (
    "ping", "role", "select", "client|setname", "cluster|slots", "asking", "script|load", "eval",
    "evalsha",
)  # fmt: skip
_BLOB_READ = ("hget", "hmget")
_BLOB_WRITE = ("multi", "exec", "hset", "pexpire")

# What `look` counts and reads, in one step; of most of it only the length.
_LOOKED_AT = (
    "run", "head", "open", "admitted", "queue", "triggers", "uploads", "counts", "alive", "kept",
    "dead", "owners", "events", "models",
)  # fmt: skip


@dataclass(frozen=True)
class Rights:
    """Of one role: names of keys as in :class:`Keys`, with ``*`` for what a name goes on with."""

    both: tuple[str, ...] = ()  # read and written
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # sent by the service itself
    scripts: tuple[str, ...] = ()  # whose commands are needed too


RIGHTS = {
    "coordinator": Rights(
        both=(
            "triggers", "uploads", "tasks", "tasks:*", "open", "admitted", "ended", "counts",
            "events", "trainers", "alive", "owners", "rates", "update:*",
        ),
        reads=("run", "head", "lineage", "kept", "models", "model:*"),
        writes=("queue", "dead"),
        commands=(
            "xgroup|create", "xreadgroup", "time", "zrangebyscore", "zrange", "hgetall", "info",
            *_BLOB_READ,
        ),
        scripts=(
            "dispatch", "close_round", "admit", "bury", "claim", "reap", "leave", "measure",
            "settle_unserved", "look", "withdraw",
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
            "queue", "open", "admitted", "ended", "counts", "events", "update:*", "device:*",
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
        both=("tasks", "tasks:*", "trainers", "alive", "owners", "update:*", "workspace:*"),
        reads=("run", "head", "model:*", "device:*"),
        writes=("uploads", "triggers", "events"),
        commands=(
            "xgroup|create", "xreadgroup", "xadd", "zadd", "hgetall", "get", "set", "unlink",
            "info", *_BLOB_READ, *_BLOB_WRITE,
        ),
        scripts=("announce", "finish_task", "claim", "renew", "release", "tell"),
    ),
    # Whoever looks (status, top, doctor), mends (dead) and deletes (purge). `replay --redis` plays
    # scheduler and trainer.
    "operator": Rights(
        both=("*",),
        commands=(
            "scan", "exists", "type", "ttl", "pttl", "time", "info", "dbsize", "config|get",
            "acl|whoami", "acl|dryrun", "acl|getuser", "memory|usage", "client|list", "slowlog|get",
            "get", "hget", "hgetall", "hlen", "hmget", "hkeys", "hvals", "zrange", "zcard",
            "zscore", "zrangebyscore", "xlen", "xrange", "xrevrange", "xread", "xpending",
            "xinfo|stream", "xinfo|groups", "xinfo|consumers", "xadd", "xdel", "xgroup|create",
            "xreadgroup", "unlink", "hincrby", *_BLOB_WRITE,
        ),
        scripts=(
            "look", "measure", "bury", "retry", "tell", "acquire", "hold", "yield", "trigger",
            "claim", "finish_task",
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


def commands(role: str) -> list[str]:
    """Every command that a role may send, inside scripts as well, in lower case."""
    rights = RIGHTS[role]
    found = {*_CONNECTION, *rights.commands}
    for name in rights.scripts:
        script = Script(name)
        found |= {*_sent(script.body), *(("exists",) if script.undeclared else ())}
    return sorted(found)


def rules(role: str, run: str) -> str:
    """A role's rights in a run, as Redis's ACL has them: what follows the user's password."""
    keys, rights = Keys(run), RIGHTS[role]
    patterns = [
        *(f"~{keys.prefix}{name}" for name in rights.both),
        *(f"%R~{keys.prefix}{name}" for name in rights.reads if name not in rights.both),
        *(f"%W~{keys.prefix}{name}" for name in rights.writes if name not in rights.both),
    ]
    allowed = [f"+{command}" for command in commands(role)]
    return " ".join(["resetkeys", "resetchannels", *patterns, "-@all", *allowed])


def acl(run: str, passwords: dict[str, str]) -> str:
    """An ACL file for a server that serves this run: a user for each role, and no others.

    ``passwords`` are by role; only their hashes are in the file. ``health`` may say PING and needs
    no password: a probe has none to show.
    """
    # Nobody can be `default`, but Redis reads an append-only file with its rights: without them it
    # drops what scripts wrote (redis/redis#14541).
    lines = ["user default off resetpass allkeys allchannels +@all"]
    for name in (*ROLES, *PARTS):
        if name in passwords:
            digest = hashlib.sha256(passwords[name].encode()).hexdigest()
            may = rules(name, run) if name in RIGHTS else f"resetkeys -@all {PARTS[name]}"
            lines.append(f"user {name} on #{digest} {may}")
    lines.append("user health on nopass resetkeys resetchannels -@all +ping")
    return "\n".join(lines) + "\n"


_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, '(CREATE|CONSUMERS|DELCONSUMER)')?")


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
