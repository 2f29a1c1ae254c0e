"""`fedstream doctor`'s check of each role's rights in Redis.

Commands are only checked, never executed. All functions are pure, except for :func:`allowed`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.base import Rights
from fedstream.broker.ledger.operator import MAY
from fedstream.broker.rights import ROLES, commands
from fedstream.broker.rights import rights_of as parts
from fedstream.core.errors import BrokerError
from fedstream.doctor.findings import Finding, not_checked, ok, problem

# Each command with complete sample arguments; it is only checked, never executed. K: a key.
_SAMPLES: dict[str, tuple[str, ...]] = {
    "acl|dryrun": ("default", "ping"),
    "acl|getuser": ("default",),
    "acl|log": (),
    "acl|whoami": (),
    "asking": (),
    "client|kill": ("ID", "1"),
    "client|list": (),
    "copy": ("K", "K"),
    "client|setname": ("x",),
    "cluster|slots": (),
    "config|get": ("save",),
    "dbsize": (),
    "discard": (),
    "function|kill": (),
    "del": ("K",),
    "evalsha": ("0", "1", "K"),
    "exec": (),
    "exists": ("K",),
    "get": ("K",),
    "hdel": ("K", "x"),
    "hexists": ("K", "x"),
    "hget": ("K", "x"),
    "hgetall": ("K",),
    "hincrby": ("K", "x", "1"),
    "hkeys": ("K",),
    "hrandfield": ("K",),
    "hlen": ("K",),
    "hmget": ("K", "x"),
    "hset": ("K", "x", "x"),
    "hstrlen": ("K", "x"),
    "hscan": ("K", "0"),
    "hsetnx": ("K", "x", "x"),
    "hvals": ("K",),
    "getrange": ("K", "0", "0"),
    "info": ("memory",),
    "memory|usage": ("K",),
    "multi": (),
    "persist": ("K",),
    "pexpire": ("K", "1"),
    "ping": (),
    "pttl": ("K",),
    "rename": ("K", "K"),
    "role": (),
    "sadd": ("K", "x"),
    "scan": ("0",),
    "scard": ("K",),
    "script|kill": (),
    "smembers": ("K",),
    "srem": ("K", "x"),
    "script|load": ("return 1",),
    "set": ("K", "x"),
    "slowlog|get": (),
    "strlen": ("K",),
    "time": (),
    "ttl": ("K",),
    "type": ("K",),
    "unlink": ("K",),
    "xack": ("K", "x", "0-1"),
    "xadd": ("K", "*", "x", "x"),
    "xclaim": ("K", "x", "x", "0", "0-1"),
    "xdel": ("K", "0-1"),
    "xgroup|create": ("K", "x", "$"),
    "xgroup|delconsumer": ("K", "x", "x"),
    "xinfo|consumers": ("K", "x"),
    "xinfo|groups": ("K",),
    "xinfo|stream": ("K",),
    "xlen": ("K",),
    "xpending": ("K", "x"),
    "xrange": ("K", "-", "+"),
    "xread": ("STREAMS", "K", "0"),
    "xreadgroup": ("GROUP", "x", "x", "STREAMS", "K", ">"),
    "xrevrange": ("K", "+", "-"),
    "xtrim": ("K", "MINID", "0"),
    "zadd": ("K", "1", "x"),
    "zcard": ("K",),
    "zcount": ("K", "0", "1"),
    "zlexcount": ("K", "-", "+"),
    "zmscore": ("K", "x"),
    "zrange": ("K", "0", "1"),
    "zrangebylex": ("K", "-", "+"),
    "zrangebyscore": ("K", "0", "1"),
    "zrem": ("K", "x"),
    "zremrangebyrank": ("K", "0", "1"),
    "zscore": ("K", "x"),
}
_READERS = ("hget", "hgetall", "hexists", "get", "xlen", "xrange", "pttl")
_BOTH = ("xreadgroup", "hset", "set", "xadd")  # for roles that may not send scripts
_WRITERS = ("xadd", "hset", "hincrby", "pexpire")


@dataclass(frozen=True)
class Asked:
    """A command that a role must be allowed to send: in words for people, and complete."""

    what: str
    command: tuple[str, ...]


def _whole(command: str, key: str) -> tuple[str, ...]:
    arguments = (key if one == "K" else one for one in _SAMPLES[command])
    return (*command.upper().split("|"), *arguments)


def required(role: str, keys: Keys, redis: RedisSettings, site: str | None = None) -> list[Asked]:
    """A role's required rights: each command on one of its keys, and each key."""
    return [asked for one in parts(role, site) for asked in _required(one, keys, redis)]


def _required(rights: Rights, keys: Keys, redis: RedisSettings) -> list[Asked]:
    clustered, watched = redis.cluster, redis.sentinel is not None
    needed = {"cluster|slots": clustered, "asking": clustered, "role": watched}
    may = [command for command in commands(rights) if needed.get(command, True)]
    names = {
        kind: [name.replace("*", "doctor") for name in listed]
        for kind, listed in (
            ("both", rights.both),
            ("reads", rights.reads),
            ("writes", rights.writes),
        )
    }
    own = keys.prefix + next(name for listed in names.values() for name in listed)
    found = [Asked(one.replace("|", " ").upper(), _whole(one, own)) for one in may]
    of_kind = {
        # Redis requires read and write access to all keys of a script.
        "both": next((one for one in ("evalsha", *_BOTH) if one in may), ""),
        "reads": next((one for one in _READERS if one in may), ""),
        "writes": next((one for one in _WRITERS if one in may), ""),
    }
    words = {"both": "to use", "reads": "to read", "writes": "to write"}
    for kind, listed in names.items():
        for name in listed:
            if kind == "both" or name not in names["both"]:
                key = keys.prefix + name
                found.append(Asked(f"{words[kind]} {key}", _whole(of_kind[kind], key)))
    return found


def rights_of(user: str, keys: Keys, redis: RedisSettings) -> tuple[str, list[Asked]]:
    """A Redis user's purpose, and the rights that it needs: those of a role, or of all services."""
    if user in ROLES:
        return f"fedstream {user}", required(user, keys, redis)
    role, _, site = user.partition("-")
    if role in ("trainer", "gateway") and site:
        return f"fedstream {role} of site {site}", required(role, keys, redis, site)
    services = (role for role in ROLES if role != "operator")
    everything = (asked for role in services for asked in required(role, keys, redis))
    return "every service", list({asked.command: asked for asked in everything}.values())


async def allowed(client: Client, asked: Sequence[Asked]) -> list[bool] | None:
    """Check which commands this connection's user may send, without executing them.

    None if the check is impossible. Redis 7 checks the commands inside a script; for older
    versions, they are queued in a discarded transaction.
    """
    packed = msgpack.packb([one.command for one in asked], use_bin_type=False)
    try:
        reply = await MAY(client, {}, packed)
    except BrokerError as error:
        if error.retriable:
            raise
    else:
        return [bool(one) for one in reply]
    try:
        await client.pipeline([("MULTI",), ("DISCARD",)])
    except BrokerError as error:
        if error.retriable:
            raise
        return None
    return [await _queued(client, one.command) for one in asked]


async def _queued(client: Client, command: tuple[str, ...]) -> bool:
    if command[0] in ("MULTI", "EXEC"):
        return True  # allowed() has just sent a transaction
    try:
        await client.pipeline([("MULTI",), command, ("DISCARD",)])
    except BrokerError as error:
        return refusal(error) is None
    return True


def judged(user: str, what: str, asked: Sequence[Asked], may: Sequence[bool] | None) -> Finding:
    """Check that a user has the rights its role needs."""
    about = f"rights of {user}"
    if may is None:
        return not_checked(about, "needs Redis 7 and EVALSHA, or MULTI and DISCARD")
    unmet = (one.what for one, good in zip(asked, may, strict=True) if not good)
    missing = list(dict.fromkeys(unmet))  # several roles may need the same command, on other keys
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return problem(
            about,
            f"may not {'; '.join(missing[:5])}{more}, which {what} needs",
            "allow that, as `fedstream acl` does",
        )
    return ok(about, f"may do what {what} needs")


def refusal(error: BrokerError) -> str | None:
    """The reason if the error is a missing right or unknown command; None otherwise."""
    text = str(error)
    if denied := re.search(r"no permissions to run the '([^']+)'", text):
        return f"may not {denied[1].upper().replace('|', ' ')}"
    found = re.search(r" (?:refuses: |(?=[Uu]nknown (?:sub)?command))(.*)", text)
    return found[1] if found else None
