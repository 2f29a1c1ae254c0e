"""`fedstream run --private`: a policy for the run, and a helper as a process of its own.

All parties' files are in the run's folder, under ``private``. So a run shows how parties work
together that do not trust one another; it keeps no secret from the owner of this machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from fedstream.core.errors import ConfigError
from fedstream.local.supervisor import Program
from fedstream.private import importing
from fedstream.private.settings import PrivateSettings
from fedstream.strategies import FedBuffSettings

if TYPE_CHECKING:
    from fedstream.core.layout import Layout
    from fedstream.settings.config import Settings

PRIVATE = "private"  # in a run's folder
_HELPER, _HOST = "helper", "127.0.0.1"


def configured(settings: Settings, out: Path, *, resume: bool) -> Settings:
    """The configuration of a private run in ``out``: with fedbuff by default.

    That of a resumed run has its policy again. Raises ConfigError.
    """
    _check_installed()
    if resume:
        from fedstream.operate.agreement import Agreement

        if not (out / PRIVATE).is_dir():
            raise ConfigError(
                f"--private: the run in {out} is not private, and --resume continues it as it is: "
                "leave --private out, or begin a run in another folder (--out)"
            )
        agreed = Agreement.read((out / PRIVATE).absolute())
        return settings.model_copy(update={"private": agreed.of_run(settings.private)})
    if settings.private.policy is not None:
        raise ConfigError(
            f"--private makes a policy, and private.policy = {settings.private.policy!r} names "
            "one: leave out either; private.terms are the terms of the one that is made"
        )
    if "strategy" not in settings.model_fields_set:
        settings = settings.model_copy(update={"strategy": FedBuffSettings()})
    return settings


def check_used(settings: Settings) -> None:
    """Raise ConfigError for keys that only private runs have, if the run is not private."""
    mine, usual = settings.private, PrivateSettings()
    for key in ("buckets", "terms"):
        if mine.policy is None and getattr(mine, key) != getattr(usual, key):
            raise ConfigError(
                f"private.{key} is set, but the run is not private: add --private, name a policy "
                "(private.policy), or leave the key out"
            )


def check(settings: Settings, layout: Layout, devices: int) -> None:
    """Raise ConfigError if there is no private run of these settings, whatever the keys."""
    from fedstream.operate.agreement import draft

    draft(settings, layout, devices)


@dataclass(frozen=True)
class LocalHelper:
    """The run's own helper."""

    folder: Path  # of the run's policy
    port: int
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def agreed(self, settings: Settings, layout: Layout, devices: int) -> Settings:
        """The configuration with this helper, and with a policy, made unless there is one.

        Raises ConfigError, OSError.
        """
        from fedstream.operate.agreement import Agreement, agree

        if settings.private.policy is None:
            found = agree(self.folder, settings, layout, devices)
        else:
            found = Agreement.read(self.folder)
            found.configure_helper()  # the folder may have moved
        private = found.of_run(settings.private)
        helper = {"helper": f"http://{_HOST}:{self.port}", "token": SecretStr(self.token)}
        return settings.model_copy(update={"private": private.model_copy(update=helper)})

    def program(self, drain_s: float) -> Program:
        """The helper as a program. It does not read the run's configuration."""
        from fedstream.operate.agreement import CONFIG

        sets = (f"http.host={_HOST}", f"http.port={self.port}", "http.health_port=0")
        options = [word for one in sets for word in ("--set", one)]
        config = str(self.folder / CONFIG)
        return Program(
            _HELPER,
            _HELPER,
            ("--name", _HELPER, "--config", config, "--set", "log.format=json", *options),
            drain_s,
            environment={"FEDSTREAM_HTTP__TOKEN": f'"{self.token}"'},
        )


def described(settings: Settings) -> Mapping[str, str]:
    """The policy of a run, for people; nothing if the run is not private."""
    if (policy := settings.private.read()) is None:
        return {}
    from fedstream.operate.agreement import in_words

    return {"privacy": f"policy {policy.digest[:12]}: {in_words(policy, settings.private.delta)}"}


def facts(settings: Settings) -> Mapping[str, Any] | None:
    """The policy of a run in numbers, for its summary; None if the run is not private."""
    if (policy := settings.private.read()) is None:
        return None
    from fedstream.operate.agreement import in_words, most_epsilon

    delta = settings.private.delta
    epsilon = most_epsilon(policy, delta)
    return {
        "policy": policy.digest,
        "min_batch": policy.min_batch,
        "clip": policy.clip,
        "sigma": policy.sigma,
        "participations": policy.participations,
        "epsilon": epsilon if isfinite(epsilon) else None,
        "delta": delta,
        "statement": in_words(policy, delta),
    }


def _check_installed() -> None:
    with importing("--private"):
        import fedstream.private.sealing  # noqa: F401
