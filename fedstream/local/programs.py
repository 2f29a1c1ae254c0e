"""The services of a local run as programs: their arguments and their environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fedstream.local.supervisor import Program
from fedstream.settings.config import Settings
from fedstream.sinks.service import DRAIN_S

_OURS = ("FEDSTREAM_CONFIG", "FEDSTREAM_NAME")


def programs(
    settings: Settings, trainers: int, config: Path, port: int, *, changed_rules: bool = False
) -> list[Program]:
    """Services of a run, in starting order. ``changed_rules``: the updater accepts these."""

    def service(
        role: str, drain_s: float, *options: str, name: str = "", vital: bool = True
    ) -> Program:
        # Free ports: all services share one machine.
        file = ("--config", str(config), "--set", "http.port=0", "--set", "http.health_port=0")
        name = name or role
        return Program(name, role, ("--name", name, *file, *options), drain_s, vital)

    rules = ("--changed-rules",) if changed_rules else ()
    return [
        # First those that load torch, which takes longest.
        service("updater", settings.updater.drain_s, *rules),
        *(
            service("trainer", settings.trainer.drain_s, name=f"trainer-{n}")
            for n in range(1, trainers + 1)
        ),
        service("evaluator", settings.evaluator.drain_s),
        service("coordinator", settings.coordinator.drain_s, "--set", f"http.port={port}"),
        service("scheduler", settings.scheduler.drain_s),
        *(service("sinks", DRAIN_S, vital=False) for _ in settings.sinks[:1]),
    ]


def environment(environ: Mapping[str, str], settings: Settings, redis_url: str) -> dict[str, str]:
    """Environment of the services, without overrides: the resolved configuration contains those.

    Redis URL, passwords, token and secret are passed here, because `ps` must not show them; only
    the URL is also written to a file.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OURS and not (name.startswith("FEDSTREAM_") and "__" in name)
    }
    redis = settings.redis
    secrets = {
        "FEDSTREAM_REDIS__PASSWORD": redis.password,
        "FEDSTREAM_HTTP__TOKEN": settings.http.token,
        "FEDSTREAM_GATEWAY__SECRET": settings.gateway.secret,
        "FEDSTREAM_PAGE__OPERATOR_TOKEN": settings.page.operator_token,
        "FEDSTREAM_PAGE__OPERATOR_PASSWORD": settings.page.operator_password,
    }
    if redis.sentinel is not None:
        secrets["FEDSTREAM_REDIS__SENTINEL__PASSWORD"] = redis.sentinel.password
    known = {
        name: tomli_w.dumps({"": secret.get_secret_value()}).removeprefix('"" = ').strip()
        for name, secret in secrets.items()
        if secret is not None
    }
    return kept | known | {"FEDSTREAM_REDIS__URL": redis_url}
