"""`fedstream doctor`'s checks of a private run: policy, devices' keys, helper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from fedstream.core.errors import BadMessage, ConfigError
from fedstream.doctor.findings import Finding, not_checked, ok, problem, warning
from fedstream.operate.agreement import in_words
from fedstream.private.policy import KeyRoster, PrivacyPolicy, private_key
from fedstream.private.sealing import BadSeal, EpochKey
from fedstream.private.settings import client_context
from fedstream.runtime.process import read_regular
from fedstream.settings.private_runs import private_form
from fedstream.strategies.private_sums import check_layout

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from fedstream.core.layout import Layout
    from fedstream.private.settings import PrivateSettings
    from fedstream.settings.config import Settings

_WITHIN_S = 10.0
_HELPER = "privacy helper"


async def findings(
    settings: Settings, layout: Layout | None, role: str | None, now: float
) -> list[Finding]:
    """Check a configuration with ``private.policy``, as ``role`` uses it (None: all of them).

    ``layout``: the task's, if it loaded. ``now``: seconds since 1970.
    """
    private = settings.private
    try:
        policy = private.read()
        assert policy is not None  # noqa: S101  (the configuration names it)
        private_form(settings, settings.strategy, policy)
        if layout is not None:
            check_layout(layout, policy)
    except ConfigError as error:
        return [problem("privacy policy", str(error))]
    said = f"{policy.digest[:12]}: {in_words(policy, private.delta)}"
    found = [ok("privacy policy", said)]
    if role in (None, "trainer"):
        found += _keys(private, policy, settings.trainer.owns)
    if role in (None, "updater"):
        found.append(await _helper(private, policy, now))
    return found


def _keys(
    private: PrivateSettings, policy: PrivacyPolicy, owns: tuple[int, ...]
) -> Iterator[Finding]:
    about = "devices' keys"
    if private.keys is None:
        yield not_checked(
            about, "private.keys is not set: trainers need it, devices have their own"
        )
        return
    folder = Path(private.keys)
    try:
        keys = _public_keys(folder)
    except ConfigError as error:
        yield problem(about, str(error))
        return
    if missing := [device for device in owns if device not in keys]:
        yield problem(
            about,
            f"private.keys = {private.keys!r} has no {missing[0]}.pem, and trainer.owns names "
            f"device {missing[0]}",
            "put the device's private key there",
        )
    raw = {device: key.public_bytes_raw() for device, key in keys.items()}
    there = f"private.keys = {private.keys!r} has keys of {len(keys)} devices"
    if KeyRoster(raw).digest == policy.roster:
        yield ok(about, f"{there}, those of the policy's roster")
    elif owns:
        yield not_checked(about, f"{there}; whether the roster has them, the helper says")
    else:
        yield warning(
            about,
            f"{there}, and they are not the policy's roster: the helper opens no sum with a device "
            "of another key, or of none",
            "get the keys of the roster, or a policy with these; if this is a part of them, set "
            "trainer.owns",
        )


def _public_keys(folder: Path) -> Mapping[int, Ed25519PublicKey]:
    """The devices' keys in a folder. Raises ConfigError."""
    keys = {}
    try:
        for file in folder.iterdir():
            if file.suffix == ".pem" and file.stem.isdecimal():
                key = private_key(read_regular(file), f"private.keys: {file}")
                keys[int(file.stem)] = key.public_key()
    except OSError as error:
        raise ConfigError(f"private.keys = {str(folder)!r}: {error.strerror}") from error
    return keys


async def _helper(private: PrivateSettings, policy: PrivacyPolicy, now: float) -> Finding:
    """Fetch the helper's key, and ask for no sum, to see whether the helper would answer."""
    if private.helper is None:
        return problem(_HELPER, "private.helper is not set", "set it to the helper's URL")
    url, sent = private.helper.rstrip("/"), {}
    if private.token is not None:
        sent["Authorization"] = f"Bearer {private.token.get_secret_value()}"
    try:
        tls, limit = client_context(private), aiohttp.ClientTimeout(total=_WITHIN_S)
        async with aiohttp.ClientSession(timeout=limit) as session:
            async with session.get(f"{url}/v1/key", ssl=tls) as reply:
                status, body = reply.status, await reply.read()
            async with session.post(f"{url}/v1/open", data=b"", headers=sent, ssl=tls) as reply:
                opens = reply.status
    except ConfigError as error:
        return problem(_HELPER, str(error))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return problem(
            _HELPER,
            f"private.helper = {private.helper!r} can't be asked: {error or 'no answer'}",
            "start the helper, or correct the URL, private.ca or private.tls_cert",
        )
    if status != 200:
        return problem(_HELPER, f"private.helper = {private.helper!r} answers {status}")
    try:
        key = EpochKey.decode(body)
        key.check(policy, now)
    except (BadMessage, BadSeal) as error:
        return problem(
            _HELPER, f"{private.helper}: {error}", "helper and run must have one policy, and clocks"
        )
    if opens == 401:
        return problem(
            _HELPER, f"{private.helper} refuses private.token", "set it to the helper's http.token"
        )
    hours = (key.until - now) / 3600
    return ok(_HELPER, f"{private.helper} has our policy; its key is good for {hours:.0f} h more")
