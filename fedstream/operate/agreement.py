"""What the parties of a private run agree on: keys, roster and signed policy, in one folder.

The helper's owner signs the policy. Data owners have the devices' keys, and the roster of them.
:func:`agree` makes what is missing in the folder, so that an owner may sign another policy by the
same key, or a roster of devices that exist.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from fedstream.core.errors import ConfigError
from fedstream.private.accounting import epsilon
from fedstream.private.policy import KeyRoster, PrivacyPolicy, private_key, read_policy, signed
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.process import read_regular
from fedstream.settings.private_runs import private_form, refusal

if TYPE_CHECKING:
    from fedstream.core.layout import Layout
    from fedstream.settings.config import Settings

POLICY, ROSTER, KEYS = "policy.json", "roster.txt", "keys"
OWNER, HELPER, STORE, CONFIG = "owner.pem", "helper.pem", "helper.sqlite", "helper.toml"
_PORT = 8444
_UNKNOWN: Final = "0" * 64


@dataclass(frozen=True)
class Agreement:
    """A folder with a signed policy."""

    folder: Path
    policy: PrivacyPolicy
    owner: str  # Ed25519 public key

    @classmethod
    def read(cls, folder: Path) -> Agreement:
        """Read what :func:`agree` left in a folder. Raises ConfigError."""
        key = private_key(_content(folder / OWNER), str(folder / OWNER)).public_key()
        policy = read_policy(folder / POLICY, key, str(folder / POLICY))
        return cls(folder, policy, key.public_bytes_raw().hex())

    def of_run(self, settings: PrivateSettings) -> PrivateSettings:
        """The table ``[private]`` of a run under the policy."""
        files = {"policy": str(self.folder / POLICY), "keys": str(self.folder / KEYS)}
        return settings.model_copy(update={**files, "owner": self.owner})

    def configure_helper(self) -> None:
        """Write the helper's configuration, with the folder's present place. Raises OSError."""
        files = {"policy": POLICY, "roster": ROSTER, "key": HELPER, "store": STORE}
        here = self.folder.absolute()
        table = {key: str(here / name) for key, name in files.items()} | {"owner": self.owner}
        text = tomli_w.dumps({"helper": table, "http": {"port": _PORT}})
        (self.folder / CONFIG).write_text(text, encoding="utf-8")


def draft(
    settings: Settings, layout: Layout, devices: int, *, roster: str = _UNKNOWN, helper: str = ""
) -> PrivacyPolicy:
    """The policy of a run's configuration, model and number of devices.

    ``roster``, ``helper``: as in the policy; by default those of nobody, to check the rest. Raises
    ConfigError if there can be no such run.
    """
    from fedstream.strategies.private_sums import check_layout, check_sums

    if why := refusal(settings):
        raise ConfigError(why)
    terms, rule = settings.private.terms, settings.strategy
    check_sums(rule)
    in_a_sum = max(1, rule.batch // settings.private.buckets)
    least = in_a_sum if terms.min_batch is None else terms.min_batch
    if least < 2:
        raise ConfigError(
            f"strategy.name = {rule.name!r} has sums of {least} update: a private run needs "
            f"sums of at least 2: raise strategy.{rule.batch_key} or private.terms.min_batch, or "
            "take fewer private.buckets"
        )
    if devices < rule.batch:
        raise ConfigError(
            f"strategy.{rule.batch_key} = {rule.batch}, but {devices} devices take part, and a "
            "private sum has one update of each at most: lower it"
        )
    if devices < terms.bands * in_a_sum:
        raise ConfigError(
            f"private.terms.bands = {terms.bands}: a device takes part in one of {terms.bands} "
            f"sums of {in_a_sum}, so {terms.bands * in_a_sum} devices are needed, and {devices} "
            "take part: lower it"
        )
    try:
        policy = PrivacyPolicy.finest(
            **terms.model_dump(exclude={"min_batch"}),
            roster=roster,
            helper=helper or _UNKNOWN,
            parameters=layout.parameters,
            min_batch=least,
            max_batch=max(least, in_a_sum),
        )
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"private.terms: {said}") from error
    check_layout(layout, policy)
    private_form(settings, rule, policy)
    return policy


def agree(
    folder: Path, settings: Settings, layout: Layout, devices: int, roster: Path | None = None
) -> Agreement:
    """Make a folder's policy, and the keys that it lacks.

    ``roster``: of devices that exist; None: keys are made for devices 0 to ``devices`` - 1. Raises
    ConfigError, OSError.
    """
    if (folder / POLICY).exists():
        raise ConfigError(f"{folder / POLICY} exists: name another folder")
    draft(settings, layout, devices)
    (folder / KEYS).mkdir(mode=0o700, parents=True, exist_ok=True)
    owner, helper = _key(folder / OWNER), _key(folder / HELPER)
    if roster is None:
        keys = [_key(folder / KEYS / f"{device}.pem").public_key() for device in range(devices)]
        known = KeyRoster.of(keys)
    else:
        known = KeyRoster.parsed(_content(roster), str(roster))
        if missing := set(range(devices)) - known.keys.keys():
            raise ConfigError(
                f"{roster}: has no key of device {min(missing)}: the run's {devices} devices "
                "(task.devices) are numbered from 0"
            )
    policy = draft(
        settings,
        layout,
        devices,
        roster=known.digest,
        helper=helper.public_key().public_bytes_raw().hex(),
    )
    public = owner.public_key().public_bytes_raw().hex()
    (folder / ROSTER).write_bytes(known.text)
    made = Agreement(folder, policy, public)
    made.configure_helper()
    (folder / POLICY).write_bytes(signed(policy, owner))  # last: the rest is there
    return made


def in_words(policy: PrivacyPolicy, delta: float) -> str:
    """What a policy allows, for people: sums, clip and differential privacy."""
    sums = f"sums of at least {policy.min_batch} updates of norm {policy.clip:g} at most"
    if not policy.sigma:
        return f"{sums}; no noise (private.terms.sigma), so no differential privacy"
    most = most_epsilon(policy, delta)
    said = f"epsilon {most:.4g}" if math.isfinite(most) else "epsilon without a bound"
    return (
        f"{sums}; sigma {policy.sigma:g}: {said} at delta {delta:g} for a device in "
        f"{policy.participations:,} sums, the most allowed (private.terms.participations)"
    )


def most_epsilon(policy: PrivacyPolicy, delta: float) -> float:
    """Epsilon at ``delta`` of a device that has taken part as often as the policy allows."""
    batches = policy.allowance // min(policy.weights) ** 2
    return epsilon(policy, policy.allowance, batches, delta)


def _content(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _key(file: Path) -> Ed25519PrivateKey:
    """The key in a file, which only its owner can read; made if there is no file."""
    if file.exists():
        return private_key(_content(file), str(file))
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
        made.write(pem)
    return key
