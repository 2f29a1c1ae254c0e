"""Devices over HTTPS in place of a local run's trainers: a gateway, its certificate, and devices.

All of it happens on this machine: the gateway listens on 127.0.0.1, its certificate is made for the
run, and each device is a process of its own with a key and an invite of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

from fedstream.broker.client import Client
from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import Keys
from fedstream.coordinator.rounds import Rounds
from fedstream.local.ports import is_answering
from fedstream.local.supervisor import Program
from fedstream.operate.enrolment import invite
from fedstream.settings.config import Settings

FOLDER = "devices"  # in a run's folder: certificates, the devices' keys and what they remember
HOST = "127.0.0.1"
GATEWAY = "gateway"  # its role and name
_CA, _PAIR = "ca.pem", "gateway.pem"
_NEEDED = ("cryptography", "jwt", "trustme")
_INVITED_S = 3600.0
_RATE = 10_000.0  # requests per second
_DRAIN_S = 10.0  # of a device: a step of training, and giving its task up


@dataclass(frozen=True)
class OverHttp:
    """The devices of one run that come over HTTPS, and their gateway."""

    count: int  # devices, numbered from 0
    folder: Path  # for their files; its content is deleted
    port: int  # the gateway's

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return f"https://{HOST}:{self.port}"

    def prepare(self) -> None:
        """Write the gateway's certificate and the authority that devices trust. Raises OSError."""
        import trustme

        rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        authority = trustme.CA(organization_name="fedstream run")
        pair = authority.issue_cert(HOST).private_key_and_cert_chain_pem
        (self.folder / _PAIR).touch(mode=0o600)
        pair.write_to_path(str(self.folder / _PAIR))
        authority.cert_pem.write_to_path(str(self.folder / _CA))

    def gateway(self, config: Path, drain_s: float) -> Program:
        """The gateway as a program."""
        sets = (f"http.host={HOST}", f"http.port={self.port}", "http.health_port=0")
        options = [word for one in sets for word in ("--set", one)]
        return Program(
            GATEWAY, GATEWAY, ("--name", GATEWAY, "--config", str(config), *options), drain_s
        )  # fmt: skip

    def is_open(self) -> bool:
        """Whether the gateway takes connections by now."""
        return is_answering(HOST, self.port)

    async def devices(self, client: Client, settings: Settings, config: Path) -> Sequence[Program]:
        """The devices as programs, with fresh invites. Raises NoRun, FedstreamError."""
        keys = Keys(settings.run.name)
        made = await invite(
            client, keys, settings.gateway.site, range(self.count), seconds=_INVITED_S
        )
        return [
            Program(
                f"device-{device}", "device",
                (
                    "--url", self.url, "--ca", str(self.folder / _CA),
                    "--key", str(self.folder / f"device-{device}.pem"), "--config", str(config),
                ),
                _DRAIN_S, ends=True,
                environment={"FEDSTREAM_INVITE": text},  # which `ps` doesn't show
            )
            for device, text in made.invites.items()
        ]  # fmt: skip


def configured(settings: Settings, count: int, out: Path) -> Settings:
    """The configuration of a run in ``out`` whose devices come over HTTPS.

    Raises ConfigError if they can't take part in it, or a package is missing.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"--devices-over-http: {' and '.join(missing)} not installed: "
            "pip install 'fedstream[demo]' adds what it needs"
        )
    policy, given = settings.policy, f"--devices-over-http {count}"
    if settings.strategy.controls:
        raise ConfigError(
            f"{given}: devices over HTTPS get no control variates, which strategy.name = "
            f"{settings.strategy.name!r} needs: choose another strategy"
        )
    if isinstance(policy, Rounds):
        if policy.k is not None and policy.k > count:
            raise ConfigError(
                f"{given}: a round takes {policy.k} devices (scheduler.policy.k): give at least "
                "so many"
            )
    elif policy.devices_decide:
        raise ConfigError(
            f"{given}: scheduler.policy.kind = {policy.kind!r} leaves triggering to the devices, "
            "and those over HTTPS wait to be asked: choose another policy"
        )
    gateway, coordinator = settings.gateway, settings.coordinator
    pair = str((out / FOLDER / _PAIR).absolute())
    # These devices share an address, and are as fast as this machine.
    rates = {"device_rate", "address_rate"} - gateway.model_fields_set
    gateway = gateway.model_copy(
        update={"tls_cert": pair, "tls_key": pair, **dict.fromkeys(rates, _RATE)}
    )
    update: dict[str, object] = {"gateway": gateway}
    if gateway.site not in (one.partition(":")[0] for one in coordinator.sites):
        sites = (*coordinator.sites, gateway.site)
        update["coordinator"] = coordinator.model_copy(update={"sites": sites})
    return settings.model_copy(update=update)
